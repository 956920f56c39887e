"""The CPU road of the grouped GEMM: plain loops over tiles of rows, at the cost of the rows.

    group_sizes_E --> groups sorted by the tile that fits them
        up to 512 rows:  one loop per tile height; every group is one masked tile
        more:            one loop over groups; inside it 512-row tiles, then 64-row tiles for the rest

`lax.ragged_dot` on CPU multiplies all rows by all experts. Here every row meets its own expert only; what is computed
in vain is the rows a tile has too many. XLA:CPU has no dynamic shapes, so the heights are a short static ladder and
each is a `while` loop of its own whose trip count is data: a height that no group needs costs one comparison.

What decides the speed (2 cores, D x F = 256 x 512, fp32, 2026-11): a tile costs 1.4 us a row plus about 40 us, of which
27 us copy the expert's 512 KiB out of the stack (a dot cannot read a dynamic slice in place). Hence one tile per small
group, of a height close to its size, rather than several exact ones; and hence one copy per large group.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

_SMALLEST_ROWS = 16
_LARGE_ROWS = 512  # a tile of 512 rows runs at 0.95 of the rate of one dense matmul, of 256 at 0.9, of 64 at 0.7
_REST_ROWS = 64
_FEW_ROWS = 4096
_ZERO = np.int32(0)


def tile_heights(rows: int, num_groups: int) -> tuple[int, ...]:
    """The ladder of tile heights for a buffer of `rows` rows, rising, none above the buffer or 512.

    One step an octave for fewer than 4,096 rows, where compiling outweighs computing; else two, and four in the two
    octaves above the mean group: 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 384, 512 for 8,192 rows in 128
    groups. There, about 1,200 rows are computed in vain, with one step an octave 3,600; each step takes 50 ms of
    processor time to compile, once per product (2026-11).
    """
    mean = min(max(rows // num_groups, _SMALLEST_ROWS), _LARGE_ROWS // 4)
    fine = 1 << (mean - 1).bit_length()
    heights, octave = [], max(_SMALLEST_ROWS, fine // 4)
    while octave < _LARGE_ROWS:
        steps = 1 if rows < _FEW_ROWS or octave == _SMALLEST_ROWS else 4 if octave in (fine, 2 * fine) else 2
        heights += [octave + octave * step // steps for step in range(steps)]
        octave *= 2
    return tuple(sorted({min(height, rows) for height in (*heights, _LARGE_ROWS)}))


def grouped_gemm_loop(lhs_RD: Array, rhs: Array, group_sizes_E: Array, *, transpose_rhs: bool) -> Array:
    """`grouped_gemm` by loops; rhs is [E, D, F], or [E, F, D] if `transpose_rhs`. Shapes are checked by the caller."""
    return grouped_gemm_by_tiles(
        lambda start, height: _rows(lhs_RD, start, height),
        lambda expert: _entry(rhs, expert),
        (lhs_RD.shape[0], rhs.shape[1 if transpose_rhs else 2]),
        lhs_RD.dtype,
        group_sizes_E,
        transpose_rhs=transpose_rhs,
    )


def grouped_gemm_by_tiles(
    rows_of: Callable[[Array, int], Array],
    weight_of: Callable[[Array], Array],
    shape: tuple[int, int],
    dtype: Any,
    group_sizes_E: Array,
    *,
    transpose_rhs: bool,
) -> Array:
    """The same for operands that are made as they are read: rows_of(start, height) [height, D], weight_of(expert)."""
    rows, width = shape
    contracted = (((1,), (1 if transpose_rhs else 0,)), ((), ()))

    def multiply(start: Array, height: int, weight: Array) -> Array:
        tile = lax.dot_general(rows_of(start, height), weight, contracted, preferred_element_type=jnp.float32)
        return tile.astype(dtype)

    def small(out_RF: Array, expert: Array, begin: Array, end: Array, height: int) -> Array:
        # Rows of other groups in the tile get their old value back: the loops do not run in the order of the rows.
        start = jnp.minimum(begin, rows - height)
        mine = _row_mask(start, begin, end, height)
        tile = jnp.where(mine, multiply(start, height, weight_of(expert)), _rows(out_RF, start, height))
        return _put_rows(out_RF, tile, start)

    def large(out_RF: Array, expert: Array, begin: Array, end: Array) -> Array:
        weight = weight_of(expert)
        whole = (end - begin) // _LARGE_ROWS
        rest = begin + whole * _LARGE_ROWS

        def whole_tile(i: Array, out_RF: Array) -> Array:
            start = begin + i * _LARGE_ROWS
            return _put_rows(out_RF, multiply(start, _LARGE_ROWS, weight), start)

        def rest_tile(i: Array, out_RF: Array) -> Array:
            # The last tile is moved back into the group: it computes some rows twice, and needs no mask.
            start = jnp.minimum(rest + i * _REST_ROWS, end - _REST_ROWS)
            return _put_rows(out_RF, multiply(start, _REST_ROWS, weight), start)

        out_RF = lax.fori_loop(0, whole, whole_tile, out_RF)
        return lax.fori_loop(0, -((rest - end) // _REST_ROWS), rest_tile, out_RF)

    return _for_each_group(jnp.zeros((rows, width), dtype), rows, group_sizes_E, small, large)


def grouped_gemm_weight_grad_loop(lhs_RD: Array, grad_RF: Array, group_sizes_E: Array) -> Array:
    """`grouped_gemm_weight_grad` by loops: one dot per small group, an fp32 sum over tiles per large one."""
    rows, num_groups = lhs_RD.shape[0], group_sizes_E.shape[0]
    shape_DF = (lhs_RD.shape[1], grad_RF.shape[1])

    def outer(lhs: Array, grad: Array) -> Array:
        # Transposed by itself, not folded into the dot: XLA:CPU's fast dots contract the last axis of their left side
        # only, and the other kind takes a sixth longer over 64 rows (2026-11) and computes bfloat16 in float32.
        lhs_transposed = lax.optimization_barrier(lhs.T)
        return lax.dot_general(lhs_transposed, grad, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    def masked_outer(begin: Array, end: Array, height: int) -> Array:
        # Both factors are masked: what other rows hold may be NaN, and 0 * NaN is NaN.
        start = jnp.minimum(begin, rows - height)
        mine = _row_mask(start, begin, end, height)
        zero = jnp.zeros((), lhs_RD.dtype)
        return outer(
            jnp.where(mine, _rows(lhs_RD, start, height), zero), jnp.where(mine, _rows(grad_RF, start, height), zero)
        )

    def put(out_EDF: Array, expert: Array, grad_DF: Array) -> Array:
        update = grad_DF[None].astype(out_EDF.dtype)
        return lax.dynamic_update_slice(out_EDF, update, (expert, _ZERO, _ZERO), allow_negative_indices=False)

    def small(out_EDF: Array, expert: Array, begin: Array, end: Array, height: int) -> Array:
        return put(out_EDF, expert, masked_outer(begin, end, height))

    def large(out_EDF: Array, expert: Array, begin: Array, end: Array) -> Array:
        whole = (end - begin) // _LARGE_ROWS
        rest = begin + whole * _LARGE_ROWS

        def whole_tile(i: Array, sum_DF: Array) -> Array:
            start = begin + i * _LARGE_ROWS
            return sum_DF + outer(_rows(lhs_RD, start, _LARGE_ROWS), _rows(grad_RF, start, _LARGE_ROWS))

        def rest_tile(i: Array, sum_DF: Array) -> Array:
            return sum_DF + masked_outer(rest + i * _REST_ROWS, end, _REST_ROWS)

        sum_DF = lax.fori_loop(0, whole, whole_tile, jnp.zeros(shape_DF, jnp.float32))
        return put(out_EDF, expert, lax.fori_loop(0, -((rest - end) // _REST_ROWS), rest_tile, sum_DF))

    return _for_each_group(jnp.zeros((num_groups, *shape_DF), lhs_RD.dtype), rows, group_sizes_E, small, large)


def _for_each_group(
    out: Array,
    rows: int,
    group_sizes_E: Array,
    small: Callable[[Array, Array, Array, Array, int], Array],
    large: Callable[[Array, Array, Array, Array], Array],
) -> Array:
    """Fold every group that has rows into `out`, which XLA updates in place.

    small(out, expert, begin, end, height) takes a group of at most `height` rows, large(out, expert, begin, end) one of
    more than `_LARGE_ROWS`; [begin, end) are the rows of the group.
    """
    num_groups = group_sizes_E.shape[0]
    heights = tile_heights(rows, num_groups)
    ends_E = lax.cumsum(group_sizes_E)
    # Which loop takes the group: the first height that holds it, then the large ones, then the empty ones (none).
    loop_E = jnp.sum(group_sizes_E[:, None] > np.array(heights, np.int32), axis=1, dtype=jnp.int32)
    loop_E = jnp.where(group_sizes_E > 0, loop_E, len(heights) + 1)
    _, expert_E, begin_E, end_E = lax.sort(
        (loop_E, lax.iota(jnp.int32, num_groups), ends_E - group_sizes_E, ends_E), num_keys=1
    )
    loops = np.arange(len(heights) + 1, dtype=np.int32)
    stop = jnp.sum(loop_E[:, None] <= loops, axis=0, dtype=jnp.int32)

    def group(i: Array) -> tuple[Array, Array, Array]:
        return _entry(expert_E, i), _entry(begin_E, i), _entry(end_E, i)

    first: Array | np.int32 = _ZERO
    for n, height in enumerate(heights):
        out = lax.fori_loop(first, stop[n], lambda i, out, height=height: small(out, *group(i), height), out)
        first = stop[n]
    if rows > _LARGE_ROWS:
        out = lax.fori_loop(first, stop[-1], lambda i, out: large(out, *group(i)), out)
    return out


def _entry(stack: Array, i: Array) -> Array:
    return lax.dynamic_index_in_dim(stack, i, keepdims=False, allow_negative_indices=False)


def _rows(array: Array, start: Array, height: int) -> Array:
    return lax.dynamic_slice(array, (start, _ZERO), (height, array.shape[1]), allow_negative_indices=False)


def _put_rows(array: Array, tile: Array, start: Array) -> Array:
    return lax.dynamic_update_slice(array, tile, (start, _ZERO), allow_negative_indices=False)


def _row_mask(start: Array, begin: Array, end: Array, height: int) -> Array:
    row = start + lax.broadcasted_iota(jnp.int32, (height, 1), 0)
    return (row >= begin) & (row < end)
