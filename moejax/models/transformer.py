"""The transformer: embedding, leading dense blocks, MoE blocks, head; blocks of a kind stacked on a leading axis.

    params = {"embedding": ..., "dense_blocks": stacked, "moe_blocks": stacked, "head": ...}    plain nested dicts

Hot paths (pipeline stages, optimizer, checkpoints) work on these dicts; `Parts` turns a slice of them back into a Flax
module for one call. `Transformer` is the same model as one Flax module, for notebooks and generation.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int, PyTree

from moejax.config import ModelConfig
from moejax.context import Context, single_device_context
from moejax.models.block import Block
from moejax.models.head import Embedding, Head
from moejax.models.parameters import LAYERS
from moejax.moe.layer import Auxiliary

Params = dict[str, Any]


class _Part:
    """A Flax module whose weights are handed in at each call: `part(params)` is the module with these weights."""

    def __init__(self, make: Any):
        with nnx.use_eager_sharding(False):
            abstract = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
        self.graphdef, self.state = nnx.split(abstract)
        self.make = make

    def __call__(self, params: Params) -> Any:
        state = jax.tree.map(lambda leaf: leaf, self.state)  # a copy: merging must not write into ours
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(self.graphdef, state)

    def init(self, key: Array) -> Params:
        with nnx.use_eager_sharding(False):
            return nnx.to_pure_dict(nnx.state(self.make(nnx.Rngs(params=key))))

    def axes(self) -> Params:
        """The logical axis names of every weight, in the shape of the params."""
        specs = nnx.get_partition_spec(self.state)
        return jax.tree.map(tuple, nnx.to_pure_dict(specs), is_leaf=lambda s: isinstance(s, jax.sharding.PartitionSpec))


class Parts:
    """The four kinds of module a transformer is made of."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.embedding = _Part(lambda rngs: Embedding(config, rngs=rngs))
        self.head = _Part(lambda rngs: Head(config, rngs=rngs))
        self.dense_block = _Part(lambda rngs: Block(config, moe=False, rngs=rngs))
        self.moe_block = _Part(lambda rngs: Block(config, moe=True, rngs=rngs))

    def stacks(self) -> dict[str, tuple[_Part, int, int]]:
        """Name of each stack of blocks: its part, the index of its first layer, and how many there are."""
        c = self.config
        stacks = {"dense_blocks": (self.dense_block, 0, c.n_dense_layers)}
        stacks["moe_blocks"] = (self.moe_block, c.n_dense_layers, c.n_moe_layers)
        return {name: stack for name, stack in stacks.items() if stack[2]}


@functools.cache
def parts(config: ModelConfig) -> Parts:
    return Parts(config)


def init_params(config: ModelConfig, key: Array) -> Params:
    """fp32 weights, a function of key and layer alone: jitted with any out_shardings, the values are the same."""
    p = parts(config)
    # layers take fold_in(key, layer); the ends come after any layer there could be
    params = {
        "embedding": p.embedding.init(jax.random.fold_in(key, 2**30)),
        "head": p.head.init(jax.random.fold_in(key, 2**30 + 1)),
    }
    for name, (part, first, count) in p.stacks().items():
        keys = jax.vmap(lambda layer: jax.random.fold_in(key, layer))(first + jnp.arange(count))
        params[name] = jax.vmap(part.init)(keys)
    return params


def abstract_params(config: ModelConfig) -> Params:
    """Shapes and dtypes of `init_params`, nothing computed."""
    return jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))


def logical_axes(config: ModelConfig) -> Params:
    """For each weight, the name of each of its axes; stacked blocks lead with "layers"."""
    p = parts(config)
    axes = {"embedding": p.embedding.axes(), "head": p.head.axes()}
    for name, (part, _, _) in p.stacks().items():
        axes[name] = jax.tree.map(lambda names: (LAYERS, *names), part.axes(), is_leaf=lambda a: isinstance(a, tuple))
    return axes


def forward(
    config: ModelConfig, params: Params, x: Float[Array, "B S D"], context: Context
) -> tuple[Float[Array, "B S D"], Auxiliary | None]:
    """All blocks in order on one device; auxiliary outputs stacked over the MoE layers, None without any."""
    window_L = jnp.asarray(config.windows, jnp.int32)
    auxiliary = None
    for name, (part, first, count) in parts(config).stacks().items():

        def step(x: Array, layer: tuple[Params, Array, Array], part: _Part = part) -> tuple[Array, Any]:
            block_params, window, index = layer
            return part(block_params)(x, context.for_layer(index), window)

        layers = (params[name], window_L[first : first + count], first + jnp.arange(count))
        x, auxiliary = lax.scan(step, x, layers)
    return x, auxiliary


class Transformer(nnx.Module):
    """The model as one Flax module on one device.

        model = Transformer(config.model, params)       # params from init_params, a checkpoint, or an importer
        logits = model(ids)                             # fp32[B, S, V]

    compute: dtype of activations. score_bias: fp32[L, E], by MoE layer; of routers that choose by one.
    """

    def __init__(
        self, config: ModelConfig, params: PyTree[Array], compute: Any = jnp.float32, score_bias: Any | None = None
    ):
        self.config = config
        self.score_bias = None if score_bias is None else nnx.Variable(jnp.asarray(score_bias, jnp.float32))
        self.compute = compute
        self.params = nnx.data(jax.tree.map(nnx.Param, params))

    def pure_params(self) -> Params:
        return jax.tree.map(lambda p: p[...], self.params, is_leaf=lambda p: isinstance(p, nnx.Param))

    def __call__(self, ids: Int[Array, "B S"], segment_ids: Int[Array, "B S"] | None = None) -> Float[Array, "B S V"]:
        logits, _ = self.with_routing(ids, segment_ids)
        return logits

    def with_routing(
        self, ids: Int[Array, "B S"], segment_ids: Int[Array, "B S"] | None = None
    ) -> tuple[Float[Array, "B S V"], Auxiliary | None]:
        """Logits, and the routing statistics of every MoE layer."""
        params, p = self.pure_params(), parts(self.config)
        segment_ids = jnp.zeros_like(ids) if segment_ids is None else segment_ids
        embedding = p.embedding(params["embedding"])
        x = embedding(jnp.asarray(ids), self.compute)
        bias = None
        if self.score_bias is not None:  # a row for each layer, dense ones included
            bias = jnp.pad(self.score_bias[...], ((self.config.n_dense_layers, 0), (0, 0)))
        x, auxiliary = forward(self.config, params, x, single_device_context(segment_ids, score_bias=bias))
        return p.head(params["head"]).logits(x, embedding), auxiliary

    def expert_ids(self, ids: Int[Array, "B S"], segment_ids: Int[Array, "B S"] | None = None) -> Int[Array, "L B S K"]:
        """The K experts that each MoE layer sends each token to, best first; E, one past the last, for padding."""
        segment_ids = jnp.zeros_like(ids) if segment_ids is None else segment_ids
        return _expert_ids(self.config, self.compute, self.pure_params(), jnp.asarray(ids), jnp.asarray(segment_ids))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _expert_ids(config: ModelConfig, compute: Any, params: Params, ids: Array, segment_ids: Array) -> Array:
    context = single_device_context(segment_ids)
    p, window_L = parts(config), jnp.asarray(config.windows, jnp.int32)
    x, chosen = p.embedding(params["embedding"])(ids, compute), []
    for name, (part, first, count) in p.stacks().items():

        def step(x: Array, layer: tuple[Params, Array, Array], part: _Part = part) -> tuple[Array, Array | None]:
            block, here, window = part(layer[0]), context.for_layer(layer[2]), layer[1]
            sent = block.route(x, here, window).expert_ids if block.is_moe else None
            y, _ = block(x, here, window)
            return y, sent

        layers = (params[name], window_L[first : first + count], first + jnp.arange(count))
        x, sent = lax.scan(step, x, layers)
        if sent is not None:
            chosen.append(sent.reshape(count, *ids.shape, -1))
    return jnp.concatenate(chosen)
