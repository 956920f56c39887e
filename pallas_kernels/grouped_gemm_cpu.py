"""The CPU road of the grouped GEMM: plain loops over tiles of rows, at the cost of the rows.

    group_sizes_E --> groups from the largest to the smallest
        more than 512 rows:  one loop over groups; inside it 512-row tiles, then 64-row tiles for the rest
        the others:          one loop per tile height, falling; every group is one masked tile, and up to 8 of them are
                             one batched dot

`lax.ragged_dot` on CPU multiplies all rows by all experts. Here every row meets its own expert only; what is computed
in vain is the rows a tile has too many. XLA:CPU has no dynamic shapes, so the heights are a short static ladder and
each is a `while` loop of its own whose trip count is data: a height that no group needs costs one comparison.

What decides the speed (2 cores, D x F = 256 x 512, fp32, 2026-11): a tile costs 1.4 us a row plus about 40 us, of which
27 us copy the expert's 512 KiB out of the stack (a dot cannot read a dynamic slice in place). Hence one tile per small
group, of a height close to its size, rather than several exact ones; and hence one copy per large group. A dot of 64
rows alone keeps two cores half busy; a batch of them is shared out whole: the weight gradient of 128 groups of 64 rows
takes 47 ms by single dots, 41, 38 and 35 ms by batches of 2, 4 and 8, where one dense product takes 18
(2026-12).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

_SMALLEST_ROWS = 16
_LARGE_ROWS = 512  # a tile of 512 rows runs at 0.95 of the rate of one dense matmul, of 256 at 0.9, of 64 at 0.7
_REST_ROWS = 64
_FEW_ROWS = 4096
_BATCH_ROWS = 256  # of the tiles of one batched dot together
_BATCH = 8
_ZERO = np.int32(0)


class _Group(NamedTuple):
    """An expert and its rows [begin, end), int32 scalars."""

    expert: Array
    begin: Array
    end: Array


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

    def product(lhs: Array, weight: Array) -> Array:
        return lax.dot_general(lhs, weight, contracted, preferred_element_type=jnp.float32).astype(dtype)

    def multiply(start: Array, height: int, weight: Array) -> Array:
        return product(rows_of(start, height), weight)

    def small(out_RF: Array, groups: list[_Group], height: int) -> Array:
        starts = [jnp.minimum(group.begin, rows - height) for group in groups]
        tiles = _batched(
            product,
            [rows_of(start, height) for start in starts],
            [weight_of(group.expert) for group in groups],
        )
        for group, start, tile in zip(groups, starts, tiles, strict=True):
            # Rows of other groups in the tile get their old value back: groups do not run in the order of the rows.
            mine = _row_mask(start, group, height)
            out_RF = _put_rows(out_RF, jnp.where(mine, tile, _rows(out_RF, start, height)), start)
        return out_RF

    def large(out_RF: Array, group: _Group) -> Array:
        expert, begin, end = group
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

    def masked(array: Array, start: Array, group: _Group, height: int) -> Array:
        # Both factors are masked: what other rows hold may be NaN, and 0 * NaN is NaN.
        zero = jnp.zeros((), array.dtype)
        return jnp.where(_row_mask(start, group, height), _rows(array, start, height), zero)

    def put(out_EDF: Array, expert: Array, grad_DF: Array) -> Array:
        update = grad_DF[None].astype(out_EDF.dtype)
        return lax.dynamic_update_slice(out_EDF, update, (expert, _ZERO, _ZERO), allow_negative_indices=False)

    def small(out_EDF: Array, groups: list[_Group], height: int) -> Array:
        starts = [jnp.minimum(group.begin, rows - height) for group in groups]
        lhs, grad = (
            [masked(array, start, group, height) for start, group in zip(starts, groups, strict=True)]
            for array in (lhs_RD, grad_RF)
        )
        for group, grad_DF in zip(groups, _batched(outer, lhs, grad), strict=True):
            out_EDF = put(out_EDF, group.expert, grad_DF)
        return out_EDF

    def large(out_EDF: Array, group: _Group) -> Array:
        expert, begin, end = group
        whole = (end - begin) // _LARGE_ROWS
        rest = begin + whole * _LARGE_ROWS

        def whole_tile(i: Array, sum_DF: Array) -> Array:
            start = begin + i * _LARGE_ROWS
            return sum_DF + outer(_rows(lhs_RD, start, _LARGE_ROWS), _rows(grad_RF, start, _LARGE_ROWS))

        def rest_tile(i: Array, sum_DF: Array) -> Array:
            tile = group._replace(begin=rest + i * _REST_ROWS)
            start = jnp.minimum(tile.begin, rows - _REST_ROWS)
            return sum_DF + outer(*(masked(array, start, tile, _REST_ROWS) for array in (lhs_RD, grad_RF)))

        sum_DF = lax.fori_loop(0, whole, whole_tile, jnp.zeros(shape_DF, jnp.float32))
        return put(out_EDF, expert, lax.fori_loop(0, -((rest - end) // _REST_ROWS), rest_tile, sum_DF))

    return _for_each_group(jnp.zeros((num_groups, *shape_DF), lhs_RD.dtype), rows, group_sizes_E, small, large)


def _for_each_group(
    out: Array,
    rows: int,
    group_sizes_E: Array,
    small: Callable[[Array, list[_Group], int], Array],
    large: Callable[[Array, _Group], Array],
) -> Array:
    """Fold every group that has rows into `out`, which XLA updates in place.

    small(out, groups, height) takes groups of at most `height` rows, the same one perhaps several times;
    large(out, group) takes one of more than `_LARGE_ROWS`.
    """
    num_groups = group_sizes_E.shape[0]
    heights = tile_heights(rows, num_groups)
    ends_E = lax.cumsum(group_sizes_E)
    falling_E, *sorted_E = lax.sort(
        (-group_sizes_E, lax.iota(jnp.int32, num_groups), ends_E - group_sizes_E, ends_E), num_keys=1
    )
    # How many groups are too large for the height below each, and for the largest.
    stop = jnp.sum(-falling_E[:, None] > np.array((0, *heights), np.int32), axis=0, dtype=jnp.int32)

    def group(i: Array) -> _Group:
        return _Group(*(_entry(array_E, i) for array_E in sorted_E))

    first: Array | np.int32 = _ZERO
    if rows > _LARGE_ROWS:
        out = lax.fori_loop(first, stop[-1], lambda i, out: large(out, group(i)), out)
        first = stop[-1]
    for n, height in reversed(list(enumerate(heights))):
        batch = _tiles_together(rows, num_groups, height)

        def take(carry: tuple[Array, Array], height: int = height, batch: int = batch) -> tuple[Array, Array]:
            i, out = carry
            # The last batch may begin in one height and end in the next, or end with its first group once more.
            members = [i, *(jnp.where(i + k < num_groups, i + k, i) for k in range(1, batch))]
            return i + batch, small(out, [group(k) for k in members], height)

        first, out = lax.while_loop(lambda carry, n=n: carry[0] < stop[n], take, (jnp.int32(first), out))
    return out


def _tiles_together(rows: int, num_groups: int, height: int) -> int:
    """How many tiles are one batched dot; one for few rows, where compiling outweighs computing."""
    return 1 if rows < _FEW_ROWS else min(_BATCH, num_groups, max(1, _BATCH_ROWS // height))


def _batched(product: Callable[[Array, Array], Array], left: list[Array], right: list[Array]) -> list[Array]:
    """The product of each pair, all of one shape, as one batched operation."""
    if len(left) == 1:
        return [product(left[0], right[0])]
    return list(jax.vmap(product)(jnp.stack(left), jnp.stack(right)))


def _entry(stack: Array, i: Array) -> Array:
    return lax.dynamic_index_in_dim(stack, i, keepdims=False, allow_negative_indices=False)


def _rows(array: Array, start: Array, height: int) -> Array:
    return lax.dynamic_slice(array, (start, _ZERO), (height, array.shape[1]), allow_negative_indices=False)


def _put_rows(array: Array, tile: Array, start: Array) -> Array:
    return lax.dynamic_update_slice(array, tile, (start, _ZERO), allow_negative_indices=False)


def _row_mask(start: Array, group: _Group, height: int) -> Array:
    row = start + lax.broadcasted_iota(jnp.int32, (height, 1), 0)
    return (row >= group.begin) & (row < group.end)
