"""What one microbatch and layer tell about their routing, and how it is put together over microbatches and devices.

    RouterStatistics of a microbatch --merge--> of a step on this device --reduce_over_devices--> of the step

Everything adds up but the occupancy, of which the fullest counts. Counted in the backward pass of a microbatch alone,
so neither recompute nor the forward ticks of a pipeline count twice. Nothing here waits for the host.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float


class RouterStatistics(NamedTuple):
    """fp32; over the valid tokens (segment >= 0), of one layer or with a leading axis of layers.

    counts: [E]; routes per expert, before any drop. scores: [E]; sum of the scores, which are L1-normalised per token.
    balance: load-balancing loss without weight, N times its mean. z: sum of squared log-sum-exps.
    margin: sum over tokens of the gap between the last chosen score and the best one not chosen, both of the selection
    scores: how little would send the token elsewhere; 0 when every expert is chosen.
    occupancy: largest number of rows for one device over the rows of its buffer. overflow: rows past the end of a
    buffer.
    dropped: those of them that no expert saw. rounds: times the buffers were filled. exchanges: layers' calls, one a
    device.
    """

    counts: Float[Array, "E"]
    scores: Float[Array, "E"]
    balance: Float[Array, ""]
    z: Float[Array, ""]
    margin: Float[Array, ""]
    occupancy: Float[Array, ""]
    overflow: Float[Array, ""]
    dropped: Float[Array, ""]
    rounds: Float[Array, ""]
    exchanges: Float[Array, ""]


MAXIMA = ("occupancy",)


def zero_statistics(n_experts: int, layers: int) -> RouterStatistics:
    per_expert, scalar = jnp.zeros((layers, n_experts), jnp.float32), jnp.zeros((layers,), jnp.float32)
    widths = dict(counts=per_expert, scores=per_expert)
    return RouterStatistics(**{name: widths.get(name, scalar) for name in RouterStatistics._fields})


def merge(a: RouterStatistics, b: RouterStatistics) -> RouterStatistics:
    """Of two microbatches, or two parts of one."""
    pairs = zip(RouterStatistics._fields, a, b, strict=True)
    return RouterStatistics(*(jnp.maximum(x, y) if name in MAXIMA else x + y for name, x, y in pairs))


def reduce_over_devices(
    statistics: RouterStatistics, add: Callable[[Any], Any], largest: Callable[[Any], Any]
) -> RouterStatistics:
    """add and largest: psum and pmax over the devices that hold other tokens."""
    summed = add({name: x for name, x in statistics._asdict().items() if name not in MAXIMA})
    return RouterStatistics(**summed, **largest({name: getattr(statistics, name) for name in MAXIMA}))
