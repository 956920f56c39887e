"""The ragged all-to-all: each device sends runs of rows straight to their final place on other devices.

On GPUs this is `lax.ragged_all_to_all`. XLA:CPU has no such instruction (jax issue 34755), so there the same meaning is
spelled out with an all-gather and a gather: every device looks up, for each row of its output, who sends it.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

Groups = tuple[tuple[int, ...], ...] | None  # of indices along the mesh axis; None: all of it in one group


class Chunks(NamedTuple):
    """Runs of rows that travel in one exchange; C of them leave each device and C arrive.

    Leaving, int32[C], C / group size consecutive ones for each receiver: first row here; size; first row there.
    Arriving, int32[C], as many consecutive ones of each sender: first row here; size; first row at the sender (origin).
    """

    sender_here: Int[Array, "C"]
    sender_size: Int[Array, "C"]
    sender_there: Int[Array, "C"]
    owner_here: Int[Array, "C"]
    owner_size: Int[Array, "C"]
    owner_origin: Int[Array, "C"]

    def reversed(self) -> "Chunks":
        """The same rows on their way back."""
        return Chunks(*self[3:], *self[:3])


def fresh_rows(shape: tuple[int, ...], dtype: Any) -> Array:
    """A buffer to receive into. Its content is whatever lay there; tests put NaN into it."""
    return jnp.empty(shape, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def move_rows(
    rows: Float[Array, "A ..."], chunks: Chunks, n_there: int, n_here: int, axis_name: str, groups: Groups = None
) -> Float[Array, "B ..."]:
    """Rows [n_here, ...] of this device to a fresh buffer [n_there, ...] on the devices that the chunks name.

    Its gradient is the reversed exchange: no scatter-add, and nothing but the sent rows is read. Rows of the result,
    and of the gradient, that no chunk covers are undefined.
    """
    there = fresh_rows((n_there, *rows.shape[1:]), rows.dtype)
    c = chunks
    return ragged_all_to_all(
        rows, there, c.sender_here, c.sender_size, c.sender_there, c.owner_size, axis_name=axis_name, groups=groups
    )


def _move_forward(rows: Array, chunks: Chunks, *static: Any) -> tuple[Array, Chunks]:
    return move_rows(rows, chunks, *static), chunks


def _move_backward(n_there: int, n_here: int, axis_name: str, groups: Groups, chunks: Chunks, grad: Array) -> Any:
    return move_rows(grad, chunks.reversed(), n_here, n_there, axis_name, groups), None


move_rows.defvjp(_move_forward, _move_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def rearrange_rows(
    rows: Float[Array, "A ..."],
    here_C: Int[Array, "C"],
    size_C: Int[Array, "C"],
    there_C: Int[Array, "C"],
    n_there: int,
    n_here: int,
) -> Float[Array, "B ..."]:
    """On this device: rows [here_c, + size_c) of [n_here, ...] to [there_c, + size_c) of [n_there, ...], by one gather.

    Its gradient is the way back, a gather too. Rows that no chunk covers are undefined.
    """
    chunk, within, _ = _whose(there_C, size_C, n_there)
    return jnp.take(rows, jnp.clip(here_C[chunk] + within, 0, n_here - 1), axis=0)


def _rearrange_forward(rows: Array, here_C: Array, size_C: Array, there_C: Array, *static: int) -> tuple[Array, Any]:
    return rearrange_rows(rows, here_C, size_C, there_C, *static), (here_C, size_C, there_C)


def _rearrange_backward(n_there: int, n_here: int, chunks: Any, grad: Array) -> Any:
    here_C, size_C, there_C = chunks
    return rearrange_rows(grad, there_C, size_C, here_C, n_here, n_there), None, None, None


rearrange_rows.defvjp(_rearrange_forward, _rearrange_backward)


def ragged_all_to_all(
    operand: Float[Array, "N ..."],
    output: Float[Array, "R ..."],
    input_offsets: Int[Array, "C"],
    send_sizes: Int[Array, "C"],
    output_offsets: Int[Array, "C"],
    recv_sizes: Int[Array, "C"],
    *,
    axis_name: str,
    groups: Groups = None,
) -> Float[Array, "R ..."]:
    """As `jax.lax.ragged_all_to_all`, on every platform; no gradient of its own (see `move_rows`).

    The C chunks are C / group size consecutive ones for each receiving device. Chunk c is rows
    [input_offsets[c], + send_sizes[c]) of this device's operand, and lands at output_offsets[c] in the receiver's
    output; recv_sizes, ordered by sender, says what arrives here. Rows of `output` that nobody sends keep their value.
    """
    arguments = (operand, output, input_offsets, send_sizes, output_offsets, recv_sizes)
    listed = None if groups is None else [list(group) for group in groups]
    return lax.platform_dependent(
        *arguments,
        cpu=lambda *a: _emulated(*a, axis_name=axis_name, groups=listed),
        default=lambda *a: lax.ragged_all_to_all(*a, axis_name=axis_name, axis_index_groups=listed),
    )


def _emulated(
    operand: Array,
    output: Array,
    input_offsets: Array,
    send_sizes: Array,
    output_offsets: Array,
    recv_sizes: Array,
    *,
    axis_name: str,
    groups: list[list[int]] | None,
) -> Array:
    del recv_sizes  # what the senders say decides
    devices, me = lax.axis_size(axis_name), lax.axis_index(axis_name)
    if groups is not None:
        devices = len(groups[0])
        position = np.argsort(np.concatenate([np.asarray(group) for group in groups])) % devices
        me = jnp.asarray(position, jnp.int32)[me]
    plan = jnp.stack([input_offsets, send_sizes, output_offsets])  # [3, C]
    plans = lax.all_gather(plan, axis_name, axis_index_groups=groups)  # [sender, 3, C]
    mine = lax.dynamic_slice_in_dim(plans, me * (plan.shape[1] // devices), plan.shape[1] // devices, axis=2)
    start, size, place = (mine[:, i].reshape(-1) for i in range(3))  # chunks that come here, by sender
    sender = jnp.repeat(jnp.arange(devices), plan.shape[1] // devices)
    rows = output.shape[0]
    chunk, within, arrives = _whose(place, size, rows)
    source = sender[chunk] * operand.shape[0] + start[chunk] + within
    everything = lax.all_gather(operand, axis_name, axis_index_groups=groups, tiled=True)
    picked = jnp.take(everything, jnp.where(arrives, source, 0), axis=0)
    return jnp.where(arrives.reshape(-1, *[1] * (output.ndim - 1)), picked, output)


def _whose(place_C: Array, size_C: Array, rows: int) -> tuple[Array, Array, Array]:
    """For each of `rows` rows: the chunk that lands there, the row within it, and whether any chunk does."""
    place_C = jnp.where(size_C > 0, place_C, rows)  # empty chunks sort to the end and own no row
    order = jnp.argsort(place_C)
    row = jnp.arange(rows)
    # the chunk of a row is the last one that starts at or before it
    chunk = order[jnp.maximum(jnp.searchsorted(place_C[order], row, side="right") - 1, 0)]
    within = row - place_C[chunk]
    return chunk, within, (within >= 0) & (within < size_C[chunk])


def exclusive_cumsum(x: Int[Array, "..."], axis: int = -1) -> Int[Array, "..."]:
    """Sum of everything before, along an axis."""
    return jnp.cumsum(x, axis=axis) - x
