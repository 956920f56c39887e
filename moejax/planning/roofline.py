"""Time of a step by a stated roofline: every piece of work at the rate of the resource that limits it.

    Setup --layer_times--> seconds of one block, forward and backward, by part and resource
          --over the table--> tick by tick in lockstep: busy time, bubble
          --+ gradients, optimizer, weights--> step time, tokens/s, MFU

A matrix product takes the longer of its FLOPs over the tensor cores' peak and its bytes over the memory's bandwidth;
passes over activations take their bytes; exchanges and messages their bytes over the slowest link they cross. Each rate
is its data-sheet peak times `ATTAINED`. Nothing is taken to overlap, so that pieces add up; hiding exchanges under
shared experts or the next microbatch makes a step faster than this.
"""

import dataclasses
from collections import Counter
from dataclasses import dataclass

import numpy as np

from moejax import accounting
from moejax.config import Dtype
from moejax.parallel.schedules import Op
from moejax.planning import report
from moejax.planning.collectives import collectives, exchange_bytes, exchange_hops, link
from moejax.planning.setup import Setup
from moejax.planning.weights import layer_weights, local_weights
from moejax.planning.work import Runs, runs

# Shares of the data-sheet peaks. Reckoned, not measured: nothing of this program has been timed on these GPUs.
ATTAINED = {"compute": 0.7, "hbm": 0.8, "nvlink": 0.7, "network": 0.8}

# (part of the model, resource): seconds
Times = Counter[tuple[str, str]]


@dataclass(frozen=True)
class Rates:
    """FLOP/s and bytes/s that work is taken to reach."""

    compute: float
    hbm: float
    nvlink: float
    network: float

    @classmethod
    def of(cls, setup: Setup, attained: dict[str, float] | None = None) -> "Rates":
        share = ATTAINED | (attained or {})
        gpu = setup.gpu
        peak = gpu.peak_tflops[setup.config.precision.compute.value] * 1e12
        return cls(
            peak * share["compute"],
            gpu.hbm_bytes_per_second * share["hbm"],
            gpu.nvlink_bytes_per_second * share["nvlink"],
            gpu.network_bytes_per_second * share["network"],
            {},
        )

    def in_mxfp8(self, setup: Setup) -> "Rates":
        """Rates of forwards and gradients of activations in MXFP8, on GPUs whose tensor cores take it."""
        gpu = setup.gpu
        if not setup.mxfp8 or gpu.chip is None or gpu.chip.architecture != "blackwell":
            return self
        ratio = gpu.peak_tflops["float8"] / gpu.peak_tflops[setup.config.precision.compute.value]
        parts = {"experts": ("experts",), "shared_experts": ("shared", "dense"), "attention": ("projections",)}
        return dataclasses.replace(self, faster={part: ratio for name in setup.mxfp8 for part in parts[name]})

    faster: dict[str, float]  # parts of the model in MXFP8: their rate over that of the compute dtype

    def product(self, part: str, flops: float, size: float) -> Times:
        """A matrix product of `flops`, its operands and result `size` bytes."""
        seconds = {"compute": flops / self.compute / self.faster.get(part, 1.0), "hbm": size / self.hbm}
        slower = max(seconds, key=lambda resource: seconds[resource])
        return Counter({(part, slower): seconds[slower]})

    def passes(self, part: str, size: float) -> Times:
        return Counter({(part, "hbm"): size / self.hbm})

    def sent(self, part: str, where: str, size: float) -> Times:
        return Counter({(part, where): size / getattr(self, where)})


def scaled(times: Times, factor: float) -> Times:
    return Counter({key: value * factor for key, value in times.items()})


def block_forward(setup: Setup, rates: Rates, moe: bool) -> Times:
    """Seconds of the forward of one block for one microbatch, without its exchanges."""
    model, tokens, item = setup.config.model, setup.tokens, setup.compute_bytes
    a, d, width = model.attention, model.d_model, model.moe
    layer = model.n_layers - 1 if moe else 0
    flops = accounting.block_flops_per_token(model, setup.config.data.sequence_length, layer)
    heads = (a.n_heads + 2 * a.n_kv_heads) * a.head_dim
    attention_weights = d * heads + a.n_heads * a.head_dim * d
    times: Times = Counter()
    forward = tokens / 3  # a third of forward and backward
    times += rates.product(
        "projections", flops.attention * forward, item * (attention_weights + tokens * (3 * d + 2 * heads))
    )
    times += rates.product("attention", flops.attention_scores * forward, item * tokens * 2 * heads)
    # norms, rotary, residuals: reads and writes of [T, D] and [T, heads], counted from models/block.py and attention.py
    times += rates.passes("norms and residuals", item * tokens * (14 * d + 4 * heads))
    if not moe:
        return times + _mlp(rates, "dense", flops.dense * forward, tokens, d, model.dense_width, 1, item)
    rows = tokens * width.top_k
    experts = -(-width.num_experts // setup.shape.ep)
    times += rates.product(
        "router", flops.router * forward * _router_factor(setup), 4 * tokens * (d + 4 * width.num_experts)
    )
    times += _mlp(rates, "experts", flops.experts * forward, rows, d, width.hidden, experts, item)
    # rows gathered for dispatch and for the weighted sum, which is fp32
    times += rates.passes("dispatch and combine", rows * d * (4 * item + 4) + tokens * d * (item + 4))
    if width.shared_hidden:
        hidden = width.shared_hidden * width.shared_experts
        times += _mlp(rates, "shared", flops.shared * forward, tokens, d, hidden, 1, item)
    return times


def _router_factor(setup: Setup) -> float:
    """The router's product runs in fp32: so many times dearer than one in the compute dtype."""
    gpu = setup.gpu
    return gpu.peak_tflops[setup.config.precision.compute.value] / gpu.peak_tflops[Dtype.float32]


def _mlp(rates: Rates, part: str, flops: float, rows: float, d: int, hidden: int, matrices: int, item: int) -> Times:
    """Two products and the SwiGLU between them; weights are read once."""
    up, down = flops * 2 / 3, flops / 3
    times = rates.product(part, up, item * (matrices * 2 * d * hidden + rows * (d + 2 * hidden)))
    times += rates.product(part, down, item * (matrices * d * hidden + rows * (hidden + d)))
    return times + rates.passes(part, item * rows * 3 * hidden)


def block_accumulation(setup: Setup, rates: Rates, moe: bool) -> Times:
    """Adding a block's weight gradients to the fp32 accumulators: written and read once in the compute dtype, the sum
    read and written."""
    weights = sum(layer_weights(setup, moe))
    return rates.passes("gradient accumulation", weights * (2 * setup.compute_bytes + 8))


def exchange(setup: Setup, rates: Rates) -> Times:
    """One dispatch and one combine."""
    times: Times = Counter()
    if setup.shape.ep > 1:
        for _, where, share in exchange_hops(setup):
            times += rates.sent("exchange over ep", where, exchange_bytes(setup) * share)
    return times


def head(setup: Setup, rates: Rates) -> Times:
    """Loss and its gradients, all in one pass (`models/head.py`)."""
    model, tokens = setup.config.model, setup.tokens
    flops = 6.0 * model.d_model * model.vocab_size * tokens
    parts = setup.shape.pp if setup.ends_apart else 1
    return rates.product("head", flops / parts, 4 * 4 * tokens * model.vocab_size / parts)


def op_times(setup: Setup, rates: Rates) -> dict[tuple[Op, int], Times]:
    """Seconds of each op on each kind of chunk."""
    blocks = {moe: block_forward(setup, rates.in_mxfp8(setup), moe) for moe in (False, True)}
    weight_gradients = {moe: block_forward(setup, rates, moe) for moe in (False, True)}  # as dear, never in MXFP8
    adding = {moe: block_accumulation(setup, rates, moe) for moe in (False, True)}
    sent = exchange(setup, rates)
    found: dict[tuple[Op, int], Times] = {}
    used = [Op(op) for op in np.unique(setup.schedule.op) if op != Op.IDLE]
    for index, kind in enumerate(setup.layout.kinds):
        for op in used:
            done = runs(setup, op, kind.last)
            times: Times = Counter()
            for moe, count in ((False, kind.n_dense), (True, kind.n_moe)):
                times += scaled(
                    _block_times(blocks[moe], weight_gradients[moe], sent if moe else Counter(), adding[moe], done),
                    count,
                )
            if kind.last and op in (Op.BACKWARD, Op.BACKWARD_INPUT):
                times += head(setup, rates)
            found[op, index] = times
    return found


def _block_times(forward: Times, weight_gradient: Times, sent: Times, adding: Times, done: Runs) -> Times:
    recomputed = Counter({("recompute", resource): 0.0 for _, resource in forward})
    for (_, resource), seconds in forward.items():
        recomputed[("recompute", resource)] += seconds
    first = min(done.forward, 1)  # a second forward of a stage is recompute too
    times = scaled(forward, first + done.input) + scaled(weight_gradient, done.weight)
    times += scaled(recomputed, done.forward - first + done.again)
    times += scaled(sent, done.forward + done.again + done.input)
    return times + scaled(adding, done.weight)


def estimate(setup: Setup, attained: dict[str, float] | None = None) -> report.Time:
    rates = Rates.of(setup, attained)
    schedule, kinds = setup.schedule, setup.layout.kind_of
    times = op_times(setup, rates)
    seconds = {key: sum(value.values()) for key, value in times.items()}
    lasts = np.zeros(schedule.op.shape)
    busy: list[Times] = [Counter() for _ in range(schedule.stages)]
    counts: Counter[tuple[int, Op, int]] = Counter()
    for tick, stage in np.argwhere(schedule.op != Op.IDLE):
        key = Op(schedule.op[tick, stage]), int(kinds[stage, schedule.chunk[tick, stage]])
        lasts[tick, stage] = seconds[key]
        counts[(int(stage), *key)] += 1
    for (stage, op, kind), count in counts.items():
        busy[stage] += scaled(times[op, kind], count)
    ticks = float(lasts.max(axis=1).sum())
    bubble = 1 - float(lasts.sum()) / (schedule.stages * ticks) if ticks else 0.0
    fullest = busy[int(np.argmax(lasts.sum(axis=0)))]
    fullest = fullest + _messages(setup, rates)
    after = _after(setup, rates)
    waiting = ticks - float(lasts.sum(axis=0).max())
    step = waiting + sum(fullest.values()) + sum(after.values())
    terms = [report.TimeTerm(name, resource, value, False) for (name, resource), value in (fullest + after).items()]
    terms.append(report.TimeTerm("waiting for other stages", "pipeline", waiting, False))
    return _report(setup, step, bubble, sorted(terms, key=lambda term: -term.seconds), attained)


def _messages(setup: Setup, rates: Rates) -> Times:
    if setup.shape.pp == 1:
        return Counter()
    size = setup.tokens * setup.config.model.d_model * setup.compute_bytes
    # up and down are different directions of the link
    return rates.sent("messages between stages", link(setup, "pp"), size * setup.schedule.ticks)


def _after(setup: Setup, rates: Rates) -> Times:
    """Once a step: gradients summed, the optimizer, weights gathered."""
    times: Times = Counter()
    for row in collectives(setup):
        if row.kind in ("reduce-scatter", "all-gather") and row.axis != "ep" or row.purpose.startswith("gradients"):
            times += rates.sent(row.purpose, row.link, row.bytes)
    # master and two moments read and written, the gradient read twice (norm, update), weights written
    size = local_weights(setup).sharded * (2 * 12 + 2 * 4 + setup.param_bytes)
    return times + rates.passes("optimizer", size)


def _report(
    setup: Setup, step: float, bubble: float, terms: list[report.TimeTerm], attained: dict[str, float] | None
) -> report.Time:
    config, devices = setup.config, setup.shape.devices
    rate = config.train.batch_tokens / step
    flops = accounting.flops_per_token(config.model, config.data.sequence_length)
    peak = setup.gpu.peak_tflops[config.precision.compute.value]
    share = ATTAINED | (attained or {})
    return report.Time(
        step_seconds=step,
        tokens_per_second=rate,
        tokens_per_second_per_gpu=rate / devices,
        model_tflops_per_gpu=accounting.teraflops(flops, rate) / devices,
        mfu=accounting.mfu(flops, rate, peak, devices),
        bubble=bubble,
        terms=terms,
        assumptions=[
            "Work runs at these shares of the data-sheet peaks, reckoned and not measured: "
            + ", ".join(f"{name} {value:.0%}" for name, value in share.items())
            + ".",
            "Nothing overlaps: exchanges, messages and gradient sums stand beside the computation.",
            "Experts are evenly loaded, so that one round of the exchange is enough.",
            "All stages begin a tick together, as the executor's exchange of messages makes them.",
        ],
    )


def measured(setup: Setup, tokens_per_second_per_gpu: float) -> report.Measured:
    """What a throughput per GPU, measured elsewhere, is in model TFLOP/s and in share of the peak."""
    config = setup.config
    flops = accounting.flops_per_token(config.model, config.data.sequence_length)
    peak = setup.gpu.peak_tflops[config.precision.compute.value]
    return report.Measured(
        tokens_per_second_per_gpu,
        accounting.teraflops(flops, tokens_per_second_per_gpu),
        accounting.mfu(flops, tokens_per_second_per_gpu, peak),
    )
