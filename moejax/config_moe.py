"""The part of the configuration that is about experts: the layer, its router, and how tokens reach them.

`config.py` holds the tree and re-exports these names; the rules stand in its docstring.
"""

import enum
from dataclasses import dataclass

from moejax.config_fields import option, require


class Gating(enum.StrEnum):
    softmax = "softmax"
    sigmoid = "sigmoid"
    topk_softmax = "topk_softmax"  # chosen by logit, softmax over the K chosen logits alone


class Assignment(enum.StrEnum):
    learned = "learned"
    random = "random"  # scores drawn anew for every token: throughput runs
    uniform = "uniform"  # round robin: perfectly balanced throughput runs


class ScoreBias(enum.StrEnum):
    """A number for each expert that is added when experts are chosen, and never to a weight."""

    none = "none"
    fixed = "fixed"  # what a checkpoint brought
    sign = "sign"  # after each optimizer step += rate * sign(mean load - load), as DeepSeek-V3


class BalanceGranularity(enum.StrEnum):
    """Over which tokens the counts and mean scores of the load-balancing loss are taken."""

    batch = "batch"  # the whole microbatch, on all devices: the same value on every mesh
    instance = "instance"  # each sequence by itself
    local = "local"  # this device's part of the microbatch, as Olmo-core's local_batch: depends on the mesh


class Transport(enum.StrEnum):
    auto = "auto"  # from ep, nodes and rows: see moe/choose.py
    local = "local"
    rowwise = "rowwise"
    all_to_all = "all_to_all"
    all_gather = "all_gather"
    hierarchical = "hierarchical"


class Overflow(enum.StrEnum):
    """What happens to rows beyond the capacity of a receive buffer."""

    exact = "exact"  # they come in further rounds through the same buffers: no token is ever dropped
    drop = "drop"  # Olmo-core's tail drop: the last experts' rows are left out, weights as they were


class Granularity(enum.StrEnum):
    """What one transfer of the rowwise transport carries."""

    expert = "expert"  # a device's rows for one expert: they land where the expert reads them
    peer = "peer"  # a device's rows for another device: fewer transfers, and a gather on arrival


@dataclass(frozen=True)
class PoolConfig:
    """Document pools (EMO): all tokens of a document choose among the experts that it scores highest as a whole."""

    smallest: int = option(0, "Fewest experts in a document's pool; 0: no pools, every token chooses freely.")
    largest: int = option(0, "Most experts in a document's pool; each document draws its size anew in training.")
    evaluation: int = option(0, "Experts in a pool outside training; 0: halfway between smallest and largest.")

    @property
    def evaluation_size(self) -> int:
        return self.evaluation or (self.smallest + self.largest) // 2


@dataclass(frozen=True)
class RouterConfig:
    gating: Gating = option(Gating.softmax, "How logits become scores: softmax, sigmoid or topk_softmax.")
    bias: bool = option(False, "A trained bias on the logits.")
    jitter: float = option(
        0.0, "In training, multiply the router's input by U(1 - jitter, 1 + jitter), drawn by element."
    )
    normalize: float | None = option(1.0, "Divide the K weights by their p-norm, this p; null leaves them as they are.")
    restore_scale: bool = option(True, "Multiply the K weights by K, so that normalised weights sum to K.")
    weight_scale: float = option(1.0, "Extra factor on the K weights.")
    original_top_k: int | None = option(
        None, "Experts per token of the model the weights come from: a further factor sqrt(original_top_k / top_k)."
    )
    groups: int = option(1, "Groups of neighbouring experts; a token chooses groups first. 1: no grouping.")
    top_groups: int = option(1, "Groups a token may reach; a group's score is the sum of its two best experts'.")
    score_bias: ScoreBias = option(
        ScoreBias.none, "Balance by a bias on the choice: none, fixed, or sign (moved every step)."
    )
    score_bias_rate: float = option(1e-3, "Step of the score bias under `sign`.")
    pool: PoolConfig = option(PoolConfig(), "Expert pools of documents (EMO).")
    assignment: Assignment = option(Assignment.learned, "learned, or random / uniform for throughput runs.")
    lb_loss: float = option(0.005, "Weight of the load-balancing loss; 0 turns it off.")
    lb_granularity: BalanceGranularity = option(
        BalanceGranularity.batch, "Tokens over which balance is measured: batch, instance or local."
    )
    z_loss: float = option(2e-4, "Weight of the router z-loss (squared log-sum-exp of the logits).")


@dataclass(frozen=True)
class MoEConfig:
    num_experts: int = option(32, "Routed experts per MoE layer.")
    top_k: int = option(4, "Experts per token.")
    hidden: int = option(128, "Hidden width of one routed expert.")
    shared_hidden: int = option(128, "Hidden width of a shared expert, which sees every token; 0: none.")
    shared_experts: int = option(
        1, "Shared experts; more than one are mixed by a second router's sigmoid scores, normalised to sum to one."
    )
    shared_gate: bool = option(
        False, "Scale the shared expert's output by sigmoid of a learned projection of its input, as Qwen2-MoE."
    )
    router: RouterConfig = option(RouterConfig(), "The router and its losses.")


@dataclass(frozen=True)
class ExpertsConfig:
    transport: Transport = option(
        Transport.auto,
        "How tokens reach experts on other devices: auto, local, rowwise, all_to_all, all_gather or hierarchical.",
    )
    capacity_factor: float = option(
        1.25, "Rows of each receive buffer over the mean at balance (tokens * top_k); never more than could arrive."
    )
    overflow: Overflow = option(
        Overflow.exact,
        "Rows beyond capacity: exact (more rounds through the same buffers) or drop (Olmo-core's tail drop).",
    )
    granularity: Granularity = option(
        Granularity.expert, "What one transfer of rowwise carries: the rows for one expert, or for one peer."
    )
    devices_per_node: int = option(8, "Devices that share a fast link; hierarchical goes through them first.")


def validate_moe(moe: MoEConfig) -> None:
    """Refuse impossible layers and routers, one sentence each."""
    router, pool = moe.router, moe.router.pool
    positive = {
        "num_experts": moe.num_experts,
        "top_k": moe.top_k,
        "hidden": moe.hidden,
        "shared_experts": moe.shared_experts,
        "router.weight_scale": router.weight_scale,
        "router.groups": router.groups,
        "router.top_groups": router.top_groups,
    }
    for name, value in positive.items():
        require(value > 0, f"model.moe.{name}={value} must be greater than 0.")
    not_negative = {
        "shared_hidden": moe.shared_hidden,
        "router.lb_loss": router.lb_loss,
        "router.z_loss": router.z_loss,
        "router.jitter": router.jitter,
        "router.score_bias_rate": router.score_bias_rate,
        "router.pool.smallest": pool.smallest,
        "router.pool.largest": pool.largest,
        "router.pool.evaluation": pool.evaluation,
    }
    for name, value in not_negative.items():
        require(value >= 0, f"model.moe.{name}={value} must not be negative.")
    require(
        moe.top_k <= moe.num_experts,
        f"model.moe.top_k={moe.top_k} is larger than model.moe.num_experts={moe.num_experts}; "
        "a token cannot have more experts than there are.",
    )
    require(
        moe.shared_experts == 1 or moe.shared_hidden > 0,
        f"model.moe.shared_experts={moe.shared_experts} have no width; set model.moe.shared_hidden, or take one.",
    )
    require(
        not moe.shared_gate or (moe.shared_hidden > 0 and moe.shared_experts == 1),
        "model.moe.shared_gate=true needs exactly one shared expert; set model.moe.shared_hidden to its width.",
    )
    require(
        router.normalize is None or router.normalize > 0,
        f"model.moe.router.normalize={router.normalize} must be a norm p > 0, or null.",
    )
    require(
        router.jitter < 1, f"model.moe.router.jitter={router.jitter} must be less than 1, or inputs could change sign."
    )
    require(
        router.original_top_k is None or router.original_top_k > 0,
        f"model.moe.router.original_top_k={router.original_top_k} must be greater than 0, or null.",
    )
    _validate_groups(moe)
    _validate_pools(moe)
    if router.gating == Gating.topk_softmax:
        require(
            router.assignment != Assignment.random,
            "model.moe.router.assignment=random draws scores, and gating=topk_softmax chooses by logit; "
            "take gating=softmax.",
        )
    require(
        router.score_bias == ScoreBias.none or router.assignment == Assignment.learned,
        f"model.moe.router.score_bias={router.score_bias} steers a learned router; with assignment={router.assignment} "
        "set it to none.",
    )


def _validate_groups(moe: MoEConfig) -> None:
    router = moe.router
    if router.groups == 1:
        require(
            router.top_groups == 1,
            f"model.moe.router.top_groups={router.top_groups} needs model.moe.router.groups, which is 1.",
        )
        return
    require(
        moe.num_experts % router.groups == 0,
        f"model.moe.router.groups={router.groups} does not divide model.moe.num_experts={moe.num_experts}.",
    )
    require(
        router.top_groups <= router.groups,
        f"model.moe.router.top_groups={router.top_groups} is more than there are, "
        f"model.moe.router.groups={router.groups}.",
    )
    reachable = router.top_groups * (moe.num_experts // router.groups)
    require(
        moe.top_k <= reachable,
        f"model.moe.top_k={moe.top_k} is larger than the {reachable} experts in model.moe.router.top_groups="
        f"{router.top_groups} of {router.groups} groups; let a token reach more groups.",
    )
    require(
        router.gating != Gating.topk_softmax,
        f"model.moe.router.groups={router.groups} ranks scores, and gating=topk_softmax chooses by logit; "
        "take softmax or sigmoid, or groups=1.",
    )


def _validate_pools(moe: MoEConfig) -> None:
    router, pool = moe.router, moe.router.pool
    if not pool.smallest:
        require(
            not (pool.largest or pool.evaluation),
            "model.moe.router.pool needs smallest above 0; 0 in all three turns pools off.",
        )
        return
    require(
        moe.top_k <= pool.smallest <= pool.largest <= moe.num_experts,
        f"model.moe.router.pool must have top_k={moe.top_k} <= smallest={pool.smallest} <= largest={pool.largest} "
        f"<= num_experts={moe.num_experts}.",
    )
    require(
        moe.top_k <= pool.evaluation_size <= moe.num_experts,
        f"model.moe.router.pool.evaluation={pool.evaluation} is not between top_k={moe.top_k} and "
        f"num_experts={moe.num_experts}.",
    )
    require(
        router.groups == 1 and router.score_bias == ScoreBias.none and router.assignment == Assignment.learned,
        "model.moe.router.pool chooses a document's experts by their scores alone: it goes with neither groups, "
        "nor score_bias, nor random or uniform assignment.",
    )


def validate_experts(experts: ExpertsConfig) -> None:
    """Refuse impossible transports; what depends on the mesh and the rows is checked by `moe.choose`."""
    for name, value in (("capacity_factor", experts.capacity_factor), ("devices_per_node", experts.devices_per_node)):
        require(value > 0, f"parallel.experts.{name}={value} must be greater than 0.")
    require(
        experts.overflow == Overflow.exact or experts.transport != Transport.all_to_all,
        "parallel.experts.overflow=drop keeps the rows that Olmo-core keeps, and transport=all_to_all has slots of "
        "another kind; take rowwise, all_gather or hierarchical, or overflow=exact.",
    )
    require(
        experts.granularity == Granularity.expert or experts.transport in (Transport.auto, Transport.rowwise),
        f"parallel.experts.granularity=peer is an option of rowwise, not of transport={experts.transport}.",
    )
