"""A plan from the compiled step: what training would run, compiled for GPUs that are not there, and what it says.

    Setup --TrainProgram on an absent mesh, lower, compile--> memory by the compiler, live ranges, HLO
          --categories, collectives--> Plan        time is the roofline's, as in a quick plan

What is not as on the machine stands in `NOTES`, and in docs/decisions/005-attention-of-absent-gpus.md.
"""

import math
import time
from collections import Counter
from typing import Any

import jax
import numpy as np

from moejax.hardware import collectives as hlo_collectives
from moejax.hardware import hlo
from moejax.hardware.absent_gpu import absent_mesh, bytes_per_device
from moejax.parallel.schedules import Op
from moejax.parallel.step import TrainProgram
from moejax.planning import report
from moejax.planning.allocation import ELSEWHERE, compile_reporting, part_of, peak_by_scope
from moejax.planning.assemble import assemble
from moejax.planning.collectives import link
from moejax.planning.memory import dispatch_bytes, saved_bytes, stash_bytes
from moejax.planning.setup import Setup

NOTES = (
    "Compiled without a GPU: no kernel was tuned, and workspaces that tuned libraries ask for are not in the figures.",
    "Attention is compiled as flash attention by blocks in place of cuDNN's kernel, which cannot be compiled without "
    "cuDNN; what it keeps for the backward is the same.",
    "Bytes of ragged exchanges are those of whole operands; rows that were never filled do not travel.",
)


def compiled_plan(
    setup: Setup,
    gpu: str,
    attained: dict[str, float] | None = None,
    tokens_per_second: tuple[float, ...] = (),
) -> report.Plan:
    """gpu: name or file, for the compiler. Raises UserError where nothing can be compiled for absent GPUs."""
    begin = time.perf_counter()
    program = TrainProgram(setup.config, absent_mesh(gpu, setup.shape))
    compiled, live = compile_reporting(program.lower())
    text = compiled.as_text()
    memory = compiled_memory(setup, program, bytes_per_device(compiled), peak_by_scope(live, text))
    return assemble(
        setup,
        report.Source.compiled,
        memory,
        compiled_collectives(setup, text),
        attained=attained,
        tokens_per_second=tokens_per_second,
        notes=list(NOTES),
        seconds=time.perf_counter() - begin,
    )


def compiled_memory(
    setup: Setup, program: TrainProgram, sizes: dict[str, int], by_scope: dict[str, int]
) -> report.Memory:
    """State and accumulators from the program's shapes; rings, saved activations and rows of the dispatch from their
    formulas; temporaries are what these leave of the compiler's total. by_scope: of the buffers alive at the peak, for
    the reader; XLA counts there the outputs of loops and conditionals beside the arrays that they are."""
    total = sizes["arguments"] + sizes["outputs"] - sizes["aliased"] + sizes["temporaries"]
    named = state_bytes(program) | {"stash": stash_bytes(setup), "saved": saved_bytes(setup)}
    left = total - sum(named.values())
    named["dispatch"] = max(0, min(dispatch_bytes(setup), left))
    categories = {name: named.get(name, 0) for name in report.CATEGORIES}
    categories["temporaries"] = max(0, left - named["dispatch"])
    return report.Memory(
        peak_bytes=max(total, sizes["peak"]),
        total_bytes=sum(categories.values()),
        categories=categories,
        compiler={**sizes, "total": total},
        scopes={name: size for name, size in by_scope.items() if size > 0.001 * total and name != ELSEWHERE},
    )


def state_bytes(program: TrainProgram) -> dict[str, int]:
    """weights, master, moments and fp32 gradient accumulators on one device, from shapes and shardings."""
    abstract, shardings = jax.eval_shape(program._fresh, jax.random.key(0)), program.state_shardings()

    def local(tree: Any, placed: Any, itemsize: int | None = None) -> int:
        pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(placed), strict=True)
        return sum(math.prod(s.shard_shape(x.shape)) * (itemsize or x.dtype.itemsize) for x, s in pairs)

    return {
        "weights": local(abstract.params, shardings.params),
        "master": local(abstract.master, shardings.master),
        "moments": local(abstract.moments, shardings.moments),
        "gradients": local(abstract.params, shardings.params, 4),
    }


def compiled_collectives(setup: Setup, text: str) -> list[report.Collective]:
    """Every collective of the program as the busiest stage runs it, summed by kind, axes and part of the step."""
    sizes = {axis: getattr(setup.shape, axis) for axis in ("pp", "dp", "ep")}
    shares = branch_shares(setup)
    rows: Counter[tuple[str, str, str]] = Counter()
    counts: Counter[tuple[str, str, str]] = Counter()
    for one in hlo_collectives.read(
        text, sizes, shares=lambda i: shares if len(hlo.branches(i)) == len(shares) else None
    ):
        axes = "+".join(one.axes)
        if not axes or not one.times:
            continue
        key = (one.kind, axes, purpose(one.kind, one.scope, axes))
        rows[key] += one.bytes_per_step
        counts[key] += one.times
    return [
        report.Collective(kind, axes, what, counts[kind, axes, what], size, link(setup, axes))
        for (kind, axes, what), size in rows.most_common()
    ]


def purpose(kind: str, scope: str, axes: str) -> str:
    """Which part of the step a collective serves, from its kind and name stack."""
    part = part_of(scope)
    if kind in ("ragged-all-to-all", "all-to-all"):
        return f"dispatch and combine, {'backward' if 'transpose' in scope else 'forward'}"
    if part == "optimizer":
        return "weights" if kind == "all-gather" else "gradient norm"
    if part == "gradient reduction":
        return "gradients"
    if kind == "collective-permute" and axes == "pp":
        return "between stages"
    return part if part in ("dispatch", "head", "embedding") else "statistics and counts"


def branch_shares(setup: Setup) -> list[float]:
    """How often the executor's switch takes each branch on the stage with the most work, in the order of
    `parallel.pipeline`: as they first occur in the table."""
    schedule, layout = setup.schedule, setup.layout
    names: dict[tuple[Any, ...], int] = {}
    taken = np.zeros(schedule.op.shape, np.int64)
    for (tick, stage), op in np.ndenumerate(setup.wiring.op):
        name: tuple[Any, ...] = ("idle",)
        if op != Op.IDLE:
            kind = int(layout.kind_of[stage, setup.wiring.chunk[tick, stage]])
            if not (op == Op.FORWARD and layout.kinds[kind].last and setup.keep_inputs):
                name = (int(op), kind)
        taken[tick, stage] = names.setdefault(name, len(names))
    idle = names.get(("idle",), -1)
    busiest = int(np.argmin((taken == idle).sum(axis=0)))
    return [float((taken[:, busiest] == index).mean()) for index in range(len(names))]
