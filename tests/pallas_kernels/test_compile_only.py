"""The kernels compile for GPUs that are not there, without spills, to the instructions they were written for.

Needs XLA's CUDA plugin (the `aot` extra); skipped without it. Every compilation is a process of its own.
"""

import functools

import pytest

from pallas_kernels import compile_only
from pallas_kernels.compile_only import (
    GROUPED_GEMM,
    CannotCompile,
    compile_layer_row,
    compile_row,
    compile_rows,
    read_report,
)

try:
    compile_only.require_compiler()
    missing = ""
except CannotCompile as error:
    missing = str(error)
needs_compiler = pytest.mark.skipif(bool(missing), reason=missing)
SMEM_LIMIT = 232_448  # bytes a block may have on sm_90 and sm_100
SMALL = dict(rows=1024, width=256, hidden=256, groups=4)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("chip", ["h200", "b200", "b300"])
def test_every_kernel_fits_its_chip(chip):
    kernels = (*GROUPED_GEMM, "top_k")
    rows = compile_rows(kernels, chip)
    assert [row["kernel"] for row in rows] == list(kernels)
    for row in rows:
        assert_fits(row["kernel"], chip, row)


def assert_fits(kernel, chip, row):
    hopper = chip == "h200"
    assert row["target"] == {"h200": "sm_90a", "b200": "sm_100a", "b300": "sm_103a"}[chip]
    assert row["spill_bytes"] == 0
    threads = {"top_k": 128, "weight_gradient": 384}.get(kernel, 384 if hopper else 256)
    assert row["registers"] <= min(65_536 // threads, 255)
    assert row["smem_bytes"] <= SMEM_LIMIT
    # A step of 64 is four instructions of 16 each, for each of up and gate in SwiGLU.
    products = {"top_k": 0, "swiglu": 8, "swiglu_kept": 8}.get(kernel, 4)
    assert (row["wgmma"], row["tcgen05_mma"]) == ((products, 0) if hopper else (0, products))
    assert row["tmem_columns"] == (0 if hopper or kernel == "top_k" else 512)
    assert row["tma_loads"] >= 1 and row["tma_stores"] >= 2


@needs_compiler
@pytest.mark.slow
def test_small_operands_compile_too():
    """One swizzle wide, and fewer rows than a tile: nothing is asked of the shapes but the multiples."""
    for row in compile_rows(GROUPED_GEMM, "h200", rows=40, width=64, hidden=64, groups=2):
        assert row["wgmma"] > 0 and row["spill_bytes"] == 0


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("chip", ["b200", "b300"])
def test_expert_products_in_mxfp8_are_block_scaled(chip):
    row = compile_row("mx_forward", chip)
    assert row["spill_bytes"] == 0 and row["registers"] <= 168 and row["smem_bytes"] <= SMEM_LIMIT
    assert row["block_scaled_mma"] == row["tcgen05_mma"] == 4  # a step of 128 is four instructions of 32 each
    assert row["tma_loads"] == 4  # two operands and their scales


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("chip", ["h200", "b200", "b300"])
@pytest.mark.parametrize("kernel", ["mx_quantize", "mx_swiglu_quantize"])
def test_what_makes_mxfp8_compiles_everywhere(kernel, chip):
    row = compile_row(kernel, chip)
    assert row["spill_bytes"] == 0 and row["registers"] <= 128
    assert (row["wgmma"], row["tcgen05_mma"]) == (0, 0)


@needs_compiler
@pytest.mark.slow
def test_wrong_architecture_is_refused():
    """tcgen05 on Hopper and wgmma on Blackwell: the compiler's refusal comes back, whether it raises or aborts."""
    with pytest.raises(CannotCompile, match="forward.*b200"):
        compile_row("forward", "b200", architecture="hopper", **SMALL)
    with pytest.raises(CannotCompile, match="forward.*h200"):
        compile_row("forward", "h200", architecture="blackwell", **SMALL)


@needs_compiler
@pytest.mark.slow
def test_too_much_shared_memory_is_refused():
    with pytest.raises(CannotCompile, match="max_smem_bytes=232448"):
        compile_row("forward", "h200", rows=1024, width=1024, hidden=256, groups=4, stages=8)


@functools.cache
def layer(experts: int, implementation: str = "auto") -> dict:
    return compile_layer_row("h200", experts, implementation=implementation)


@needs_compiler
@pytest.mark.slow
def test_memory_of_the_expert_layer_does_not_grow_with_the_experts():
    """Value and gradients on 8 absent H200s, the same rows; and the road that is replaced, as a control."""
    assert layer(8)["mosaic_calls"] == layer(128)["mosaic_calls"] == 6
    assert layer(128)["temp_bytes"] < 1.3 * layer(8)["temp_bytes"]
    control = layer(128, "xla")
    assert control["mosaic_calls"] == 0 and control["temp_bytes"] > 10 * layer(128)["temp_bytes"]


@needs_compiler
@pytest.mark.slow
def test_expert_layer_compiles_for_blackwell():
    assert compile_layer_row("b200", 128)["mosaic_calls"] == 6


def test_report_is_read():
    ptx = """.target sm_90a
        wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {};
        cp.async.bulk.tensor.4d.shared::cta.global.mbarrier::complete_tx::bytes [];
        cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [];
        """
    ptxas = "0 bytes stack frame, 24 bytes spill stores, 32 bytes spill loads\nptxas info : Used 168 registers"
    row = read_report(ptx, ptxas, "Resources(smem_scratch_bytes=229376, tmem_scratch_cols=0)")
    counts = dict(wgmma=1, tcgen05_mma=0, block_scaled_mma=0, tma_loads=1, tma_stores=1)
    assert row == dict(target="sm_90a", registers=168, spill_bytes=56, smem_bytes=229376, tmem_columns=0, **counts)


def test_names_and_missing_compiler_are_told(monkeypatch):
    with pytest.raises(ValueError, match="no kernel 'forward' for 'a100'"):
        compile_row("forward", "a100")
    monkeypatch.setattr(compile_only.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CannotCompile, match="install the `aot` extra"):
        compile_row("forward", "h200")
