"""Weights: how one is declared, and the logical axis names that stand beside it.

A weight carries the names of its axes ("layers", "experts", "embed", ...). Which mesh axis a name falls on is one
table, `parallel/sharding.py`; the modules know nothing of it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

LAYERS = "layers"  # the leading axis of stacked blocks


def truncated_normal(std: float) -> Callable[[jax.Array, tuple[int, ...]], jax.Array]:
    """Normal(0, std) cut at 3 std, as Olmo-core's `init_method=normal`; fp32."""
    return lambda key, shape: std * jax.random.truncated_normal(key, -3.0, 3.0, shape, jnp.float32)


def weight(rngs: nnx.Rngs, std: float, shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
    """A trunc-normal weight with a name for each of its axes."""
    assert len(shape) == len(axes)
    return nnx.Param(truncated_normal(std)(rngs.params(), shape), out_sharding=axes)


def zeros(shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
    """A bias, all zeros, with a name for each of its axes."""
    assert len(shape) == len(axes)
    return nnx.Param(jnp.zeros(shape, jnp.float32), out_sharding=axes)


def gain(size: int, axis: str) -> nnx.Param:
    """The gain of a norm, all ones."""
    return nnx.Param(jnp.ones((size,), jnp.float32), out_sharding=(axis,))
