"""What a scheduled program does while it sends: for every collective, the work between its start and its end.

    compiled.as_text() --spans--> [Span]: kind, bytes, work beside it --summary--> bytes in all, bytes with work beside

A scheduled module lists instructions in the order in which they start. A collective that the compiler made asynchronous
is a pair, start and done; whatever stands between the two may run while bytes travel. That it *can* is read here;
whether it takes as long as they do, only a GPU says.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from moejax.hardware import hlo
from moejax.hardware.collectives import KINDS, device_groups, sent_bytes, synchronous

# Instructions that only name, pass on or wait for what is there.
NO_WORK = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "iota",
    "copy-start",
    "copy-done",
    "async-done",
    "opt-barrier",
}


class Span(NamedTuple):
    """kind, name: of the collective. sent: bytes that leave a device in a step. work: names of the instructions between
    start and done that compute something. work_bytes: bytes that these write."""

    kind: str
    name: str
    sent: float
    work: tuple[str, ...]
    work_bytes: int


def spans(text: str, mesh: Mapping[str, int], unknown_trips: float = 0.0) -> list[Span]:
    """Every collective that a step runs, in the order of the text; see `collectives.read` for the arguments."""
    program = hlo.parse(text)
    found = []
    for computation, instruction, times in hlo.walk(program, unknown_trips):
        kind = instruction.opcode.removesuffix("-start")
        if kind not in KINDS or not times:
            continue
        lines = program.computations[computation]
        sizes = {line.name: line.bytes for line in lines}
        operands = instruction.operands[:1] if kind == "ragged-all-to-all" else instruction.operands
        group = max(map(len, device_groups(instruction, mesh)), default=1)
        sent = sent_bytes(kind, sum(sizes.get(name, 0) for name in operands), group) * times
        between = [] if synchronous(instruction) else _between(lines, instruction)
        found.append(Span(kind, instruction.name, sent, tuple(i.name for i in between), sum(i.bytes for i in between)))
    return found


def _between(lines: Sequence[hlo.Instruction], start: hlo.Instruction) -> list[hlo.Instruction]:
    later = lines[lines.index(start) + 1 :]
    ends = [n for n, line in enumerate(later) if line.opcode.endswith("-done") and start.name in line.operands]
    return [line for line in later[: ends[0]] if _works(line)] if ends else []


def _works(instruction: hlo.Instruction) -> bool:
    name = instruction.opcode.removesuffix("-start").removesuffix("-done")
    return instruction.opcode not in NO_WORK and name not in KINDS


def summary(found: Sequence[Span]) -> dict[str, float]:
    """collectives, asynchronous_with_work: how many. bytes: sent in a step. overlapped_bytes: of those with work
    beside. overlapped_share: their part."""
    total = sum(span.sent for span in found)
    beside = sum(span.sent for span in found if span.work)
    return {
        "collectives": len(found),
        "with_work_beside": sum(bool(span.work) for span in found),
        "bytes": total,
        "overlapped_bytes": beside,
        "overlapped_share": beside / total if total else 0.0,
    }
