"""What the GPU kernels of the grouped GEMM are told about the groups: a list of row tiles, made on the device.

    group_sizes_E --cumsum--> tiles per group --compare--> per tile: its group, where it starts, which rows it owns

A tile starts at its group's first row, rounded down to a multiple of 8 (TMA copies into swizzled SMEM start there
only), or a whole number of tiles after that. So the first tile of a group holds up to 7 rows of the group before, the
last one rows of the group after, and a tile owns the rows [begin, end) of one group only. The rows past the last group
are a group of their own, with the id E: the kernels write zeros there and load nothing. The list has a static length,
the real tiles stand at its front.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

OCTET = 8  # rows of a swizzled SMEM tile


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Shape of the work of one block. rows x columns of the result, `depth` of the contraction a step, `stages` deep.

    panel: how many row tiles a wave of blocks walks down before it moves to the next columns (reuse in L2).
    """

    rows: int = 128
    columns: int = 256
    depth: int = 64
    stages: int = 4
    panel: int = 8


def fit_columns(tiles: Tiles, width: int, at_least: int) -> Tiles:
    """`tiles` with no more columns than `width` needs: halved while half would do, down to `at_least`."""
    columns = tiles.columns
    while columns // 2 >= max(width, at_least):
        columns //= 2
    return dataclasses.replace(tiles, columns=columns)


class RowTiles(NamedTuple):
    """int32[slots] each, `total` (int32[1]) of them real.

    A tile starts at row 8 * `octets` and owns the rows [begins, ends); group E is the rows to be zeroed. (The kernels'
    compiler must see that the start is a multiple of 8, hence the unit.)
    """

    groups: Array
    octets: Array
    begins: Array
    ends: Array
    total: Array


class GroupSteps(NamedTuple):
    """int32[E] each: group e owns rows [begins, ends), read in `steps` blocks from row 8 * `octets` on."""

    octets: Array
    begins: Array
    ends: Array
    steps: Array


def row_tiles(group_sizes_E: Array, rows: int, tile_rows: int) -> RowTiles:
    """The tiles of a buffer of `rows` rows, as many slots as the worst of all group sizes needs.

    Sizes are int32[E] with a sum of at most `rows`; a sum above it is cut at the end of the buffer.
    """
    num_groups = group_sizes_E.shape[0]
    past_end = jnp.maximum(rows - jnp.sum(group_sizes_E, dtype=jnp.int32), 0)
    groups = group_steps(jnp.concatenate([group_sizes_E, past_end[None]]), rows, tile_rows)
    tile_ends = jnp.cumsum(groups.steps, dtype=jnp.int32)
    slot = jnp.arange((rows + (num_groups + 1) * (tile_rows + OCTET - 2)) // tile_rows, dtype=jnp.int32)
    # A comparison with every group instead of a binary search: slots * E bits, one fused reduction.
    group = jnp.minimum(jnp.sum(slot[:, None] >= tile_ends[None, :], axis=1, dtype=jnp.int32), num_groups)
    octets = groups.octets[group] + (slot - (tile_ends - groups.steps)[group]) * (tile_rows // OCTET)
    starts = octets * OCTET
    begins = jnp.maximum(groups.begins[group], starts)
    ends = jnp.minimum(groups.ends[group], starts + tile_rows)
    return RowTiles(group, octets, begins, ends, tile_ends[-1:])


def group_steps(group_sizes_E: Array, rows: int, block_rows: int) -> GroupSteps:
    """Every group as blocks of `block_rows` rows; groups are cut at the end of the buffer of `rows` rows."""
    ends = jnp.minimum(jnp.cumsum(group_sizes_E, dtype=jnp.int32), rows)
    begins = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends[:-1]])
    octets = begins // OCTET
    steps = jnp.where(ends > begins, (ends - octets * OCTET + block_rows - 1) // block_rows, 0)
    return GroupSteps(octets, begins, ends, steps)
