"""What a block is told about the tokens in front of it. Models and experts know this, and no mesh."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

if TYPE_CHECKING:
    from moejax.moe.dispatch import Transport


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
    key: for random routing; folded with the layer by the caller.
    """

    segment_ids: Int[Array, "B S"]
    positions: Int[Array, "B S"]
    sequence_ids: Int[Array, "B"]
    loss_tokens: Float[Array, ""]
    batch_tokens: Float[Array, ""]
    transport: "Transport"
    sum_over_data: Callable[[Any], Any] = _identity
    key: Array | None = None

    @property
    def valid_T(self) -> Bool[Array, "T"]:
        return self.segment_ids.reshape(-1) >= 0

    def for_layer(self, layer: Int[Array, ""]) -> "Context":
        return self if self.key is None else replace(self, key=jax.random.fold_in(self.key, layer))


def single_device_context(segment_ids: Int[Array, "B S"], positions: Int[Array, "B S"] | None = None) -> Context:
    """The context of a batch that stands whole on one device, every token counted."""
    from moejax.moe.dispatch import Local  # here, since transports import this module's neighbours

    batch, length = segment_ids.shape
    count = jnp.sum(segment_ids >= 0).astype(jnp.float32)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    return Context(segment_ids, positions, jnp.arange(batch, dtype=jnp.int32), count, count, Local())
