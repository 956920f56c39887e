"""Fully sharded data parallelism: every weight is cut over dp and ep, and whole only while its layer runs.

    shard --all-gather--> the layer's weights --forward--> y          freed after it
    shard --all-gather--> the layer's weights, dy --backward--> dx, gradient --reduce-scatter in fp32--> its shard

The generation of systems before resident experts (FSDP, ZeRO-3), kept as the measured baseline
(`moejax.bench strategies`). There is no expert parallelism: all devices run all experts on their own tokens, so every
microbatch moves every expert's weights three times, whether few tokens want it or many. `StageProgram` calls `gather`
inside what it differentiates, and a block's backward computes again what follows from weights alone
(`block_program`): so the second all-gather is there by itself, and no gathered weight is ever kept.

Weights travel in `precision.params` (what a layer casts further it casts after, so the model is the same), gradients
are summed in fp32: with bf16 weights as the baseline of Olmo-core 3 (`moe_8l_fsdp`: param bf16, reduce fp32).
"""

import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import PyTree

from moejax.models.transformer import Params
from moejax.parallel.sharding import ZeroLayout


def gather(layouts: dict[str, PyTree[ZeroLayout]]) -> Callable[[str, Params], Params]:
    """f(name, shards) -> whole weights; name: "embedding", "head", or a stack of blocks.

    A stack's shards come as one layer's, without the leading axis that its layout has. Inside the manual region.
    """

    def whole(name: str, shards: Params) -> Params:
        stacked = name.endswith("_blocks")

        def one(shard: Array, layout: ZeroLayout) -> Array:
            if not layout.scatter_axes:
                return shard
            return _gathered(shard, layout.scatter_axes, layout.dimension - stacked)

        with jax.named_scope("gather_weights"):
            return jax.tree.map(one, shards, layouts[name])

    return whole


def not_yet_summed(layouts: PyTree[ZeroLayout]) -> PyTree[ZeroLayout]:
    """What remains to be done with a gradient whose scattered part the backward has summed already."""
    return jax.tree.map(lambda layout: replace(layout, scatter_axes=()), layouts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(shard: Array, axes: tuple[str, ...], dimension: int) -> Array:
    """The whole weight; its gradient is the sum over the devices of all cotangents, cut again, added up in fp32."""
    return lax.all_gather(shard, axes, axis=dimension, tiled=True)


def _forward(shard: Array, axes: tuple[str, ...], dimension: int) -> tuple[Array, None]:
    return _gathered(shard, axes, dimension), None


def _backward(axes: tuple[str, ...], dimension: int, _: None, gradient: Array) -> tuple[Array]:
    summed = lax.psum_scatter(gradient.astype(jnp.float32), axes, scatter_dimension=dimension, tiled=True)
    return (summed.astype(gradient.dtype),)


_gathered.defvjp(_forward, _backward)
