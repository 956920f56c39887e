"""What moves between devices in one step, from formulas: exchanges over ep, messages over pp, gradients and weights.

    Setup --collectives--> a row for each kind, axes and purpose: how often, and bytes that leave the busiest device

Bytes are those that leave a device: of an all-gather or reduce-scatter over n devices (n-1)/n of the whole array, as a
ring sends them; of an exchange what the transport says at balance.
"""

from collections import Counter

import numpy as np

from moejax.parallel.schedules import Op
from moejax.planning.report import Collective
from moejax.planning.setup import MX_BYTES, Setup
from moejax.planning.weights import Local, Spread, local_weights
from moejax.planning.work import runs

GRADIENT_BYTES = 4


def link(setup: Setup, axes: str) -> str:
    """nvlink where all devices along these axes (innermost ep, then dp, then pp) are of one node, else network."""
    shape = setup.shape
    span = shape.ep if axes == "ep" else shape.data_shards if axes in ("dp", "dp+ep") else shape.devices
    return "nvlink" if span <= setup.gpu.gpus_per_node else "network"


def collectives(setup: Setup) -> list[Collective]:
    rows = _exchanges(setup) + _messages(setup)
    local = local_weights(setup)
    for kind, size, what in (
        ("reduce-scatter", GRADIENT_BYTES, "gradients"),
        ("all-gather", setup.param_bytes, "weights"),
    ):
        for of, spread in _named(local):
            if spread.replicas > 1 and spread.weights:
                sent = spread.weights * size * (spread.replicas - 1) / spread.replicas
                where = link(setup, spread.axes)
                rows.append(Collective(kind, spread.axes, f"{what} of {of}", spread.arrays, sent, where))
    return rows


def _named(local: Local) -> list[tuple[str, Spread]]:
    return [("experts", local.experts), ("the rest of blocks", local.blocks), ("embedding and head", local.ends)]


def exchange_bytes(setup: Setup) -> float:
    """Bytes that leave a device for one dispatch and one combine of a microbatch in one layer."""
    moe, width = setup.config.model.moe, setup.config.model.d_model
    sent = setup.choice.transport.sent_bytes(setup.tokens, moe.top_k, moe.num_experts, width, setup.compute_bytes)
    return sent * MX_BYTES / setup.compute_bytes if "experts" in setup.mxfp8 else sent


def exchange_hops(setup: Setup) -> list[tuple[str, str, float]]:
    """(kind, link, share of `exchange_bytes`) of each hop: the hierarchical transport has two, the others one."""
    transport = setup.choice.transport
    kinds = {"rowwise": "ragged-all-to-all", "hierarchical": "ragged-all-to-all", "all_to_all": "all-to-all"}
    kind = kinds.get(transport.name, "all-gather")
    if transport.name != "hierarchical":
        return [(kind, link(setup, "ep"), 1.0)]
    per_node, nodes = transport.per_node, transport.nodes  # type: ignore[attr-defined]
    hops = {"nvlink": (per_node - 1) / per_node, "network": (nodes - 1) / nodes}
    total = sum(hops.values())
    return [(kind, name, hop / total) for name, hop in hops.items() if hop]


def exchange_runs(setup: Setup) -> tuple[float, float]:
    """(forward, backward) exchanges of the busiest stage in one step: MoE layers times runs, summed over its ops."""
    schedule, layout = setup.schedule, setup.layout
    forward, backward = np.zeros(schedule.stages), np.zeros(schedule.stages)
    for (op, stage, kind), count in ops_by_kind(setup).items():
        shape = layout.kinds[kind]
        done = runs(setup, op, shape.last)
        forward[stage] += count * shape.n_moe * (done.forward + done.again)
        backward[stage] += count * shape.n_moe * done.input
    busiest = int(np.argmax(forward + backward))
    return float(forward[busiest]), float(backward[busiest])


def ops_by_kind(setup: Setup) -> Counter[tuple[Op, int, int]]:
    """How often each (op, stage, kind of its chunk) stands in the table."""
    schedule = setup.schedule
    tick, stage = np.nonzero(schedule.op != Op.IDLE)
    kinds = setup.layout.kind_of[stage, schedule.chunk[tick, stage]]
    cells = zip(schedule.op[tick, stage].tolist(), stage.tolist(), kinds.tolist(), strict=True)
    return Counter((Op(op), s, kind) for op, s, kind in cells)


def _exchanges(setup: Setup) -> list[Collective]:
    if setup.shape.ep == 1 or not setup.config.model.n_moe_layers:
        return []
    size = exchange_bytes(setup)
    rows = []
    for count, when in zip(exchange_runs(setup), ("forward", "backward"), strict=True):
        for kind, where, share in exchange_hops(setup):
            rows.append(Collective(kind, "ep", f"dispatch and combine, {when}", 2 * count, size * share * count, where))
    return rows


def _messages(setup: Setup) -> list[Collective]:
    """Both channels are offered every tick's result, also where a stage has nothing to say."""
    if setup.shape.pp == 1:
        return []
    size = setup.tokens * setup.config.model.d_model * setup.compute_bytes
    count = 2 * setup.schedule.ticks
    return [Collective("collective-permute", "pp", "between stages", count, size * count, link(setup, "pp"))]
