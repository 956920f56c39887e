"""A plan from its memory and its collectives: all else a quick and a compiled plan say by the same functions.

Setup, memory, collectives --verdict, roofline, facts of model and machine--> Plan
"""

from moejax.planning import report
from moejax.planning.roofline import estimate, measured
from moejax.planning.setup import Setup, machine, model_facts, settings, stages
from moejax.planning.verdict import judge


def assemble(
    setup: Setup,
    source: report.Source,
    memory: report.Memory,
    collectives: list[report.Collective],
    *,
    attained: dict[str, float] | None,
    tokens_per_second: tuple[float, ...],
    notes: list[str],
    seconds: float,
) -> report.Plan:
    """attained: shares of the peaks, see `roofline.ATTAINED`. tokens_per_second: measured rates per GPU to convert.
    seconds: what the plan took to make."""
    return report.Plan(
        source=source,
        verdict=judge(setup, memory),
        model=model_facts(setup),
        machine=machine(setup),
        settings=settings(setup),
        stages=stages(setup),
        memory=memory,
        collectives=collectives,
        time=estimate(setup, attained),
        measured=[measured(setup, rate) for rate in tokens_per_second],
        notes=notes,
        seconds=seconds,
    )
