"""The grouped GEMM equals its float64 reference, forward and backward, wherever it is called from; bench included."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import pallas_kernels
from pallas_kernels import (
    grouped_gemm,
    grouped_gemm_reference,
    grouped_gemm_weight_grad,
    grouped_gemm_weight_grad_reference,
    resolve_implementation,
)
from pallas_kernels.bench import DIRECTIONS, ROUTINGS, draw_group_sizes, main
from pallas_kernels.grouped_gemm_cpu import tile_heights

D, F = 12, 20
TOLERANCE = {"float32": 5e-6, "bfloat16": 1e-2}


def operands(rows: int, sizes: list[int], seed: int = 0, dtype: str = "float32", transpose_rhs: bool = False):
    """Random lhs, rhs, cotangent and sizes; the rows past the end are NaN in lhs and in the cotangent."""
    rng = np.random.default_rng(seed)
    lhs, grad = rng.standard_normal((rows, D)), rng.standard_normal((rows, F))
    rhs = rng.standard_normal((len(sizes), *((F, D) if transpose_rhs else (D, F))))
    lhs[sum(sizes) :], grad[sum(sizes) :] = np.nan, np.nan
    lhs, rhs, grad = (jnp.asarray(x, dtype) for x in (lhs, rhs, grad))
    return lhs, rhs, grad, jnp.asarray(sizes, jnp.int32)


def assert_close(actual, expected, dtype="float32"):
    actual = np.asarray(actual, np.float64)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE[dtype] * (1 + np.abs(expected).max(initial=0)))


@functools.partial(jax.jit, static_argnums=(4, 5))
def value_and_gradients(lhs, rhs, grad, sizes, transpose_rhs, implementation):
    out, pullback = jax.vjp(
        lambda lhs, rhs: grouped_gemm(lhs, rhs, sizes, transpose_rhs=transpose_rhs, implementation=implementation),
        lhs,
        rhs,
    )
    return out, *pullback(grad)


def assert_matches_reference(rows, sizes, seed=0, dtype="float32", transpose_rhs=False, implementation="loop"):
    lhs, rhs, grad, group_sizes = operands(rows, sizes, seed, dtype, transpose_rhs)
    out, lhs_grad, rhs_grad = value_and_gradients(lhs, rhs, grad, group_sizes, transpose_rhs, implementation)
    assert (out.dtype, lhs_grad.dtype, rhs_grad.dtype) == (lhs.dtype, lhs.dtype, rhs.dtype)
    factors = (grad, lhs) if transpose_rhs else (lhs, grad)
    assert_close(out, grouped_gemm_reference(lhs, rhs, sizes, transpose_rhs=transpose_rhs), dtype)
    assert_close(lhs_grad, grouped_gemm_reference(grad, rhs, sizes, transpose_rhs=not transpose_rhs), dtype)
    assert_close(rhs_grad, grouped_gemm_weight_grad_reference(*factors, sizes), dtype)
    assert not np.asarray(out[sum(sizes) :], np.float32).any()
    assert not np.asarray(lhs_grad[sum(sizes) :], np.float32).any()
    assert not np.asarray(rhs_grad, np.float32)[np.asarray(sizes) == 0].any()


@st.composite
def group_sizes(draw, rows: int, num_groups: int):
    """Any sizes that fit: the distances between sorted cut points. Equal cuts make empty groups."""
    cuts = sorted(draw(st.lists(st.integers(0, rows), min_size=num_groups, max_size=num_groups)))
    return np.diff([0, *cuts]).tolist()


# One shape, so that each road compiles once and hypothesis draws values only. 1,300 rows reach every tile height, the
# large groups (more than 512 rows) included; with 3 experts one group often has most rows.
ROWS = 1300


@settings(max_examples=40, deadline=None, derandomize=True)
@given(sizes=group_sizes(ROWS, 3), seed=st.integers(0, 2**31))
def test_loop_equals_reference_for_any_group_sizes(sizes, seed):
    assert_matches_reference(ROWS, sizes, seed)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(sizes=group_sizes(70, 9), seed=st.integers(0, 2**31), transpose_rhs=st.booleans())
def test_many_small_groups_equal_reference(sizes, seed, transpose_rhs):
    assert_matches_reference(70, sizes, seed, transpose_rhs=transpose_rhs)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(sizes=group_sizes(4096, 19), seed=st.integers(0, 2**31), most=st.sampled_from([4096, 256, 64, 8]))
def test_batches_of_tiles_equal_reference(sizes, seed, most):
    """From 4,096 rows on, small groups are computed several at a time; 19 is no multiple of any batch."""
    assert_matches_reference(4096, [min(size, most) for size in sizes], seed)


EDGES = {
    "nothing at all": (ROWS, [0, 0, 0]),
    "one row": (ROWS, [0, 1, 0]),
    "one row, the last": (ROWS, [ROWS - 1, 0, 1]),
    "one group has all": (ROWS, [0, ROWS, 0]),
    "tile heights exactly": (ROWS, [16, 128, 1024]),
    "one more than a tile height": (ROWS, [17, 129, 1025]),
    "two large groups, one short by one": (ROWS, [513, 767, 20]),
    "most rows past the end": (ROWS, [3, 0, 20]),
    "fewer rows than the smallest tile": (5, [2, 0, 3]),
    "a single row in the buffer": (1, [0, 1, 0]),
}


@pytest.mark.parametrize("implementation", ["loop", "xla"])
@pytest.mark.parametrize("case", EDGES)
def test_edges(case, implementation):
    assert_matches_reference(*EDGES[case], implementation=implementation)


@pytest.mark.parametrize("implementation", ["loop", "xla"])
@pytest.mark.parametrize("transpose_rhs", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes_and_transposition(dtype, transpose_rhs, implementation):
    assert_matches_reference(ROWS, [740, 0, 41], 1, dtype, transpose_rhs, implementation)


def test_bfloat16_sums_in_float32():
    """4,096 ones: a sum carried in bfloat16 stops at 256, where adding 1 no longer changes it."""
    rows = 4096
    ones = jnp.ones((rows, 8), jnp.bfloat16)
    weight_grad = grouped_gemm_weight_grad(ones, ones, jnp.asarray([rows], jnp.int32))
    np.testing.assert_array_equal(np.asarray(weight_grad, np.float32), rows)
    out = grouped_gemm(jnp.ones((8, rows), jnp.bfloat16), jnp.ones((1, rows, 8), jnp.bfloat16), jnp.asarray([8]))
    np.testing.assert_array_equal(np.asarray(out, np.float32), rows)


def test_gradient_is_the_gradient():
    """Against autodiff of a dense masked einsum: the gradients are not just right products, but of this function."""
    sizes = [5, 0, 30, 2]
    lhs, rhs, _, group_sizes = operands(37, sizes)
    owner_RE = jax.nn.one_hot(np.repeat(np.arange(4), sizes), 4)

    def loss(product):
        return lambda lhs, rhs: jnp.sum(jnp.sin(product(lhs, rhs)))

    actual = jax.grad(loss(lambda x, w: grouped_gemm(x, w, group_sizes)), (0, 1))(lhs, rhs)
    expected = jax.grad(loss(lambda x, w: jnp.einsum("rd,edf,re->rf", x, w, owner_RE)), (0, 1))(lhs, rhs)
    jax.tree.map(assert_close, actual, expected)


def test_second_derivative():
    lhs, rhs, _, group_sizes = operands(30, [4, 0, 20])

    def loss(lhs, rhs):
        return jnp.sum(grouped_gemm(lhs, rhs, group_sizes) ** 2) / 2

    # d/d lhs |d loss/d rhs|^2 / 2, by hand for one expert at a time: G = X^T X W, d = X (W G^T + G W^T).
    actual = jax.grad(lambda lhs: jnp.sum(jax.grad(loss, 1)(lhs, rhs) ** 2) / 2)(lhs)
    expected = np.zeros((30, D))
    for weight, begin, end in ((rhs[0], 0, 4), (rhs[2], 4, 24)):
        x, w = np.asarray(lhs[begin:end], np.float64), np.asarray(weight, np.float64)
        g = x.T @ x @ w
        expected[begin:end] = x @ (w @ g.T + g @ w.T)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_inside_scan_switch_while_and_checkpoint():
    lhs, rhs, _, group_sizes = operands(40, [7, 0, 33])
    rhs = rhs[:, :, :D]  # square, so that layers can follow layers

    def stack(product):
        def layer(x, i):
            branches = [lambda x: x, lambda x: x + 0.1 * product(x)]
            return jax.checkpoint(lambda x: jax.lax.switch(i, branches, x))(x), None

        return lambda lhs: jnp.sum(jax.lax.scan(layer, lhs, jnp.asarray([1, 0, 1]))[0] ** 2)

    owner_RE = jax.nn.one_hot(np.repeat(np.arange(3), [7, 0, 33]), 3)
    actual = jax.jit(jax.value_and_grad(stack(lambda x: grouped_gemm(x, rhs, group_sizes))))(lhs)
    expected = jax.jit(jax.value_and_grad(stack(lambda x: jnp.einsum("rd,edf,re->rf", x, rhs, owner_RE))))(lhs)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), actual, expected)

    def twice(carry):
        return carry[0] + 1, grouped_gemm(carry[1], rhs, group_sizes)

    _, looped = jax.jit(lambda x: jax.lax.while_loop(lambda c: c[0] < 2, twice, (0, x)))(lhs)
    once = grouped_gemm_reference(lhs, rhs, [7, 0, 33])
    assert_close(looped, grouped_gemm_reference(once, rhs, [7, 0, 33]))


def test_inside_shard_map_with_sizes_of_its_own_on_every_device():
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 simulated devices: run in a process of its own, or set jax_num_cpu_devices=8")
    mesh = jax.make_mesh((8,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:8])
    rng = np.random.default_rng(0)
    sizes = rng.multinomial(50, [0.2, 0.1, 0.7], size=8)
    parts = [operands(64, row.tolist(), seed) for seed, row in enumerate(sizes)]
    lhs, rhs, grad, group_sizes = (jnp.concatenate(x) for x in zip(*parts, strict=True))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)
    def sharded(lhs, rhs, grad, sizes):
        out, pullback = jax.vjp(lambda lhs, rhs: grouped_gemm(lhs, rhs, sizes), lhs, rhs)
        return out, *pullback(grad)

    out, lhs_grad, rhs_grad = sharded(lhs, rhs, grad, group_sizes)
    for device, (lhs, rhs, grad, sizes) in enumerate(parts):
        rows, experts = slice(64 * device, 64 * device + 64), slice(3 * device, 3 * device + 3)
        assert_close(out[rows], grouped_gemm_reference(lhs, rhs, sizes))
        assert_close(lhs_grad[rows], grouped_gemm_reference(grad, rhs, sizes, transpose_rhs=True))
        assert_close(rhs_grad[experts], grouped_gemm_weight_grad_reference(lhs, grad, sizes))


def test_auto_follows_the_platform_lowered_for():
    """Only the chosen road is in the program: no dense expansion on CPU, no loop on GPU, no branch at run time."""
    lhs, rhs, grad, group_sizes = operands(64, [10, 54])
    traced = value_and_gradients.trace(lhs, rhs, grad, group_sizes, False, "auto")
    on_cpu, on_cuda = (traced.lower(lowering_platforms=(platform,)) for platform in ("cpu", "cuda"))
    assert "stablehlo.while" in on_cpu.as_text() and "ragged_dot" not in on_cpu.as_text()
    assert "ragged_dot" in on_cuda.as_text() and "stablehlo.while" not in on_cuda.as_text()
    assert "conditional" not in on_cpu.compile().as_text()
    assert (resolve_implementation("auto", "cpu"), resolve_implementation("auto", "cuda")) == ("loop", "xla")
    assert resolve_implementation("xla", "cpu") == "xla"


def test_memory_and_work_follow_the_rows():
    """At 64 experts nothing is E times the rows: temporaries stay below inputs and outputs, FLOPs far below dense ones.

    The FLOPs are those of the program, each loop body counted once: no body multiplies all rows by all experts.
    """
    rows, experts = 2048, 64
    sizes = jnp.full((experts,), rows // experts, jnp.int32)
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, 64), (experts, 64, 32), (rows, 32))]
    for implementation, bounded in (("loop", True), ("xla", False)):
        compiled = value_and_gradients.lower(*shapes, sizes, False, implementation).compile()
        memory = compiled.memory_analysis()
        temporaries_in_bounds = memory.temp_size_in_bytes < memory.argument_size_in_bytes + memory.output_size_in_bytes
        assert temporaries_in_bounds or not bounded
        one_dense_product_flops = 2 * rows * 64 * 32
        assert (compiled.cost_analysis()["flops"] < 6 * one_dense_product_flops) == bounded


@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (5, 3), (64, 64), (8192, 8), (8192, 128), (100_000, 7)])
def test_tile_heights_are_a_short_rising_ladder_within_the_buffer(rows, groups):
    heights = tile_heights(rows, groups)
    assert list(heights) == sorted(set(heights)) and heights[0] >= 1 and heights[-1] == min(rows, 512)
    assert len(heights) <= (14 if rows >= 4096 else 6)
    assert all(b <= 2 * a for a, b in zip(heights, heights[1:], strict=False)), "a tile over twice its group"


@pytest.mark.parametrize("which", ["rows", "width", "experts", "rank", "transposed", "dtype", "mixed", "sizes"])
def test_operands_that_do_not_fit_are_one_sentence_with_the_shapes(which):
    lhs, rhs, grad, sizes = operands(10, [4, 6])
    ones = jnp.ones
    calls = {
        "rows": lambda: grouped_gemm_weight_grad(lhs, grad[:9], sizes),
        "width": lambda: grouped_gemm(lhs[:, 1:], rhs, sizes),
        "experts": lambda: grouped_gemm(lhs, rhs[:1], sizes),
        "rank": lambda: grouped_gemm(lhs[0], rhs, sizes),
        "transposed": lambda: grouped_gemm(lhs, rhs, sizes, transpose_rhs=True),
        "dtype": lambda: grouped_gemm(ones((10, D), jnp.int8), ones((2, D, F), jnp.int8), sizes),
        "mixed": lambda: grouped_gemm(lhs.astype(jnp.bfloat16), rhs, sizes),
        "sizes": lambda: grouped_gemm(lhs, rhs, sizes.astype(jnp.float32)),
    }
    error = TypeError if which in ("dtype", "mixed", "sizes") else ValueError
    with pytest.raises(error, match=r"\w+\[\d+(, \d+)*\]") as raised:
        calls[which]()
    message = str(raised.value)
    assert message.endswith(".") and "\n" not in message and len(message) < 250


@pytest.mark.parametrize("name", ["triton", "", "Loop"])
def test_unknown_implementation_lists_what_works(name):
    lhs, rhs, grad, sizes = operands(10, [4, 6])
    for call in (
        lambda: grouped_gemm(lhs, rhs, sizes, implementation=name),
        lambda: grouped_gemm_weight_grad(lhs, grad, sizes, implementation=name),
        lambda: resolve_implementation(name),
    ):
        with pytest.raises(ValueError, match=r"'auto', 'loop', 'mosaic', 'xla', 'tokamax'"):
            call()


def test_empty_operands():
    sizes = jnp.zeros((3,), jnp.int32)
    assert grouped_gemm(jnp.zeros((0, D)), jnp.ones((3, D, F)), sizes).shape == (0, F)
    assert not grouped_gemm_weight_grad(jnp.zeros((0, D)), jnp.zeros((0, F)), sizes).any()
    assert grouped_gemm(jnp.ones((4, D)), jnp.ones((0, D, F)), sizes[:0]).shape == (4, F)


def test_public_names():
    assert all(hasattr(pallas_kernels, name) for name in pallas_kernels.__all__)


SMALL_BENCH = ["--rows", "64", "--width", "8", "--hidden", "4", "--repeats", "2"]


def test_bench_writes_a_row_per_number_of_groups_and_direction(tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert main(["--groups", "2,5", "--json", str(file), *SMALL_BENCH]) == 0
    written = json.loads(file.read_text())
    rows = written["rows"]
    assert {"device", "jax", "date"} <= written["machine"].keys()
    assert [(row["groups"], row["direction"]) for row in rows] == [(n, d) for n in (2, 5) for d in DIRECTIONS]
    for row in rows:
        assert row["rows"] == 64 and row["implementation"] == "loop" and row["routing"] == "dirichlet"
        assert row["dense_ratio"] > 0 and row["ragged_dot_speedup"] > 0 and row["gflops"] > 0
        assert row["peak_share"] > 0 and row["max_abs_error"] < 1e-4
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(rows)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--groups", "2,x"],
        ["--groups", "0"],
        ["--implementation", "mosaic"],
        ["--json", "/no/such/folder/rows.json"],
        ["--shapes", "gpt-2"],
        ["--shares", "/no/such/file.json"],
        ["--routing", "learned"],
        ["--autotune"],
    ],
)
def test_bench_says_what_is_wrong_in_a_sentence(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*SMALL_BENCH, *arguments])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].endswith(".")


@pytest.mark.parametrize("routing", ROUTINGS)
def test_drawn_group_sizes_use_every_row_and_repeat_by_seed(routing):
    draw = functools.partial(draw_group_sizes, 16, 1000, routing, shares=range(64))
    sizes = draw(seed=3)
    assert sizes.dtype == np.int32 and sizes.shape == (16,) and sizes.sum() == 1000 and sizes.min() >= 0
    np.testing.assert_array_equal(sizes, draw(seed=3))
    uneven = np.any(sizes != draw(seed=4))
    assert uneven == (routing != "uniform")
