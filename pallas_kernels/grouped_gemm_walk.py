"""The order in which a persistent grid of blocks walks over the tiles of a grouped GEMM: one for both architectures.

    list of row tiles x columns --panels of rows, snake over columns--> one tile after the other, every block its share

The roles of a block (loading, multiplying, storing) each walk the same list at their own pace, so each must know how
much work lies before a tile: `done` steps of the contraction, and `used` accumulators.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_gemm_epilogue import SWIZZLE
from pallas_kernels.grouped_gemm_tiles import OCTET, GroupSteps, RowTiles, Tiles, fit_columns


class Tile(NamedTuple):
    """What a role does now. index: of the row tile, or the group whose weight gradient it is. row, column: its first
    ones in the result. steps: of the contraction, 0 for rows that no group owns. done, used: before it, in this block.
    """

    index: Array
    row: Array
    column: Array
    steps: Array
    done: Array
    used: Array


class Product(NamedTuple):
    """The static side of a forward product: [rows, depth] x [groups, depth, parts * width] -> [rows, width].

    parts: blocks of `width` columns of the right operand that meet in one result; 2 for SwiGLU, up before gate.
    """

    rows: int
    depth: int
    width: int
    groups: int
    parts: int
    tiles: Tiles

    @property
    def part_columns(self) -> int:
        """Columns of a part in a tile, and of the result."""
        return self.tiles.columns // self.parts

    @property
    def column_tiles(self) -> int:
        return pl.cdiv(self.width, self.part_columns)

    @property
    def steps(self) -> int:
        return pl.cdiv(self.depth, self.tiles.depth)


def product(lhs_RD: Array, rhs: Array, *, transpose_rhs: bool, parts: int, tiles: Tiles) -> Product:
    """Shapes as in `grouped_gemm`; tiles no wider than the result needs, and with parts, that end where a part ends."""
    (rows, depth), width = lhs_RD.shape, rhs.shape[1 if transpose_rhs else 2] // parts
    tiles = fit_columns(tiles, parts * width, at_least=parts * SWIZZLE)
    while parts > 1 and parts * width % tiles.columns:
        tiles = fit_columns(tiles, tiles.columns // 2, at_least=parts * SWIZZLE)
    return Product(rows, depth, width, rhs.shape[0], parts, tiles)


def walk_rows(tiles: RowTiles, shape: Product, body: Callable[[Tile], None]) -> tuple[Array, Array]:
    """`body` for every tile of this block; (steps, accumulators) in all. tiles: the list, in GMEM."""

    def tile(at: plgpu.NDLoopInfo, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        slot, column = plgpu.planar_snake(at.index[0], (tiles.total[0], shape.column_tiles), 0, shape.tiles.panel)
        steps = jnp.where(tiles.groups[slot] < shape.groups, jnp.int32(shape.steps), jnp.int32(0))
        body(Tile(slot, tiles.octets[slot] * OCTET, column * shape.part_columns, steps, *carry))
        return _advance(carry, steps)

    return _loop((tiles.total[0] * shape.column_tiles,))(tile)


def walk_groups(
    groups: GroupSteps, num_groups: int, row_blocks: int, column_tiles: int, tiles: Tiles, body: Callable[[Tile], None]
) -> tuple[Array, Array]:
    """As `walk_rows` for the weight gradient: every group's [row_blocks, column_tiles] tiles, group after group."""

    def tile(at: plgpu.NDLoopInfo, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        group, place = at.index
        block, column = plgpu.planar_snake(place, (row_blocks, column_tiles), 0, tiles.panel)
        body(Tile(group, block * tiles.rows, column * tiles.columns, groups.steps[group], *carry))
        return _advance(carry, groups.steps[group])

    return _loop((num_groups, row_blocks * column_tiles))(tile)


def _loop(grid: tuple[Any, ...]) -> Callable[[Callable[..., Any]], tuple[Array, Array]]:
    return plgpu.nd_loop(grid, collective_axes="sm", init_carry=(jnp.int32(0), jnp.int32(0)))


def _advance(before: tuple[Array, Array], steps: Array) -> tuple[Array, Array]:
    done, used = before
    return done + steps, used + (steps > 0).astype(jnp.int32)
