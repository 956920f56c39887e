"""The receive layout: which row of which buffer every route gets, from the counts alone.

    ids_TK --sort--> routes, counts_E --one all-gather--> counts_SDL --layout--> rows --window(round)--> what moves

It is Olmo-core 3's rowwise layout: expert-major, then source device, then route order, densely packed, so that the rows
stand ready for the grouped GEMM as they arrive. With n[s, d, l] the routes of source s to local expert l of device d,

    row(s, d, l) = sum_{l' < l} sum_s' n[s', d, l']  +  sum_{s' < s} n[s', d, l]

is the first row of that chunk in a buffer without end. A buffer of R rows holds the window [r R, (r + 1) R) of it in
round r: under `exact` there are as many rounds as the fullest device needs, under `drop` there is one, and what it
leaves out is Olmo-core's deterministic tail drop (the last experts of the device, the last sources within an expert,
the last routes).
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Int

from moejax.config import Overflow
from moejax.moe.collectives import exclusive_cumsum
from moejax.moe.dispatch import Traffic
from moejax.moe.routes import Routes, sort_routes

ALIGNED_ROWS = 8  # of `pallas_kernels.grouped_gemm`, which reads GPU memory in tiles of 8 rows


def most_rows(tokens: int, top_k: int, n_experts: int, size: int) -> int:
    """Rows that could arrive on one of `size` devices: every token of all of them, for as many experts as it may have
    here."""
    return size * tokens * min(top_k, n_experts // size)


def capacity_rows(
    tokens: int, top_k: int, n_experts: int, size: int, capacity_factor: float | None, overflow: Overflow
) -> int:
    """Rows of the receive buffer, ceil(capacity_factor * T * K), since T K rows arrive at balance; never more than can
    (None: as many).

    One pool for all experts of the device (Olmo-core `capacity_factor`), not one for each. Under `exact` rounded up to
    a multiple of 8, the rows that the GPU kernels read at once: they would copy any other buffer. Under `drop` the
    number of rows decides which tokens are left out, and stays Olmo-core's to the row.
    """
    rows = most_rows(tokens, top_k, n_experts, size)
    if capacity_factor is not None:
        rows = min(rows, max(1, math.ceil(capacity_factor * tokens * top_k)))
    return rows if overflow == Overflow.drop else -(-rows // ALIGNED_ROWS) * ALIGNED_ROWS


class Layout(NamedTuple):
    """The same on all devices of the group but for `routes` and `row`.

    routes: this device's. row: int32[N]; row of each sorted route in its buffer without end, -1 for those that go
    nowhere.
    counts, rows: int32[S, D, L]; n and row of the docstring.
    """

    routes: Routes
    row: Int[Array, "N"]
    counts: Int[Array, "S D L"]
    rows: Int[Array, "S D L"]

    @property
    def arriving(self) -> Int[Array, "D"]:
        """Rows for each device, over all rounds."""
        return jnp.sum(self.counts, axis=(0, 2))


def receive_layout(expert_ids_TK: Int[Array, "T K"], n_experts: int, axis_name: str, size: int) -> Layout:
    """The one communication that planning needs: an all-gather of E counts."""
    routes = sort_routes(expert_ids_TK, n_experts)
    counts_SDL = lax.all_gather(routes.counts, axis_name).reshape(size, size, n_experts // size)
    row_SDL = exclusive_cumsum(counts_SDL.sum(0), 1)[None] + exclusive_cumsum(counts_SDL, 0)
    first_E = jnp.take(row_SDL, lax.axis_index(axis_name), axis=0).reshape(-1)
    # place p of expert i is its (p - first place of i)-th row
    shift_E = first_E - exclusive_cumsum(routes.counts)
    row_N = jnp.arange(routes.route.shape[0]) + jnp.take(shift_E, routes.expert, mode="clip")
    return Layout(routes, jnp.where(routes.expert < n_experts, row_N, -1), counts_SDL, row_SDL)


def count_rounds(arriving_D: Int[Array, "D"], buffer: int) -> Int[Array, ""]:
    """Rounds that the fullest needs, at least one."""
    return jnp.maximum(1, -(-jnp.max(arriving_D) // buffer)).astype(jnp.int32)


def traffic(arriving_D: Int[Array, "D"], me: Array, buffer: int, overflow: Overflow) -> Traffic:
    past = jnp.maximum(jnp.take(arriving_D, me) - buffer, 0).astype(jnp.float32)
    dropping = overflow == Overflow.drop
    return Traffic(
        occupancy=jnp.max(arriving_D).astype(jnp.float32) / buffer,
        overflow=past,
        dropped=past if dropping else jnp.zeros_like(past),
        rounds=jnp.ones_like(past) if dropping else count_rounds(arriving_D, buffer).astype(jnp.float32),
    )


class Window(NamedTuple):
    """What moves in one round.

    first: its first row in the buffer without end. moved: bool[N], by sorted place.
    sizes, skipped, rows: int32[S, D, L]; of each chunk, the routes that move, how many of it stand before them, and the
    row of the first of them in the buffer (0 where none move).
    """

    first: Int[Array, ""]
    moved: Bool[Array, "N"]
    sizes: Int[Array, "S D L"]
    skipped: Int[Array, "S D L"]
    rows: Int[Array, "S D L"]

    def group_sizes(self, me: Array) -> Int[Array, "L"]:
        return jnp.take(self.sizes, me, axis=1).sum(0)


def window(layout: Layout, round: Int[Array, ""] | int, buffer: int) -> Window:
    first = jnp.asarray(round, jnp.int32) * buffer
    begin = jnp.maximum(layout.rows, first)
    sizes = jnp.maximum(jnp.minimum(layout.rows + layout.counts, first + buffer) - begin, 0)
    moving = sizes > 0
    moved_N = (layout.row >= first) & (layout.row < first + buffer)
    skipped, rows = jnp.where(moving, begin - layout.rows, 0), jnp.where(moving, begin - first, 0)
    return Window(first, moved_N, sizes, skipped, rows)
