"""A plan by formulas, in a second: nothing is traced, nothing is compiled.

Setup --memory, collectives, roofline, verdict--> Plan
"""

import time

from moejax.planning import report
from moejax.planning.assemble import assemble
from moejax.planning.collectives import collectives
from moejax.planning.memory import quick_memory
from moejax.planning.setup import Setup

NOTE = "By formulas; the same command without --quick compiles the step and reads its memory from the compiler."


def quick_plan(
    setup: Setup,
    attained: dict[str, float] | None = None,
    tokens_per_second: tuple[float, ...] = (),
) -> report.Plan:
    """attained: shares of the peaks, see `roofline.ATTAINED`. tokens_per_second: measured rates per GPU to convert."""
    begin = time.perf_counter()
    memory = quick_memory(setup)
    return assemble(
        setup,
        report.Source.quick,
        memory,
        collectives(setup),
        attained=attained,
        tokens_per_second=tokens_per_second,
        notes=[NOTE],
        seconds=time.perf_counter() - begin,
    )
