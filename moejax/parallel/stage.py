"""What one pipeline stage does with one microbatch: forward, and forward with backward.

    forward    x or tokens --blocks--> y
    backward   x or tokens --blocks, keeping residuals--> loss or the cotangent that came --blocks reversed--> dx

The backward is written out, layer by layer: a scan over the blocks that keeps what each block's VJP needs, and a scan
back that adds each layer's weight gradient to the fp32 accumulator in its slot. So there is never a second buffer of
the size of all gradients, weights are never copied among the residuals, and nothing differentiates through a scan.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, PyTree

from moejax.config import ModelConfig, Recompute
from moejax.context import Context
from moejax.models.transformer import Params, parts
from moejax.moe.statistics import RouterStatistics, merge, zero_statistics
from moejax.parallel.layout import Layout, StageKind


class Microbatch(NamedTuple):
    """int32[B, S] each, this device's sequences of one microbatch; label -100 has no loss, segment -1 is padding."""

    tokens: Int[Array, "B S"]
    labels: Int[Array, "B S"]
    segment_ids: Int[Array, "B S"]
    positions: Int[Array, "B S"]


class Place(NamedTuple):
    """Where a chunk's layers are: first rows in the local stacks, and the index of its first layer in the model."""

    dense_slot: Int[Array, ""]
    moe_slot: Int[Array, ""]
    layer: Int[Array, ""]


class Totals(NamedTuple):
    """Sums over microbatches on this device, fp32.

    cross_entropy and z over non-ignored tokens (undivided); auxiliary: weighted, divided router losses;
    statistics: by slot of this stage, None without MoE layers.
    """

    cross_entropy: Float[Array, ""]
    z: Float[Array, ""]
    auxiliary: Float[Array, ""]
    statistics: RouterStatistics | None


@dataclass(frozen=True)
class StageProgram:
    """The code of all stages of one model. `slots` are this stage's MoE rows (0: none)."""

    model: ModelConfig
    layout: Layout
    compute: Any
    recompute: Recompute

    @property
    def moe_slots(self) -> int:
        stack = self.layout.stacks.get("moe_blocks")
        return stack.slots if stack else 0

    def zero_totals(self) -> Totals:
        zero = jnp.zeros((), jnp.float32)
        statistics = zero_statistics(self.model.moe.num_experts, self.moe_slots) if self.moe_slots else None
        return Totals(zero, zero, zero, statistics)

    def _stacks(self, kind: StageKind, place: Place) -> list[tuple[str, int, Array, Array]]:
        """(name, layers here, first slot, first layer) of each stack this kind of stage has."""
        stacks = [
            ("dense_blocks", kind.n_dense, place.dense_slot, place.layer),
            ("moe_blocks", kind.n_moe, place.moe_slot, place.layer + kind.n_dense),
        ]
        return [stack for stack in stacks if stack[1]]

    def _block(self, name: str, context: Context, layer: Array) -> Callable[[Params, Array], Any]:
        """f(params, x) -> ((y, auxiliary loss), statistics or None)."""
        p = parts(self.model)
        part = p.moe_block if name == "moe_blocks" else p.dense_block
        window = jnp.asarray(self.model.windows, jnp.int32)[layer]
        here = context.for_layer(layer)

        def block(params: Params, x: Array) -> Any:
            y, auxiliary = part(params)(x, here, window)
            if auxiliary is None:
                return (y, jnp.zeros((), jnp.float32)), None
            return (y, auxiliary.loss), auxiliary.statistics

        return block

    def embed(self, params: Params, tokens: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        with jax.named_scope("embedding"):
            return parts(self.model).embedding(params)(tokens, self.compute)

    def head_loss(self, head: Params, embedding: Params, x: Array, labels: Array) -> tuple[Array, Any]:
        p = parts(self.model)
        with jax.named_scope("head"):
            return p.head(head).loss(x, labels, p.embedding(embedding))

    def forward(
        self, kind: StageKind, params: Params, x: Array | None, batch: Microbatch, context: Context, place: Place
    ) -> Array:
        """Activation for the next virtual stage; x is None on the first one, which reads the tokens."""
        x = self.embed(params["embedding"], batch.tokens) if kind.first else x
        for name, count, slot, layer in self._stacks(kind, place):

            def step(
                x: Array, i: Array, name: str = name, slot: Array = slot, layer: Array = layer
            ) -> tuple[Array, None]:
                (y, _), _ = self._block(name, context, layer + i)(row(params[name], slot + i), x)
                return y, None

            x, _ = lax.scan(step, x, jnp.arange(count))
        return x

    def backward(
        self,
        kind: StageKind,
        params: Params,
        x: Array | None,
        cotangent: Array | None,
        batch: Microbatch,
        context: Context,
        place: Place,
        gradients: Params,
        totals: Totals,
    ) -> tuple[Array, Params, Totals]:
        """(cotangent for the virtual stage before, gradients and totals with this microbatch added).

        cotangent is None on the last virtual stage, which has the loss; the returned one is zeros on the first.
        """
        gradients = dict(gradients)
        pull_embedding = None
        if kind.first:
            x, pull_embedding = jax.vjp(lambda p: self.embed(p, batch.tokens), params["embedding"])
        kept = []
        for name, count, slot, layer in self._stacks(kind, place):
            x, residuals, auxiliary, statistics = self._keep(name, count, slot, layer, params[name], x, context)
            kept.append((name, count, slot, layer, residuals))
            totals = totals._replace(auxiliary=totals.auxiliary + auxiliary)
            if statistics is not None:
                totals = totals._replace(statistics=_merge_rows(totals.statistics, statistics, slot))
        if kind.last:
            share = lambda h, e, x: self.head_loss(h, e, x, batch.labels)  # noqa: E731
            loss, pull_head, sums = jax.vjp(share, params["head"], params["embedding"], x, has_aux=True)
            d_head, d_embedding, cotangent = pull_head(jnp.ones_like(loss) / context.loss_tokens)
            gradients["head"] = add(gradients["head"], d_head)
            if self.model.tie_embeddings:
                gradients["embedding"] = add(gradients["embedding"], d_embedding)
            totals = totals._replace(cross_entropy=totals.cross_entropy + sums.cross_entropy, z=totals.z + sums.z)
        for name, count, slot, layer, residuals in reversed(kept):
            cotangent, gradients[name] = self._pull_back(
                name, count, slot, layer, params[name], residuals, context, cotangent, gradients[name]
            )
        if pull_embedding is not None:
            (d_embedding,) = pull_embedding(cotangent)
            gradients["embedding"] = add(gradients["embedding"], d_embedding)
            cotangent = jnp.zeros_like(cotangent)
        return cotangent, gradients, totals

    def _keep(
        self, name: str, count: int, slot: Array, layer: Array, stack: Params, x: Array, context: Context
    ) -> tuple[Array, "Residuals", Array, RouterStatistics | None]:
        """Forward through a stack, keeping what its backward needs; also the summed auxiliary loss, and statistics by
        layer."""
        rebuild: dict[str, Any] = {}

        def step(x: Array, i: Array) -> tuple[Array, Any]:
            params = row(stack, slot + i)
            block = self._block(name, context, layer + i)
            if self.recompute == Recompute.block:
                (y, loss), statistics = block(params, x)
                return y, ([x], loss, statistics)
            (y, loss), pull, statistics = jax.vjp(block, params, x, has_aux=True)
            leaves, rebuild["tree"] = jax.tree.flatten(pull)
            given = _at_hand(params, context)
            at_hand = {id(value): n for n, value in enumerate(given)}
            kept = {id(leaf): leaf for leaf in leaves if id(leaf) not in at_hand}  # once, however many rules need it
            place = {leaf: n for n, leaf in enumerate(kept, start=len(given))}
            rebuild["source"] = [(at_hand | place)[id(leaf)] for leaf in leaves]
            return y, (list(kept.values()), loss, statistics)

        x, (kept, losses, statistics) = lax.scan(step, x, jnp.arange(count))
        return x, Residuals(kept, rebuild.get("tree"), rebuild.get("source", [])), jnp.sum(losses), statistics

    def _pull_back(
        self,
        name: str,
        count: int,
        slot: Array,
        layer: Array,
        stack: Params,
        residuals: "Residuals",
        context: Context,
        cotangent: Array,
        gradients: Params,
    ) -> tuple[Array, Params]:
        """Backward through a stack; each layer's gradient is added to its slot as soon as it is there."""

        def step(carry: tuple[Array, Params], inputs: tuple[Array, list[Array]]) -> tuple[Any, None]:
            (dy, gradients), (i, kept) = carry, inputs
            params = row(stack, slot + i)
            if self.recompute == Recompute.block:
                _, pull, _ = jax.vjp(self._block(name, context, layer + i), params, kept[0], has_aux=True)
            else:
                pull = residuals.rebuild(kept, _at_hand(params, context))
            d_params, dx = pull((dy, jnp.ones((), jnp.float32)))
            return (dx, add_row(gradients, d_params, slot + i)), None

        (cotangent, gradients), _ = lax.scan(
            step, (cotangent, gradients), (jnp.arange(count), residuals.kept), reverse=True
        )
        return cotangent, gradients


@dataclass
class Residuals:
    """Residuals of a stack of blocks, stacked by layer, without those that are at hand in the backward anyway.

    kept: arrays [layers, ...]. tree, source: how to put one layer's VJP together again; source[n] is the index of
    leaf n among the arrays at hand and the kept ones after them.
    """

    kept: list[Array]
    tree: Any
    source: list[int]

    def rebuild(self, kept: list[Array], at_hand: list[Array]) -> Any:
        arrays = [*at_hand, *kept]
        return jax.tree.unflatten(self.tree, [arrays[n] for n in self.source])


def _at_hand(params: Params, context: Context) -> list[Array]:
    """Arrays that need no keeping: this layer's weights, and what belongs to the microbatch."""
    fields = (getattr(context, field.name) for field in dataclasses.fields(context))
    return [*jax.tree.leaves(params), *(value for value in fields if isinstance(value, jax.Array))]


def row(stack: PyTree[Array], index: Array) -> PyTree[Array]:
    """One layer's weights out of a stack."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), stack)


def add(total: PyTree[Array], more: PyTree[Array]) -> PyTree[Array]:
    """fp32 accumulation: total + more."""
    return jax.tree.map(lambda t, m: t + m.astype(t.dtype), total, more)


def add_row(stack: PyTree[Array], more: PyTree[Array], index: Array) -> PyTree[Array]:
    """Adds one layer's gradient to its row, in place."""
    return jax.tree.map(lambda s, m: s.at[index].add(m.astype(s.dtype)), stack, more)


def _merge_rows(stack: RouterStatistics, more: RouterStatistics, first: Array) -> RouterStatistics:
    """Statistics of a few layers into their slots."""
    there = jax.tree.map(lambda s, m: lax.dynamic_slice_in_dim(s, first, m.shape[0]), stack, more)
    merged = merge(there, more)
    return jax.tree.map(lambda s, m: lax.dynamic_update_slice_in_dim(s, m, first, axis=0), stack, merged)
