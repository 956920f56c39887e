"""Weights of one device, by how they are spread: what its working copy, its part of the master and its gradients hold.

    Setup --local_weights--> Local(experts, blocks, ends): numbers of weights on a device, and the replicas of each

Experts are cut over ep and replicated over dp; the rest of a block is replicated over dp and ep; embedding, head and
final norm over every device. Stages have room for as many blocks of a kind as the fullest has (`layout.StackLayout`),
so a device holds slots, not layers.
"""

from dataclasses import dataclass

from moejax import accounting
from moejax.planning.setup import Setup


@dataclass(frozen=True)
class Spread:
    """weights: on one device. replicas: devices with the same ones, over which master and moments are cut. arrays:
    how many arrays they are. axes: of the mesh, over which they are replicated."""

    weights: int
    replicas: int
    arrays: int
    axes: str


@dataclass(frozen=True)
class Local:
    experts: Spread
    blocks: Spread
    ends: Spread

    def __iter__(self):
        return iter((self.experts, self.blocks, self.ends))

    @property
    def total(self) -> int:
        return sum(spread.weights for spread in self)

    @property
    def sharded(self) -> float:
        """Weights of this device's part of the master copy."""
        return sum(spread.weights / spread.replicas for spread in self)


def layer_weights(setup: Setup, moe: bool) -> tuple[int, int]:
    """(experts of this device, everything else) of one block."""
    model = setup.config.model
    counts = accounting.block_parameters(model, model.n_layers - 1 if moe else 0)
    experts = (counts.experts + counts.idle_experts) // setup.shape.ep
    return experts, counts.total - counts.experts - counts.idle_experts


def local_weights(setup: Setup) -> Local:
    model, shape = setup.config.model, setup.shape
    slots = {moe: setup.slots("moe_blocks" if moe else "dense_blocks") for moe in (False, True)}
    experts, besides = layer_weights(setup, True) if slots[True] else (0, 0)
    dense = layer_weights(setup, False)[1] if slots[False] else 0
    table = model.vocab_size * model.d_model * (1 if model.tie_embeddings else 2)
    norms = model.d_model * (1 + int(model.embed_norm))
    ends = norms + (table // shape.pp if setup.ends_apart else table)
    small = 8 if model.attention.qk_norm != "none" else 6  # norms and projections of a block
    kinds = sum(1 for count in slots.values() if count)
    everywhere = shape.data_shards * (1 if setup.ends_apart else shape.pp)
    return Local(
        experts=Spread(experts * slots[True], shape.dp, 2 * bool(slots[True]), _axes(setup, "dp")),
        blocks=Spread(
            besides * slots[True] + dense * slots[False],
            shape.data_shards,
            small * kinds + 3,
            _axes(setup, "dp", "ep"),
        ),
        ends=Spread(ends, everywhere, 4, _axes(setup, *(("dp", "ep") if setup.ends_apart else ("pp", "dp", "ep")))),
    )


def _axes(setup: Setup, *names: str) -> str:
    return "+".join(name for name in names if getattr(setup.shape, name) > 1)
