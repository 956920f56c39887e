"""The tables of tiles: found by chip and shape, empty until measured, written by the autotuner."""

import json

import pytest

from pallas_kernels import autotune, tile_table
from pallas_kernels.bench import Shape
from pallas_kernels.grouped_gemm_tiles import Tiles

DEFAULT, OTHER = Tiles(), Tiles(columns=128, stages=6)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tile_table, "FOLDER", tmp_path)
    tile_table.load.cache_clear()
    yield tmp_path
    tile_table.load.cache_clear()


@pytest.mark.parametrize(
    ("kind", "chip"),
    [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA GB200", "b200"), ("NVIDIA L40S", None)],
)
def test_chips_go_by_their_names(kind, chip):
    assert tile_table.chip_of(kind) == chip


@pytest.mark.parametrize("chip", tile_table.CHIPS)
def test_a_committed_table_says_whether_it_was_measured(chip):
    """No figure without a measurement: entries only where `measured` says on what they were timed."""
    table = json.loads((tile_table.FOLDER / f"{chip}.json").read_text())
    assert bool(table["entries"]) == (table["measured"] is not None)
    assert all(Tiles(**entry["tiles"]) and entry["product"] in tile_table.PRODUCTS for entry in table["entries"])


def test_the_nearest_shape_decides(folder):
    assert tile_table.tiles_for("h200", "gemm", 64, 64, DEFAULT) == DEFAULT
    entry = {"product": "gemm", "depth": 2048, "width": 2048}
    tile_table.save("h200", {"device": "x"}, [entry | {"tiles": OTHER}, entry | {"width": 256, "tiles": DEFAULT}])
    assert tile_table.tiles_for("h200", "gemm", 2048, 1024, DEFAULT) == OTHER
    assert tile_table.tiles_for("h200", "gemm", 2048, 300, OTHER) == DEFAULT
    assert tile_table.tiles_for("h200", "weight_grad", 2048, 1024, DEFAULT) == DEFAULT
    assert tile_table.tiles_for("b200", "gemm", 2048, 1024, DEFAULT) == DEFAULT
    assert tile_table.tiles_for(None, "gemm", 2048, 1024, DEFAULT) == DEFAULT


def test_the_autotuner_writes_the_fastest_and_leaves_out_what_is_refused(folder, monkeypatch):
    monkeypatch.setattr(tile_table, "chip_of", lambda kind: "h200")

    def measure(product, shape, tiles, seed):
        if tiles.stages == 2:
            raise RuntimeError("too slow to be true")
        return 1e-6 * abs(tiles.panel - 16) + 1e-5 * tiles.columns

    lines = []
    path = autotune.autotune({"m": {"up_gate": Shape(2, 64, 128, 256)}}, 0, lines.append, measure)
    table = json.loads(path.read_text())
    assert {entry["product"] for entry in table["entries"]} == set(tile_table.PRODUCTS) and table["measured"]["jax"]
    assert tile_table.tiles_for("h200", "gemm", 128, 256, DEFAULT).panel == 16
    assert tile_table.tiles_for("h200", "gemm", 128, 256, DEFAULT).columns == 128
    assert any("refused, too slow" in line for line in lines)


@pytest.mark.parametrize("product", tile_table.PRODUCTS)
def test_candidates_fit_and_hold_the_default(product):
    assert Tiles(rows=128, columns=256, depth=64, stages=4) in autotune.candidates(product)
    assert all(
        t.stages * t.depth * (t.rows + t.columns) * 2 < autotune.SMEM_BYTES for t in autotune.candidates(product)
    )


def test_without_a_gpu_tuning_is_refused():
    with pytest.raises(ValueError, match="tuned on one of h100, h200, b200, b300, and this process has 'cpu'"):
        autotune.autotune({}, 0, print)
