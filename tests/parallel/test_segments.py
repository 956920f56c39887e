"""A stage cut into segments: all of its blocks in order, about sqrt(n) activations at a time, the same gradients."""

import pytest

from moejax.errors import UserError
from moejax.parallel.layout import StageKind, segments
from moejax.parallel.segments import place_of
from moejax.parallel.stage import Place
from tests.mesh.test_pipeline import Computed, check_same, on_one_device
from tests.small import small_config, small_program


@pytest.mark.parametrize("n_dense", range(4))
@pytest.mark.parametrize("n_moe", range(12))
def test_every_block_is_in_one_segment_and_in_its_place(n_dense: int, n_moe: int):
    stage = Place(dense_slot=3, moe_slot=5, layer=7)  # type: ignore[arg-type]
    found = []
    for part in segments(StageKind(n_dense, n_moe, True, True)):
        assert max(part.kind.n_dense, part.kind.n_moe, part.count) ** 2 <= max(n_dense, n_moe) * 2 + 1
        for index in range(part.count):
            place = place_of(part, stage, index)  # type: ignore[arg-type]
            found += [("dense", place.dense_slot + i, place.layer + i) for i in range(part.kind.n_dense)]
            found += [("moe", place.moe_slot + i, place.layer + i) for i in range(part.kind.n_moe)]
    wanted = [("dense", 3 + i, 7 + i) for i in range(n_dense)]
    assert found == wanted + [("moe", 5 + i, 7 + n_dense + i) for i in range(n_moe)]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=1", "ep=2,pp=2"])
def test_gradients_are_those_that_keep_everything(mesh: str):
    """Segments of three and of two blocks; with random assignment, a new draw would send gradients elsewhere."""
    model = ("model.n_layers=6", "model.n_dense_layers=1", "model.moe.router.assignment=random")
    check_same(Computed(mesh, (*model, "parallel.recompute=full")), on_one_device(model))


@pytest.mark.slow
def test_a_deep_stage_keeps_less_than_by_blocks():
    shape = ("model.n_layers=25", "model.n_dense_layers=0", "data.sequence_length=128", "train.batch_tokens=4096")
    sizes = {}
    for recompute in ("block", "full"):
        program = small_program("dp=1", (*shape, f"parallel.recompute={recompute}"))
        compiled = program.lower().compile()
        sizes[recompute] = compiled.memory_analysis().temp_size_in_bytes
    activation = 4096 // 4 * 32 * 4  # bytes of one block's input
    # 25 block inputs against 5 + 5
    assert sizes["block"] - sizes["full"] > 12 * activation, {k: v / activation for k, v in sizes.items()}


def test_what_does_not_go_with_it_is_refused():
    with pytest.raises(UserError, match="recompute=full runs the backward of a stage in one piece, and zero_bubble"):
        small_program("pp=2", ("parallel.recompute=full", "parallel.pipeline.schedule=zero_bubble"))
    for stash in ("named", "residuals"):
        with pytest.raises(UserError, match=f"stash={stash}.*recompute=full"):
            small_config("parallel.recompute=full", f"parallel.pipeline.stash={stash}")
