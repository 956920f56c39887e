"""Forward passes without training, on any mesh: prompts and next tokens with a cache, and log-likelihoods of given
text.

    rows of the batch --split over all devices--> each device runs the whole model, tokens travel to experts over ep

Experts are sharded over ep as in training. The rest is whole on every device, layers too: the stages of a pipeline
would wait for each other one token at a time, so pp devices take rows of the batch instead, as dp devices do.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moejax.config import Config
from moejax.context import Context
from moejax.errors import UserError
from moejax.mesh import AXES, MeshShape
from moejax.models import decoding
from moejax.models.decoding import Cache
from moejax.models.head import IGNORED
from moejax.models.transformer import Params, abstract_params, forward, logical_axes, parts
from moejax.moe.choose import choose_transport
from moejax.parallel import sharding

ROWS = PartitionSpec(AXES)
CACHE = Cache(*[PartitionSpec(None, AXES)] * 2)


class Sampling(NamedTuple):
    """temperature: 0 takes the likeliest token. top_k: 0 for all. top_p: 1 for all. seed: of the draws."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


class InferenceProgram:
    """The forward passes of one config on one mesh. Raises UserError if the experts do not divide over ep."""

    def __init__(self, config: Config, mesh: Mesh):
        self.config, self.mesh = config, mesh
        self.shape = MeshShape(**dict(mesh.shape))
        experts = config.model.moe.num_experts
        if config.model.n_moe_layers and experts % self.shape.ep:
            raise UserError(
                f"The mesh {self.shape} does not fit: ep={self.shape.ep} does not divide the {experts} experts."
            )
        self.transport = choose_transport(config, self.shape).transport
        self._score_bias: np.ndarray | None = None
        self.compute = jnp.dtype(config.precision.compute.value)
        axes = logical_axes(config.model)
        self.specs = jax.tree.map(
            lambda names: PartitionSpec(*("ep" if name == "experts" else None for name in names)),
            axes,
            is_leaf=sharding.is_axes,
        )

    @property
    def row_multiple(self) -> int:
        """A batch has a multiple of this many rows."""
        return self.shape.devices

    def target(self) -> Params:
        """Shapes and shardings to restore the fp32 weights into."""
        return jax.tree.map(
            lambda shape, spec: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(self.mesh, spec)),
            abstract_params(self.config.model),
            self.specs,
        )

    def place(self, params: Params) -> Params:
        """Weights in the dtype of `precision.params`, on this mesh."""
        dtype = jnp.dtype(self.config.precision.params.value)
        shardings = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs)
        return jax.tree.map(lambda x, sharding: jax.device_put(x, sharding).astype(dtype), params, shardings)

    def _split(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def _context(self, segment_ids: Array, positions: Array) -> Context:
        rows = _rows(segment_ids.shape[0])
        count = jnp.maximum(jnp.sum(segment_ids >= 0), 1).astype(jnp.float32)
        key, bias = jax.random.key(0), self._score_bias
        return Context(segment_ids, positions, rows, count, count, self.transport, key=key, score_bias=bias)

    def take_score_bias(self, score_bias: Array | None) -> None:
        """fp32[L, E], by MoE layer; before the first forward pass."""
        if score_bias is not None:  # a row for each layer, dense ones included
            self._score_bias = np.pad(np.asarray(score_bias), ((self.config.model.n_dense_layers, 0), (0, 0)))

    # --- generation ------------------------------------------------------------------------------------------------

    def empty_cache(self, batch: int, positions: int) -> Cache:
        make = functools.partial(decoding.empty_cache, self.config.model, batch, positions, self.compute)
        return jax.jit(make, out_shardings=jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), CACHE))()

    def next_tokens(
        self, params: Params, tokens: Array, first: Array, lengths: Array, cache: Cache, step: int, sampling: Sampling
    ) -> tuple[Array, Cache]:
        """int32[B], one more token for each row, and the cache with `tokens` [B, S] in it; see `decoding.extend`.

        step: how many were generated before; the draw depends on it. The cache given is used up.
        """
        draw = jnp.array([sampling.seed, step], jnp.uint32)
        return self._next_tokens(params, tokens, first, lengths, cache, draw, sampling._replace(seed=0))

    @functools.partial(jax.jit, static_argnums=(0, 7), donate_argnums=5)
    def _next_tokens(
        self, params: Params, tokens: Array, first: Array, lengths: Array, cache: Cache, draw: Array, sampling: Sampling
    ) -> tuple[Array, Cache]:
        """draw: uint32[2], seed and step; any of them runs the same program."""

        def region(params: Params, tokens: Array, first: Array, lengths: Array, cache: Cache, draw: Array) -> Any:
            segment_ids = jnp.where(jnp.arange(tokens.shape[1]) < lengths[:, None], 0, -1)
            context = self._context(segment_ids, first[:, None] + jnp.arange(tokens.shape[1]))
            logits, cache = decoding.extend(self.config.model, params, tokens, first, lengths, cache, context)
            key, step = jax.random.key(draw[0]), draw[1]
            rows = _rows(tokens.shape[0])
            drawn = decoding.sample(logits, key, rows, step, sampling.temperature, sampling.top_k, sampling.top_p)
            return drawn, cache

        in_specs = (self.specs, ROWS, ROWS, ROWS, CACHE, PartitionSpec())
        return self._split(region, in_specs, (ROWS, CACHE))(params, tokens, first, lengths, cache, draw)

    # --- scoring ---------------------------------------------------------------------------------------------------

    @functools.partial(jax.jit, static_argnums=0)
    def log_likelihoods(self, params: Params, tokens: Array, labels: Array) -> tuple[Array, Array]:
        """fp32[B, S], the log-probability in nats of each label given the tokens up to its place, 0 where ignored
        (-100); and bool[B, S], whether it is the likeliest token. Tokens that are -1 are padding: they follow the
        text of a row."""

        def region(params: Params, tokens: Array, labels: Array) -> tuple[Array, Array]:
            p = parts(self.config.model)
            segment_ids = jnp.where(tokens < 0, -1, 0)
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
            embedding = p.embedding(params["embedding"])
            x = embedding(jnp.maximum(tokens, 0), self.compute)
            x, _ = forward(self.config.model, params, x, self._context(segment_ids, positions))
            head = p.head(params["head"])

            def row(pair: tuple[Array, Array]) -> tuple[Array, Array]:  # logits of one row at a time
                x_SD, labels_S = pair
                logits_SV = head.logits(x_SD, embedding)
                picked = jnp.take_along_axis(logits_SV, jnp.maximum(labels_S, 0)[:, None], axis=-1)[:, 0]
                counted = labels_S != IGNORED
                likelihood = jnp.where(counted, picked - jax.nn.logsumexp(logits_SV, axis=-1), 0.0)
                return likelihood, counted & (jnp.argmax(logits_SV, axis=-1) == labels_S)

            return lax.map(row, (x, labels))

        return self._split(region, (self.specs, ROWS, ROWS), (ROWS, ROWS))(params, tokens, labels)


def _rows(here: int) -> Array:
    """Index in the whole batch of each row of this device, inside the manual region."""
    return lax.axis_index(AXES) * here + jnp.arange(here, dtype=jnp.int32)


def padded_length(length: int) -> int:
    """A power of two from 16 on: few different shapes, so few compilations."""
    return max(16, 1 << (length - 1).bit_length())


def pad_rows(arrays: list[np.ndarray], multiple: int, fill: int) -> np.ndarray:
    """int32[B, S] of rows of different lengths, filled at their ends; B a multiple, S a `padded_length`."""
    length = padded_length(max(map(len, arrays)))
    out = np.full((-(-len(arrays) // multiple) * multiple, length), fill, np.int32)
    for row, array in zip(out, arrays, strict=False):
        row[: len(array)] = array
    return out
