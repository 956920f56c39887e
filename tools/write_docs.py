"""Writes the parts of docs/ that the code knows better: `.venv/bin/python tools/write_docs.py`.

    config_io.help_rows -----> docs/configuration.md
    parallel/schedules  -----> the table in docs/parallelism.md, docs/images/*.svg

tests/test_docs.py fails where what lies in docs/ is not what this writes.
"""

import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from moejax import config_io  # noqa: E402
from moejax.config import Config  # noqa: E402
from moejax.parallel.schedule_drawing import svg_timeline  # noqa: E402
from moejax.parallel.schedule_makers import make_schedule  # noqa: E402
from moejax.parallel.schedules import Op, Schedule, bubble, peak_stash, step_time  # noqa: E402

COMMAND = ".venv/bin/python tools/write_docs.py"
BEGIN, END = f"<!-- written by {COMMAND} -->", "<!-- end -->"

# Backward costs twice the forward, half of it for the input and half for the weights.
COSTS = {Op.IDLE: 0.0, Op.FORWARD: 1.0, Op.BACKWARD: 2.0, Op.BACKWARD_INPUT: 1.0, Op.BACKWARD_WEIGHT: 1.0}
SCHEDULES = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("1f1b_lockstep", 1),
    ("interleaved_1f1b", 2),
    ("zero_bubble", 1),
    ("zero_bubble_v", 2),
)
DRAWN = (("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble", 1))


def configuration() -> str:
    """docs/configuration.md: every field, its default and its sentence, by section."""
    lines = [
        "# Configuration",
        "",
        BEGIN,
        "",
        "One tree. A YAML file in `configs/` says only what differs from the defaults here, and any field is set on",
        "the command line by its name, as in `train.steps=100 model.moe.num_experts=64`; a list is written with",
        "commas, `data.paths=a.txt,b.txt`. An unknown name, a wrong type and a combination that makes no sense are",
        "refused in one sentence. `python -m moejax.train --help` prints this list.",
    ]
    sentences = {field.name: field.metadata["help"] for field in dataclasses.fields(Config)}
    section = None
    for name, default, sentence in config_io.help_rows():
        if name.partition(".")[0] != section:
            section = name.partition(".")[0]
            lines += ["", f"## {section}", "", sentences[section], "", "| field | default | |", "|---|---|---|"]
        lines.append(f"| `{name}` | `{default}` | {sentence.replace('|', '&#124;')} |")
    return "\n".join(lines) + "\n"


def made(name: str, chunks: int, stages: int, microbatches: int) -> Schedule:
    return make_schedule(name, stages, microbatches, chunks)


def schedules(stages: int = 4, microbatches: int = 16) -> str:
    """The table of docs/parallelism.md, each schedule priced by its own table."""
    lines = [
        f"{stages} stages, {microbatches} microbatches; an op of a whole stage costs 1 forward, 2 backward (input 1,",
        "weights 1).",
        "",
        "| schedule | chunks | ticks | bubble, own pace | time, own pace | time, in step | most inputs kept |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, chunks in SCHEDULES:
        schedule = made(name, chunks, stages, microbatches)
        costs = {op: cost / chunks for op, cost in COSTS.items()}
        own, together = (step_time(schedule, costs, asynchronous) for asynchronous in (True, False))
        share = bubble(schedule, costs, True)
        cells = f"{schedule.ticks} | {100 * share:.1f}% | {own:g} | {together:g} | {peak_stash(schedule).max()}"
        lines.append(f"| `{name}` | {chunks} | {cells} |")
    return "\n".join(lines)


def drawing() -> str:
    """docs/images/pipeline_schedules.svg."""
    return svg_timeline([made(name, chunks, 4, 8) for name, chunks in DRAWN], COSTS, asynchronous=True)


def with_block(text: str, block: str) -> str:
    """`text` with what stands between the two marks replaced."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{block}\n\n{END}{after}"


def pages() -> dict[Path, str]:
    """Every file this writes, and what should be in it."""
    docs = ROOT / "docs"
    return {
        docs / "configuration.md": configuration(),
        docs / "images" / "pipeline_schedules.svg": drawing(),
        docs / "parallelism.md": with_block((docs / "parallelism.md").read_text(), schedules()),
    }


def main() -> None:
    for path, text in pages().items():
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
