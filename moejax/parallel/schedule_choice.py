"""The schedule that a config asks for: a table made by name, or read from a file, and checked.

parallel.pipeline, stages, microbatches --choose_schedule--> Schedule
"""

from moejax.config import Config
from moejax.errors import UserError
from moejax.parallel.schedule_check import check
from moejax.parallel.schedule_csv import load_csv
from moejax.parallel.schedule_makers import make_schedule
from moejax.parallel.schedules import Schedule


def choose_schedule(config: Config, stages: int, microbatches: int) -> Schedule:
    """The table that `parallel.pipeline` asks for, checked; without stages one chunk in the order of 1F1B."""
    pipe = config.parallel.pipeline
    if pipe.table is not None:
        schedule = load_csv(pipe.table)
        asked = (("stages", stages, schedule.stages), ("microbatches", microbatches, schedule.microbatches))
        for what, wanted, has in asked:
            if wanted != has:
                raise UserError(
                    f"parallel.pipeline.table={pipe.table} is for {has} {what}, but there are {wanted}; "
                    f"make a table for {wanted}."
                )
        return schedule
    name, chunks = pipe.schedule.value, pipe.chunks
    if chunks is None:
        chunks = 2 if name in ("interleaved_1f1b", "zero_bubble_v") else 1
    if stages == 1:
        name, chunks = "1f1b", 1
    schedule = make_schedule(name, stages, microbatches, chunks)
    check(schedule)
    return schedule
