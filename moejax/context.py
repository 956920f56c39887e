"""What a block is told about the tokens in front of it. Models and experts know this, and no mesh."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

if TYPE_CHECKING:
    from moejax.models.quantised import MXRecipe, QuantisedWeight
    from moejax.moe.dispatch import Transport

DRAWS = ("scores", "jitter", "pool")


def _identity(x: Any) -> Any:
    return x


@dataclass(frozen=True)
class Context:
    """One microbatch on this device, and how it stands to the whole.

    segment_ids: int32[B, S]; documents within a sequence; attention stays inside one. -1 marks padding: such tokens
        are routed nowhere and counted nowhere.
    positions: int32[B, S]; rotary position of each token.
    sequence_ids: int32[B]; index of each sequence in the microbatch as a whole, whatever device holds it. Random
        routing draws by it, so that the draw is the same on every mesh.
    loss_tokens: fp32 scalar; tokens of the whole batch (all devices and microbatches) whose label is not ignored.
        Every loss is a sum divided by it.
    batch_tokens: fp32 scalar; tokens of this microbatch on all devices, padding left out.
    transport: how token rows reach their experts.
    sum_over_data: sums an array over the devices that hold other tokens of this microbatch; identity on one device.
    key: for whatever is drawn (random routing, jitter, pools); folded with the layer by the caller.
    score_bias: fp32[layers, E], of the router's choice (`config.ScoreBias`); of one layer, [E], after `for_layer`.
    training: whether jitter and random pools apply.
    quantised: the block's weights that are kept in MXFP8, in the shape of its parameters, None for the others; None
        without any. recipe: how they are multiplied by. excluded: bool[layers], those whose weights are in MXFP8 but
        not used so; None without any; of one layer, a scalar, after `for_layer`.
    """

    segment_ids: Int[Array, "B S"]
    positions: Int[Array, "B S"]
    sequence_ids: Int[Array, "B"]
    loss_tokens: Float[Array, ""]
    batch_tokens: Float[Array, ""]
    transport: "Transport"
    sum_over_data: Callable[[Any], Any] = _identity
    key: Array | None = None
    score_bias: Float[Array, "*layers E"] | None = None
    training: bool = False
    quantised: Any = None
    recipe: "MXRecipe | None" = None
    excluded: Bool[Array, "*layers"] | None = None

    def quantised_weight(self, *path: str) -> "QuantisedWeight | None":
        """The weight at this place among the block's parameters, if it is kept in MXFP8."""
        found = self.quantised
        for name in path:
            found = None if found is None else found.get(name)
        return found

    @property
    def valid_T(self) -> Bool[Array, "T"]:
        return self.segment_ids.reshape(-1) >= 0

    def for_layer(self, layer: Int[Array, ""]) -> "Context":
        """What of it is another for each layer, counted in the model, dense ones included."""
        key = None if self.key is None else jax.random.fold_in(self.key, layer)
        bias = None if self.score_bias is None else lax.dynamic_index_in_dim(self.score_bias, layer, keepdims=False)
        excluded = None if self.excluded is None else self.excluded[layer]
        return replace(self, key=key, score_bias=bias, excluded=excluded)

    def draw(self, sample: Callable[[Array, tuple[int, ...]], Array], shape: tuple[int, ...], what: str) -> Array:
        """[T, *shape] of random values, by sequence: the same on every mesh, and the same again in recompute.

        sample(key, shape); what: "scores", "jitter" or "pool": draws of different kinds do not repeat each other.
        """
        assert self.key is not None, f"drawing {what} needs Context.key"
        length, key = self.segment_ids.shape[1], jax.random.fold_in(self.key, DRAWS.index(what))
        keys_B = jax.vmap(lambda i: jax.random.fold_in(key, i))(self.sequence_ids)
        return jax.vmap(lambda key: sample(key, (length, *shape)))(keys_B).reshape(-1, *shape)


def single_device_context(
    segment_ids: Int[Array, "B S"],
    positions: Int[Array, "B S"] | None = None,
    score_bias: Float[Array, "L E"] | None = None,
) -> Context:
    """The context of a batch that stands whole on one device, every token counted; score_bias: a row for each layer."""
    from moejax.moe.local import Local  # here, since transports import this module's neighbours

    batch, length = segment_ids.shape
    count = jnp.sum(segment_ids >= 0).astype(jnp.float32)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    sequences = jnp.arange(batch, dtype=jnp.int32)
    return Context(segment_ids, positions, sequences, count, count, Local(), score_bias=score_bias)
