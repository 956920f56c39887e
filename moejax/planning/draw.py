"""Schedules drawn and priced: `plan --schedule 1f1b,zero_bubble_v [--svg FILE]`.

    names or CSV files --schedule tables, checked--> a timeline each as text with its figures, and one SVG of all

Stages and microbatches are those of the config (`--mesh pp=8 parallel.pipeline.microbatches=32`).
"""

import argparse
import os
import shutil
from pathlib import Path

from moejax import cli
from moejax.errors import UserError
from moejax.mesh import parse_mesh
from moejax.parallel.schedule_csv import load_csv
from moejax.parallel.schedule_drawing import svg_timeline, text_timeline
from moejax.parallel.schedule_makers import make_schedule
from moejax.parallel.schedules import Op, Schedule

TWO_CHUNKS = ("interleaved_1f1b", "zero_bubble_v")
LETTERS = {"F": Op.FORWARD, "B": Op.BACKWARD, "I": Op.BACKWARD_INPUT, "W": Op.BACKWARD_WEIGHT}


def read_schedule(text: str, stages: int, microbatches: int) -> Schedule:
    """NAME, NAME:CHUNKS or FILE.csv."""
    if text.endswith(".csv"):
        return load_csv(text)
    name, _, chunks = text.partition(":")
    if chunks and not chunks.isdecimal():
        raise UserError(f"--schedule {text}: the chunks after the colon, {chunks!r}, must be a whole number.")
    return make_schedule(name, stages, microbatches, int(chunks or 1 + (name in TWO_CHUNKS)))


def read_costs(text: str | None) -> dict[Op, float] | None:
    """`F=1,B=2`: time of an op on all layers of a stage."""
    if text is None:
        return None
    costs: dict[Op, float] = {}
    for part in text.split(","):
        letter, _, value = part.partition("=")
        try:
            costs[LETTERS[letter.strip().upper()]] = float(value)
        except (KeyError, ValueError):
            raise UserError(
                f"--costs {text}: write letters F, B, I, W with a time each, e.g. F=1,B=2,I=1,W=1."
            ) from None
    return costs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("schedules instead of a plan")
    group.add_argument(
        "--schedule", metavar="LIST", help="draw these: NAME, NAME:CHUNKS or FILE.csv, comma between (the config's)"
    )
    group.add_argument("--svg", metavar="FILE", help="where the picture goes (pipeline.svg)")
    group.add_argument("--costs", metavar="F=1,B=2", help="time of the ops on all layers of a stage (1 each)")
    group.add_argument("--own-pace", action="store_true", help="each stage at its own pace instead of in step")


def wanted(options: argparse.Namespace) -> bool:
    """Whether any of these options was given."""
    return bool(options.schedule or options.svg or options.costs or options.own_pace)


def draw(options: argparse.Namespace) -> int:
    config = cli.read_config(options)
    pipe = config.parallel.pipeline
    names = options.schedule or pipe.table
    if names is None:
        names = f"{pipe.schedule}" if pipe.chunks is None else f"{pipe.schedule}:{pipe.chunks}"
    stages = parse_mesh(config.parallel.mesh).pp
    schedules = [read_schedule(text.strip(), stages, pipe.microbatches) for text in str(names).split(",")]
    costs = read_costs(options.costs)
    picture = svg_timeline(schedules, costs, options.own_pace)
    for schedule in schedules:
        print(text_timeline(schedule, shutil.get_terminal_size((120, 24)).columns))
    target = options.svg or "pipeline.svg"
    try:
        Path(target).write_text(picture, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--svg {target} cannot be written: {error.strerror}.") from None
    print(f"Picture: {os.path.abspath(target)}")
    return 0
