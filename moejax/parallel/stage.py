"""What one pipeline stage does with one microbatch: its layers forward, and backward in one piece or in two.

    forward       x --blocks--> y
    keep          x --blocks--> y, and each block's residuals in a slot of the stash
    pull          dy --blocks reversed, from the stash--> dx, and each layer's gradient added in its slot
    pull_input    dy --blocks reversed, from the stash--> dx, and what the weight gradients need in a slot of `between`
    pull_weight   stash, between --> gradients, no layer waiting for another

The backward is written out, layer by layer: a scan over the blocks that keeps what each block's VJP needs, and a scan
back that adds each layer's weight gradient to the fp32 accumulator in its slot. So there is never a second buffer of
the size of all gradients, weights are never copied among the residuals, and nothing differentiates through a scan. What
is kept of a block, and how its backward is cut in two, is `block_program`'s.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Int, PyTree

from moejax.config import ModelConfig, Recompute
from moejax.context import Context
from moejax.models.quantised import separate
from moejax.models.transformer import Params, parts
from moejax.moe.statistics import RouterStatistics, merge, zero_statistics
from moejax.parallel.block_program import BlockProgram
from moejax.parallel.layout import Layout, StageKind

# (name, weights as they lie on this device) -> as the computation needs them; name: of an end, or a stack of blocks.
Whole = Callable[[str, Params], Params]
# By stack of blocks: arrays [slots, layers, ...].
Stash = dict[str, list[Array]]
STACKS = ("dense_blocks", "moe_blocks")


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
    """The code of all stages of one model.

    recompute: what a block's backward runs again. named: regions whose values it keeps all the same if recompute=named.
    whole: what happens to a layer's weights before they are used; differentiated (`fsdp.gather`).
    """

    model: ModelConfig
    layout: Layout
    compute: Any
    recompute: Recompute
    named: tuple[str, ...] = ()
    whole: Whole = lambda name, params: params

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

    def _block(self, name: str, context: Context) -> Callable[[Params, Array, Any], Any]:
        """f(params, x, known) -> ((y, auxiliary loss), statistics or None); known as `_layer`, the rest from
        context."""
        p = parts(self.model)
        part = p.moe_block if name == "moe_blocks" else p.dense_block

        def block(params: Params, x: Array, known: Any) -> Any:
            arrays, window, quantised = known
            here = replace(context, **arrays, transport=_Named(context.transport), quantised=quantised)
            y, auxiliary = part(self.whole(name, params))(x, here, window)
            if auxiliary is None:
                return (y, jnp.zeros((), jnp.float32)), None
            return (y, auxiliary.loss), auxiliary.statistics

        if self.recompute == Recompute.none:
            return block
        names = self.named if self.recompute == Recompute.named else ()
        return jax.checkpoint(block, policy=lambda *a, **k: _is_kept(names, *a, **k))

    def _layer(self, params: Params, name: str, slot: Array, context: Context, layer: Array) -> tuple[Params, Any]:
        """(what gradients belong to, what a block knows besides it and its activation): of a layer, its weights, the
        arrays of its context, its attention window, and its weights in MXFP8."""
        weights, quantised = separate(row(params[name], slot), self.compute)
        here = context.for_layer(layer)
        arrays = {f.name: getattr(here, f.name) for f in fields(here)}
        arrays = {name: value for name, value in arrays.items() if isinstance(value, jax.Array)}
        return weights, (arrays, jnp.asarray(self.model.windows, jnp.int32)[layer], quantised)

    def blocks(self, params: Params, x: Any, context: Context) -> dict[str, BlockProgram]:
        """The program of a block of each stack; x: shape and dtype of an activation."""
        layer, made = jnp.zeros((), jnp.int32), {}
        for name in (name for name in STACKS if name in self.layout.stacks):
            weights, known = jax.eval_shape(lambda n=name: self._layer(params, n, layer, context, layer))
            made[name] = BlockProgram(self._block(name, context), weights, x, known)
        return made

    def empty_stash(
        self,
        blocks: dict[str, BlockProgram],
        slots: int,
        between: bool = False,
        kinds: Sequence[StageKind] | None = None,
    ) -> Stash:
        """Room for what blocks keep (or for what goes between the halves of their backwards). kinds: of the stages that
        may use it; None for any stage of the model."""
        stash = {}
        for name, block in blocks.items():
            layers = max(k.n_dense if name == "dense_blocks" else k.n_moe for k in kinds or self.layout.kinds)
            shapes = block.split() if between else block.kept
            stash[name] = [jnp.zeros((slots, layers, *s.shape), s.dtype) for s in shapes]
        return stash

    def embed(self, params: Params, tokens: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        with jax.named_scope("embedding"):
            return parts(self.model).embedding(self.whole("embedding", params))(tokens, self.compute)

    def head_loss(self, head: Params, embedding: Params, x: Array, labels: Array) -> tuple[Array, Any]:
        p = parts(self.model)
        with jax.named_scope("head"):
            if self.model.tie_embeddings:
                embedding = self.whole("embedding", embedding)
            return p.head(self.whole("head", head)).loss(x, labels, p.embedding(embedding))

    def forward(self, kind: StageKind, params: Params, x: Array, context: Context, place: Place) -> Array:
        for name, count, slot, layer in self._stacks(kind, place):
            block = self._block(name, context)

            def step(
                x: Array, i: Array, name: str = name, slot: Array = slot, layer: Array = layer, block: Any = block
            ) -> tuple[Array, None]:
                weights, known = self._layer(params, name, slot + i, context, layer + i)
                (y, _), _ = block(weights, x, known)
                return y, None

            x, _ = lax.scan(step, x, jnp.arange(count))
        return x

    def keep(
        self,
        kind: StageKind,
        blocks: dict[str, BlockProgram],
        params: Params,
        x: Array,
        context: Context,
        place: Place,
        stash: Stash,
        slot: Array | int,
        totals: Totals,
    ) -> tuple[Array, Stash, Totals]:
        """(y, stash with this microbatch's residuals in `slot`, totals with its router losses added)."""
        stash = dict(stash)
        for name, count, first, layer in self._stacks(kind, place):

            def step(
                carry: Any, i: Array, name: str = name, first: Array = first, layer: Array = layer
            ) -> tuple[Any, Any]:
                x, rings = carry
                weights, known = self._layer(params, name, first + i, context, layer + i)
                ((y, loss), statistics), kept = blocks[name].keep(weights, x, known)
                return (y, _write(rings, kept, slot, i)), (loss, statistics)

            (x, stash[name]), (losses, statistics) = lax.scan(step, (x, stash[name]), jnp.arange(count))
            totals = totals._replace(auxiliary=totals.auxiliary + jnp.sum(losses))
            if statistics is not None:
                totals = totals._replace(statistics=_merge_rows(totals.statistics, statistics, first))
        return x, stash, totals

    def pull(
        self,
        kind: StageKind,
        blocks: dict[str, BlockProgram],
        params: Params,
        context: Context,
        place: Place,
        stash: Stash,
        slot: Array | int,
        cotangent: Array,
        gradients: Params,
    ) -> tuple[Array, Params]:
        """(cotangent of the stage's input, gradients with this microbatch's added)."""
        gradients = dict(gradients)
        for name, count, first, layer in reversed(self._stacks(kind, place)):

            def step(
                carry: tuple[Array, Params], i: Array, name: str = name, first: Array = first, layer: Array = layer
            ) -> tuple[Any, None]:
                dy, sums = carry
                weights, known = self._layer(params, name, first + i, context, layer + i)
                kept = _read(stash[name], slot, i)
                dx, more = blocks[name].pull(weights, known, kept, dy)
                return (dx, add_row(sums, more, first + i)), None

            (cotangent, gradients[name]), _ = lax.scan(
                step, (cotangent, gradients[name]), jnp.arange(count), reverse=True
            )
        return cotangent, gradients

    def pull_input(
        self,
        kind: StageKind,
        blocks: dict[str, BlockProgram],
        params: Params,
        context: Context,
        place: Place,
        stash: Stash,
        slot: Array | int,
        cotangent: Array,
        between: Stash,
        between_slot: Array | int,
    ) -> tuple[Array, Stash]:
        """(cotangent of the stage's input, `between` with what the weight gradients need in its slot)."""
        between = dict(between)
        for name, count, first, layer in reversed(self._stacks(kind, place)):

            def step(
                carry: tuple[Array, list[Array]], i: Array, name: str = name, first: Array = first, layer: Array = layer
            ) -> tuple[Any, None]:
                dy, rings = carry
                weights, known = self._layer(params, name, first + i, context, layer + i)
                kept = _read(stash[name], slot, i)
                dx, handed_on = blocks[name].pull_input(weights, known, kept, dy)
                return (dx, _write(rings, handed_on, between_slot, i)), None

            (cotangent, between[name]), _ = lax.scan(step, (cotangent, between[name]), jnp.arange(count), reverse=True)
        return cotangent, between

    def pull_weight(
        self,
        kind: StageKind,
        blocks: dict[str, BlockProgram],
        params: Params,
        context: Context,
        place: Place,
        stash: Stash,
        slot: Array | int,
        between: Stash,
        between_slot: Array | int,
        gradients: Params,
    ) -> Params:
        """Gradients with this microbatch's added."""
        gradients = dict(gradients)
        for name, count, first, layer in self._stacks(kind, place):

            def step(
                sums: Params, i: Array, name: str = name, first: Array = first, layer: Array = layer
            ) -> tuple[Params, None]:
                weights, known = self._layer(params, name, first + i, context, layer + i)
                kept = _read(stash[name], slot, i)
                handed_on = _read(between[name], between_slot, i)
                more = blocks[name].pull_weight(weights, known, kept, handed_on)
                return add_row(sums, more, first + i), None

            gradients[name], _ = lax.scan(step, gradients[name], jnp.arange(count))
        return gradients

    def pull_head(
        self, params: Params, y: Array, batch: Microbatch, context: Context, gradients: Params, totals: Totals
    ) -> tuple[Array, Params, Totals]:
        """(cotangent of the last block's output, gradients and totals with the head's and the loss's added)."""
        gradients = dict(gradients)
        share = lambda h, e, x: self.head_loss(h, e, x, batch.labels)  # noqa: E731
        loss, pull, sums = jax.vjp(share, params["head"], params["embedding"], y, has_aux=True)
        d_head, d_embedding, cotangent = pull(jnp.ones_like(loss) / context.loss_tokens)
        gradients["head"] = add(gradients["head"], d_head)
        if self.model.tie_embeddings:
            gradients["embedding"] = add(gradients["embedding"], d_embedding)
        return cotangent, gradients, add_losses(totals, sums)

    def pull_embedding(self, params: Params, batch: Microbatch, cotangent: Array, gradients: Params) -> Params:
        """Gradients with the embedding's added."""
        _, pull = jax.vjp(lambda p: self.embed(p, batch.tokens), params["embedding"])
        (d_embedding,) = pull(cotangent)
        return gradients | {"embedding": add(gradients["embedding"], d_embedding)}


class _Named:
    """A transport whose arriving rows have a name that a recompute policy can keep them by."""

    def __init__(self, transport: Any):
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def dispatch(self, *arguments: Any) -> Any:
        arrivals = self._transport.dispatch(*arguments)
        return arrivals._replace(rows=jax.tree.map(lambda x: checkpoint_name(x, "dispatch"), arrivals.rows))


def _is_kept(names: tuple[str, ...], primitive: Any, *_: Any, **parameters: Any) -> bool:
    """The policy of recomputed blocks: values with one of these names, and always the experts that top-k chose.

    What is chosen once is not chosen again: a second top-k, compiled into another fusion, could break a tie otherwise.
    """
    return primitive.name == "name" and parameters.get("name") in (*names, "chosen")


def _write(rings: list[Array], values: list[Array], slot: Array | int, layer: Array) -> list[Array]:
    def one(ring: Array, value: Array) -> Array:
        where = (slot, layer, *[0] * value.ndim)
        return lax.dynamic_update_slice(ring, value[None, None].astype(ring.dtype), where)

    return [one(ring, value) for ring, value in zip(rings, values, strict=True)]


def _read(rings: list[Array], slot: Array | int, layer: Array) -> list[Array]:
    def one(ring: Array) -> Array:
        sizes = (1, 1, *ring.shape[2:])
        return lax.dynamic_slice(ring, (slot, layer, *[0] * (ring.ndim - 2)), sizes)[0, 0]

    return [one(ring) for ring in rings]


def add_losses(totals: Totals, sums: Any) -> Totals:
    return totals._replace(cross_entropy=totals.cross_entropy + sums.cross_entropy, z=totals.z + sums.z)


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
