"""The ragged all-to-all: each device sends runs of rows straight to their final place on other devices.

On GPUs this is `lax.ragged_all_to_all`. XLA:CPU has no such instruction (jax issue 34755), so there the same meaning is
spelled out with an all-gather and a gather: every device looks up, for each row of its output, who sends it.
"""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int


def ragged_all_to_all(
    operand: Float[Array, "N ..."],
    output: Float[Array, "R ..."],
    input_offsets: Int[Array, "C"],
    send_sizes: Int[Array, "C"],
    output_offsets: Int[Array, "C"],
    recv_sizes: Int[Array, "C"],
    axis_name: str,
) -> Float[Array, "R ..."]:
    """As `jax.lax.ragged_all_to_all`, on every platform; no gradient of its own (dispatch and combine mirror each other).

    The C chunks are C / axis size consecutive ones for each receiving device. Chunk c is rows
    [input_offsets[c], + send_sizes[c]) of this device's operand, and lands at output_offsets[c] in the receiver's
    output; recv_sizes, ordered by sender, says what arrives here. Rows of `output` that nobody sends keep their value.
    """
    arguments = (operand, output, input_offsets, send_sizes, output_offsets, recv_sizes)
    return lax.platform_dependent(
        *arguments,
        cpu=lambda *a: _emulated(*a, axis_name=axis_name),
        default=lambda *a: lax.ragged_all_to_all(*a, axis_name=axis_name),
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
) -> Array:
    del recv_sizes  # what the senders say decides
    devices = lax.axis_size(axis_name)
    me = lax.axis_index(axis_name)
    plan = jnp.stack([input_offsets, send_sizes, output_offsets])  # [3, C]
    plans = lax.all_gather(plan, axis_name)  # [sender, 3, C]
    mine = lax.dynamic_slice_in_dim(plans, me * (plan.shape[1] // devices), plan.shape[1] // devices, axis=2)
    start, size, place = (mine[:, i].reshape(-1) for i in range(3))  # chunks that come here, by sender
    sender = jnp.repeat(jnp.arange(devices), plan.shape[1] // devices)
    rows = output.shape[0]
    place = jnp.where(size > 0, place, rows)  # empty chunks sort to the end and own no row
    order = jnp.argsort(place)
    row = jnp.arange(rows)
    # the chunk of a row is the last one that starts at or before it
    chunk = order[jnp.maximum(jnp.searchsorted(place[order], row, side="right") - 1, 0)]
    within = row - place[chunk]
    arrives = (within >= 0) & (within < size[chunk])
    source = sender[chunk] * operand.shape[0] + start[chunk] + within
    everything = lax.all_gather(operand, axis_name, tiled=True)
    picked = jnp.take(everything, jnp.where(arrives, source, 0), axis=0)
    return jnp.where(arrives.reshape(-1, *[1] * (output.ndim - 1)), picked, output)


def exclusive_cumsum(x: Int[Array, "..."], axis: int = -1) -> Int[Array, "..."]:
    """Sum of everything before, along an axis."""
    return jnp.cumsum(x, axis=axis) - x

