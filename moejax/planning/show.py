"""A plan on the terminal: the verdict first, then memory, time, what moves, and what was taken for granted.

Plan --render--> tables
"""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moejax.planning.report import CATEGORIES, Plan, Source

GB = 1e9


def render(plan: Plan, console: Console) -> None:
    verdict, machine = plan.verdict, plan.machine
    console.print(Text(verdict.sentence, style="bold green" if verdict.fits else "bold red"))
    for sentence in verdict.advice:
        console.print(f"  - {sentence}")
    console.print()
    s, m = plan.settings, plan.model
    console.print(
        f"{m.name}: {m.parameters_active / GB:,.2f}B active of {m.parameters_total / GB:,.2f}B parameters, "
        f"{m.flops_per_token_total / GB:,.2f} GFLOP a token at {m.sequence_length:,} tokens."
    )
    console.print(
        f"{machine.gpus} x {machine.gpu}, dp={s.dp},ep={s.ep},pp={s.pp}; {s.batch_tokens:,} tokens a step in "
        f"{s.microbatches} microbatches of {s.tokens:,} tokens a device; {s.schedule}"
        + (f" of {s.chunks} chunks" if s.chunks > 1 else "")
        + f", stash {s.stash}, recompute {s.recompute}."
    )
    console.print(
        f"Experts: transport {s.transport}, {s.capacity_rows:,} buffer rows, grouped GEMM {s.grouped_gemm}; "
        f"attention {s.attention}; {s.params_dtype} weights, {s.compute_dtype} activations"
        + (", experts in MXFP8." if s.mxfp8 else ".")
    )
    console.print()
    console.print(_memory(plan))
    console.print(_time(plan))
    console.print(_collectives(plan))
    console.print(_flops(plan))
    for one in plan.measured:
        console.print(
            f"{one.tokens_per_second_per_gpu:,.0f} tokens/s per GPU is {one.model_tflops_per_gpu:,.0f} TFLOP/s per "
            f"GPU of model work, {one.mfu:.1%} of the peak."
        )
    for sentence in [*plan.time.assumptions, *plan.notes]:
        console.print(f"- {sentence}")
    console.print(f"({'formulas' if plan.source == Source.quick else 'compiled'}, {plan.seconds:,.1f} s)")


def _memory(plan: Plan) -> Table:
    memory = plan.memory
    table = Table(title="Memory of the fullest device", title_justify="left")
    for name in ("", "GB", "share"):
        table.add_column(name, justify="left" if not name else "right")
    for name, size in memory.categories.items():
        table.add_row(f"{name}: {CATEGORIES[name]}", f"{size / GB:,.2f}", f"{size / memory.total_bytes:.1%}")
    table.add_section()
    table.add_row("sum", f"{memory.total_bytes / GB:,.2f}", "")
    if memory.compiler is not None:
        table.add_row("the compiler's total", f"{memory.compiler['total'] / GB:,.2f}", "")
    table.add_row("peak", f"{memory.peak_bytes / GB:,.2f}", "")
    table.add_row("left of the card's usable memory", f"{plan.verdict.spare_bytes / GB:,.2f}", "")
    for scope, size in (memory.scopes or {}).items():
        table.add_row(Text(f"  at the peak, {scope}", style="dim"), f"{size / GB:,.2f}", "")
    return table


def _time(plan: Plan) -> Table:
    time = plan.time
    title = (
        f"Step {time.step_seconds:,.2f} s: {time.tokens_per_second_per_gpu:,.0f} tokens/s per GPU, "
        f"{time.model_tflops_per_gpu:,.0f} TFLOP/s per GPU, MFU {time.mfu:.1%}, bubble {time.bubble:.1%} (roofline)"
    )
    table = Table(title=title, title_justify="left")
    for name in ("busiest stage", "limited by", "s", "share"):
        table.add_column(name, justify="right" if name in ("s", "share") else "left")
    for term in time.terms:
        if term.seconds >= 0.001 * time.step_seconds:
            table.add_row(term.name, term.resource, f"{term.seconds:,.3f}", f"{term.seconds / time.step_seconds:.1%}")
    return table


def _collectives(plan: Plan) -> Table:
    table = Table(title="Collectives of one device in one step", title_justify="left")
    for name in ("kind", "axes", "purpose", "link", "times", "GB sent"):
        table.add_column(name, justify="right" if name in ("times", "GB sent") else "left")
    for row in sorted(plan.collectives, key=lambda row: -row.bytes):
        table.add_row(row.kind, row.axis, row.purpose, row.link, f"{row.count:,.0f}", f"{row.bytes / GB:,.3f}")
    return table


def _flops(plan: Plan) -> Table:
    table = Table(title="Model FLOPs of a token, forward and backward", title_justify="left")
    table.add_column("part")
    table.add_column("GFLOP", justify="right")
    table.add_column("share", justify="right")
    for part, flops in plan.model.flops_per_token.items():
        share = flops / plan.model.flops_per_token_total
        table.add_row(part.replace("_", " "), f"{flops / GB:,.3f}", f"{share:.1%}")
    table.add_row("all", f"{plan.model.flops_per_token_total / GB:,.3f}", "")
    return table
