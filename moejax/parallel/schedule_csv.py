"""A user's own schedule from a CSV file, and any schedule to one.

    # placement: v                        optional lines of `# key: value`; the keys are name and placement
    tick,stage,op,microbatch,chunk        the header, columns in any order
    0,0,forward,0,0                       one line per op; what no line names is idle

Ops are forward, backward, backward_input and backward_weight, or F, B, I and W for short. Lines may stand in any
order. The number of stages, microbatches and chunks is one more than the largest number found.
"""

from pathlib import Path

import numpy as np

from moejax.errors import UserError
from moejax.parallel.schedule_check import check
from moejax.parallel.schedules import PLACEMENTS, Op, Schedule

COLUMNS = ("tick", "stage", "op", "microbatch", "chunk")
_OPS = {op.name.lower(): op for op in Op if op != Op.IDLE}
_OPS |= {"f": Op.FORWARD, "b": Op.BACKWARD, "i": Op.BACKWARD_INPUT, "w": Op.BACKWARD_WEIGHT}

# 20 times the cells of the largest table one would make (64 stages, 512 microbatches, 4 chunks, zero-bubble).
_MOST_CELLS = 8_000_000


def to_csv(schedule: Schedule, path: str | Path) -> None:
    """Writes the ops, one a line, in tick order; `load_csv` reads the same schedule back (idle ticks at the end go)."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        file.write(f"# name: {schedule.name}\n# placement: {schedule.placement}\n")
        file.write(",".join(COLUMNS) + "\n")
        for tick, stage in np.argwhere(schedule.op != Op.IDLE):
            op = Op(int(schedule.op[tick, stage])).name.lower()
            file.write(f"{tick},{stage},{op},{schedule.microbatch[tick, stage]},{schedule.chunk[tick, stage]}\n")


def load_csv(path: str | Path) -> Schedule:
    """A schedule from a file, checked. Its name is the file's `# name:` or else the file's stem; its placement is loop
    unless the file says `# placement: v`.

    Raises UserError, with the line or the tick, stage and op, for a file that cannot be read, a wrong header or value,
    two ops in one cell, and whatever `schedule_check.check` finds.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"cannot read the pipeline schedule {path}: {reason}") from None
    said = {"name": path.stem, "placement": "loop"}
    header: list[str] = []
    rows: dict[tuple[int, int], tuple[int, Op, int, int]] = {}  # (tick, stage): line, op, microbatch, chunk
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        if line.startswith("#"):
            key, _, value = line[1:].partition(":")
            if key.strip() in said:
                said[key.strip()] = value.strip()
            continue
        if not line.strip():
            continue
        fields = [field.strip(' \t"') for field in line.split(",")]
        if not header:
            header = [field.lower() for field in fields]
            if sorted(header) != sorted(COLUMNS):
                raise UserError(
                    f"{where}: the header must name the columns {', '.join(COLUMNS)}, not {', '.join(header)}"
                )
            continue
        tick, stage, op, microbatch, chunk = _row(where, header, fields)
        if (tick, stage) in rows:
            other = rows[tick, stage]
            raise UserError(
                f"{where}: tick {tick}, stage {stage} is already taken by the {other[1].name.lower()} of microbatch "
                f"{other[2]}, chunk {other[3]} in line {other[0]}: a stage runs one op a tick, move one of the two"
            )
        rows[tick, stage] = number, op, microbatch, chunk
    if said["placement"] not in PLACEMENTS:
        raise UserError(f"{path}: placement is {said['placement']!r}, but must be one of {', '.join(PLACEMENTS)}")
    if not rows:
        raise UserError(f"{path} has no ops: give the header {','.join(COLUMNS)} and one line per op")
    for (tick, stage), (number, op, microbatch, chunk) in rows.items():
        if max(stage, microbatch, chunk) >= len(rows):  # a valid table has more ops than it has of any of these
            raise UserError(
                f"{path}, line {number}: tick {tick}, stage {stage}, {op.name.lower()} of microbatch {microbatch}, "
                f"chunk {chunk} is out of range for a file of {len(rows)} ops: correct the line"
            )
    cells = np.array([(tick, stage, *row[1:]) for (tick, stage), row in rows.items()], np.int64)
    ticks, stages, _, microbatches, chunks = (int(n) + 1 for n in cells.max(axis=0))
    if ticks * stages > _MOST_CELLS:
        raise UserError(
            f"{path} spans {ticks} ticks on {stages} stages, more than the {_MOST_CELLS} cells a table can have"
        )
    tables = [np.full((ticks, stages), fill, np.int32) for fill in (Op.IDLE, -1, -1)]
    for table, column in zip(tables, cells.T[2:], strict=True):
        table[cells[:, 0], cells[:, 1]] = column
    schedule = Schedule(said["name"], stages, microbatches, chunks, said["placement"], *tables)
    check(schedule)
    return schedule


def _row(where: str, header: list[str], fields: list[str]) -> tuple[int, int, Op, int, int]:
    if len(fields) != len(header):
        raise UserError(f"{where}: {len(fields)} values for {len(header)} columns ({', '.join(header)})")
    row = dict(zip(header, fields, strict=True))
    if row["op"].lower() not in _OPS:
        raise UserError(
            f"{where}: tick {row['tick']}, stage {row['stage']} has op {row['op']!r}: use one of {', '.join(_OPS)}"
        )
    numbers = []
    for column in ("tick", "stage", "microbatch", "chunk"):
        try:
            value = int(row[column])
        except ValueError:
            value = None
        if value is None or not 0 <= value < 2**31 - 1:
            fault = "is not a whole number" if value is None else "is out of range"
            raise UserError(
                f"{where}: {column} {row[column]!r} of tick {row['tick']}, stage {row['stage']}, op {row['op']} "
                f"{fault}: give a whole number from 0 on"
            )
        numbers.append(value)
    tick, stage, microbatch, chunk = numbers
    return tick, stage, _OPS[row["op"].lower()], microbatch, chunk
