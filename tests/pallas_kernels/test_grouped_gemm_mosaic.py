"""The GPU kernels of the grouped GEMM, run by Pallas's GPU interpreter with race detection: equal to the reference.

The interpreter simulates blocks, warpgroups, TMA copies, barriers and tensor cores on the CPU, and raises on a race.
What it cannot show is compiled in test_compile_only.py.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import (
    describe_implementation,
    grouped_gemm,
    grouped_gemm_mosaic,
    grouped_gemm_reference,
    grouped_gemm_weight_grad_reference,
    resolve_implementation,
)
from pallas_kernels.grouped_gemm_blackwell import (
    grouped_gemm_blackwell,
    grouped_gemm_weight_grad_blackwell,
    grouped_swiglu_blackwell,
)
from pallas_kernels.grouped_gemm_hopper import (
    grouped_gemm_hopper,
    grouped_gemm_weight_grad_hopper,
    grouped_swiglu_hopper,
)
from pallas_kernels.grouped_gemm_tiles import OCTET, Tiles, fit_columns, row_tiles

# A row tile and a rest, two steps of the contraction, two column tiles of which the second is half empty.
ROWS, D, F, E = 168, 128, 192, 4
TILES = Tiles(rows=128, columns=128, depth=64, stages=2, panel=2)
RACES = plgpu.InterpretGPUParams(detect_races=True)
OPTIONS = dict(num_sms=2, tiles=TILES, interpret=RACES)
KERNELS = {
    "hopper": (grouped_gemm_hopper, grouped_gemm_weight_grad_hopper, grouped_swiglu_hopper),
    "blackwell": (grouped_gemm_blackwell, grouped_gemm_weight_grad_blackwell, grouped_swiglu_blackwell),
}


@st.composite
def group_sizes(draw, rows: int = ROWS, num_groups: int = E):
    """Any sizes that fit: the distances between sorted cut points. Equal cuts make empty groups."""
    cuts = sorted(draw(st.lists(st.integers(0, rows), min_size=num_groups, max_size=num_groups)))
    return np.diff([0, *cuts]).tolist()


EDGES = {
    "nothing at all": [0, 0, 0, 0],
    "one group has all": [0, ROWS, 0, 0],
    "every group begins and ends off the tiles": [37, 0, 130, 1],
    "several groups within eight rows": [1, 2, 0, 3],
    "groups begin on multiples of 8": [8, 128, 0, 32],
}


def operands(seed: int, sizes: list[int]):
    """Random lhs, rhs and cotangent in bfloat16; the rows past the end are NaN in lhs and in the cotangent."""
    rng = np.random.default_rng(seed)
    lhs, grad, rhs = (rng.standard_normal(shape) for shape in ((ROWS, D), (ROWS, F), (E, D, F)))
    lhs[sum(sizes) :], grad[sum(sizes) :] = np.nan, np.nan
    return tuple(jnp.asarray(x, jnp.bfloat16) for x in (lhs, rhs, grad))


@functools.cache
def compiled(architecture: str, product: str):
    gemm, weight_grad, swiglu = KERNELS[architecture]
    if product == "swiglu":
        return jax.jit(functools.partial(swiglu, keep=True, **OPTIONS))
    if product == "weight_gradient":
        return jax.jit(functools.partial(weight_grad, **OPTIONS))
    return jax.jit(functools.partial(gemm, transpose_rhs=product == "data_gradient", **OPTIONS))


def assert_equals_reference(architecture: str, product: str, sizes: list[int], seed: int = 0) -> None:
    lhs, rhs, grad = operands(seed, sizes)
    group_sizes_E = jnp.asarray(sizes, jnp.int32)
    run = compiled(architecture, product)
    if product == "forward":
        out, expected = run(lhs, rhs, group_sizes_E), grouped_gemm_reference(lhs, rhs, sizes)
    elif product == "data_gradient":
        out, expected = run(grad, rhs, group_sizes_E), grouped_gemm_reference(grad, rhs, sizes, transpose_rhs=True)
    else:
        out, expected = run(lhs, grad, group_sizes_E), grouped_gemm_weight_grad_reference(lhs, grad, sizes)
    out = np.asarray(out, np.float64)
    # One rounding to bfloat16 (8 bits, half a unit in the last place) and fp32 sums before it.
    np.testing.assert_allclose(out, expected, rtol=2.0**-8, atol=1e-4 * (1 + np.abs(expected).max(initial=0)))
    if product != "weight_gradient":
        assert not out[sum(sizes) :].any()


def assert_swiglu_equals_reference(architecture: str, sizes: list[int], seed: int = 0) -> None:
    """Up and gate as the plain product has them, and hidden rows that follow from them to one more rounding."""
    lhs, rhs, _ = operands(seed, sizes)
    rhs = jnp.concatenate([rhs[..., :128], rhs[..., 64:] / 2], axis=2)
    hidden, up_gate = (
        np.asarray(out, np.float64) for out in compiled(architecture, "swiglu")(lhs, rhs, jnp.asarray(sizes, jnp.int32))
    )
    expected = grouped_gemm_reference(lhs, rhs, sizes)
    np.testing.assert_allclose(up_gate, expected, rtol=2.0**-8, atol=1e-4 * (1 + np.abs(expected).max(initial=0)))
    up, gate = np.split(up_gate, 2, axis=1)
    np.testing.assert_allclose(hidden, up * gate / (1 + np.exp(-gate)), rtol=2.0**-8, atol=1e-5)
    assert not hidden[sum(sizes) :].any()


products = pytest.mark.parametrize("product", ["forward", "data_gradient", "weight_gradient"])
architectures = pytest.mark.parametrize("architecture", list(KERNELS))


@pytest.mark.timeout(600)
@architectures
@products
def test_kernels_equal_reference(architecture, product):
    for sizes in EDGES.values():
        assert_equals_reference(architecture, product, sizes)

    @settings(max_examples=3, deadline=None, derandomize=True, database=None)
    @given(sizes=group_sizes(), seed=st.integers(0, 2**31))
    def for_any_sizes(sizes, seed):
        assert_equals_reference(architecture, product, sizes, seed)

    for_any_sizes()


@pytest.mark.timeout(600)
@pytest.mark.slow
@architectures
def test_swiglu_kernels_equal_reference(architecture):
    """Two column tiles of 64 columns of up and 64 of gate."""
    for sizes in ("one group has all", "every group begins and ends off the tiles", "several groups within eight rows"):
        assert_swiglu_equals_reference(architecture, EDGES[sizes])

    @settings(max_examples=1, deadline=None, derandomize=True, database=None)
    @given(sizes=group_sizes(), seed=st.integers(0, 2**31))
    def for_any_sizes(sizes, seed):
        assert_swiglu_equals_reference(architecture, sizes, seed)

    for_any_sizes()


@functools.partial(jax.jit, static_argnums=(1, 2))
def tiles_of(sizes, rows, tile_rows):
    return row_tiles(sizes, rows, tile_rows)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(sizes=group_sizes(1000, 9), tile_rows=st.sampled_from([64, 128]))
def test_row_tiles_own_every_row_once(sizes, tile_rows):
    groups, octets, begins, ends, total = (np.asarray(x) for x in tiles_of(np.array(sizes, np.int32), 1000, tile_rows))
    assert total[0] <= len(groups)
    owner = np.full(1000, -1)
    for group, octet, begin, end in list(zip(groups, octets, begins, ends, strict=True))[: total[0]]:
        assert octet * OCTET <= begin < end <= octet * OCTET + tile_rows
        assert (owner[begin:end] == -1).all()
        owner[begin:end] = group
    np.testing.assert_array_equal(owner, np.repeat(np.arange(len(sizes) + 1), [*sizes, 1000 - sum(sizes)]))


def test_row_tiles_fit_when_every_group_begins_off_a_multiple_of_eight():
    sizes = [7, *[129 + 8] * 30]
    tiles = row_tiles(jnp.asarray(sizes, jnp.int32), sum(sizes) + 1, 128)
    assert tiles.total[0] <= len(tiles.groups)


@pytest.mark.parametrize("width, columns", [(64, 64), (65, 128), (128, 128), (192, 256), (4096, 256)])
def test_tiles_are_no_wider_than_the_result_needs(width, columns):
    assert fit_columns(Tiles(columns=256), width, at_least=64).columns == columns


def test_a_missing_wait_is_reported():
    """The detector sees what it is there for: a kernel that reads SMEM before the copy into it has arrived."""

    def racy(source, out, smem, barrier):
        plgpu.copy_gmem_to_smem(source, smem, barrier)
        smem[...] = smem[...] + 1
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, out)
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        racy,
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types=[plgpu.SMEM((64, 64), jnp.float32), plgpu.Barrier()],
        interpret=RACES,
    )
    try:
        with pytest.raises(Exception, match="RACE DETECTED"):
            jax.block_until_ready(kernel(jnp.ones((64, 64))))
    finally:
        _reset_interpreter()


def _reset_interpreter() -> None:
    """After an exception the interpreter's state of this process must be dropped (its docstring says so)."""
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import reset_gpu_interpret_mode_state

    reset_gpu_interpret_mode_state()


@pytest.fixture
def on_hopper(monkeypatch):
    """The op as traced for an H200, its kernels interpreted by two SMs."""
    monkeypatch.setattr(grouped_gemm_mosaic, "target", lambda: grouped_gemm_mosaic.Target("hopper", 2))
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        yield


@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_op_and_gradients_by_mosaic_equal_reference(on_hopper, transpose_rhs):
    """Each of the two products and both gradients reach their kernel; rows need not be a multiple of 8."""
    rows, width, sizes = 37, 64, [3, 0, 30]
    rng = np.random.default_rng(0)
    lhs, grad, rhs = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
        for shape in ((rows, width), (rows, width), (3, width, width))
    )
    out, pullback = jax.vjp(
        lambda lhs, rhs: grouped_gemm(
            lhs, rhs, jnp.asarray(sizes, jnp.int32), transpose_rhs=transpose_rhs, implementation="mosaic"
        ),
        lhs,
        rhs,
    )
    lhs_grad, rhs_grad = pullback(grad)
    factors = (grad, lhs) if transpose_rhs else (lhs, grad)
    expected = (
        grouped_gemm_reference(lhs, rhs, sizes, transpose_rhs=transpose_rhs),
        grouped_gemm_reference(grad, rhs, sizes, transpose_rhs=not transpose_rhs),
        grouped_gemm_weight_grad_reference(*factors, sizes),
    )
    for actual, wanted in zip((out, lhs_grad, rhs_grad), expected, strict=True):
        np.testing.assert_allclose(np.asarray(actual, np.float64), wanted, rtol=2.0**-8, atol=1e-3)


def mosaic(dtype=jnp.bfloat16, width=64, hidden=64):
    return grouped_gemm(
        jnp.ones((8, width), dtype),
        jnp.ones((2, width, hidden), dtype),
        jnp.ones(2, jnp.int32),
        implementation="mosaic",
    )


def test_refusals_say_why_and_the_way_out(monkeypatch):
    with pytest.raises(ValueError, match="needs an NVIDIA GPU of compute capability 9.0 or 10.x.*'cpu'"):
        mosaic()
    monkeypatch.setattr(grouped_gemm_mosaic, "target", lambda: grouped_gemm_mosaic.Target("hopper", 2))
    with pytest.raises(ValueError, match="takes bfloat16 operands, got float32"):
        mosaic(jnp.float32)
    with pytest.raises(ValueError, match="multiples of 64, got 64 and 72"):
        mosaic(hidden=72)


KINDS = {
    "NVIDIA H200": "mosaic",
    "NVIDIA H100 80GB HBM3": "mosaic",
    "NVIDIA GH200 480GB": "mosaic",
    "NVIDIA B200": "mosaic",
    "NVIDIA GB300": "mosaic",
    "NVIDIA A100-SXM4-80GB": "xla",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "xla",
    "AMD Instinct MI300X": "xla",
}


def abstract_mesh(kind: str) -> jax.sharding.AbstractMesh:
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
    axis = (jax.sharding.AxisType.Auto,)
    return jax.sharding.AbstractMesh((1,), ("x",), axis_types=axis, abstract_device=device)


@pytest.mark.parametrize("kind", KINDS)
def test_auto_goes_by_the_device_that_is_compiled_for(kind):
    with jax.sharding.use_abstract_mesh(abstract_mesh(kind)):
        assert resolve_implementation("auto", "cuda", widths=(2048, 1024)) == KINDS[kind]
        assert resolve_implementation("auto", "cuda", dtype=jnp.float32, widths=(2048, 1024)) == "xla"
        assert resolve_implementation("auto", "cuda", widths=(2048, 1000)) == "xla"
    assert resolve_implementation("auto", "cuda") == "xla", "no GPU is in sight here"


def test_what_auto_takes_is_said_with_the_reason():
    with jax.sharding.use_abstract_mesh(abstract_mesh("NVIDIA H200")):
        assert describe_implementation("gpu", "bfloat16", (2048, 1024)) == "'mosaic'"
        said = describe_implementation("gpu", "float32", (2048, 1024))
        assert said == "'xla', since 'mosaic' takes bfloat16 operands, got float32"
    assert "compute capability" in describe_implementation("gpu", "bfloat16", (64, 64))
    assert describe_implementation("cpu", "float32", (64, 64)) == "'loop'"


@pytest.mark.parametrize(
    "capability, kernel", {"9.0": "hopper", "10.0": "blackwell", "10.3": "blackwell", "12.0": None}.items()
)
def test_a_real_device_states_its_capability(monkeypatch, capability, kernel):
    device = types.SimpleNamespace(device_kind="NVIDIA new", compute_capability=capability, core_count=99)
    monkeypatch.setattr(grouped_gemm_mosaic.backend, "get_default_device", lambda: device)
    assert grouped_gemm_mosaic.target() == (grouped_gemm_mosaic.Target(kernel, 99, "NVIDIA new") if kernel else None)


@pytest.mark.parametrize("kind, kernel", [("NVIDIA H200", "hopper"), ("NVIDIA B200", "blackwell")])
def test_auto_cross_lowers_to_the_kernels(kind, kernel):
    """No CUDA plugin is needed for this rung; value and both gradients become Mosaic calls, nothing else multiplies."""

    def loss(lhs, rhs, sizes):
        return jnp.sum(grouped_gemm(lhs, rhs, sizes).astype(jnp.float32) ** 2)

    shapes = [((64, 128), jnp.bfloat16), ((3, 128, 64), jnp.bfloat16), ((3,), jnp.int32)]
    with jax.sharding.use_abstract_mesh(abstract_mesh(kind)):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    for product in ("", "_transposed", "_weight_grad"):
        assert f"grouped_gemm{product}_{kernel}" in text
    assert "ragged_dot" not in text and "stablehlo.dot" not in text
