"""The text of a compiled program, taken apart: computations, their instructions in the order they run, what calls what.

    compiled.as_text() --parse--> Program: name of computation -> [Instruction]
                       --walk--> every instruction that a step runs, with how often

Only what the reports need is read: result shapes, opcode, operands, and the attributes as text. A scheduled module
(what `compile()` returns) lists instructions in the order in which they are started.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from moejax.errors import UserError

BYTES = {"pred": 1, "token": 0, "opaque": 0, "c64": 8, "c128": 16}
ARRAY = re.compile(r"([a-z]\w*)\[([\d,<= ]*)\]")
NAME = re.compile(r"%?([\w.\-]+)")
CALLERS = ("call", "fusion", "async-start", "custom-call")


@dataclass(frozen=True)
class Instruction:
    """One line. shapes: bytes of each array of the result, in order. rest: everything after the operands."""

    name: str
    opcode: str
    shapes: tuple[int, ...]
    operands: tuple[str, ...]
    rest: str

    @property
    def bytes(self) -> int:
        return sum(self.shapes)

    @property
    def scope(self) -> str:
        """The name stack of the program that wrote it, e.g. jit(step)/shard_map/moe/dispatch."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""


@dataclass(frozen=True)
class Program:
    """computations: by name, instructions in order. entry: the name of the one that runs first."""

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str


def array_bytes(text: str) -> tuple[int, ...]:
    """Bytes of every array in a shape: "(f32[2,3]{1,0}, s32[])" is 24 and 4. Unpadded."""
    sizes = []
    for kind, dimensions in ARRAY.findall(text):
        count = 1
        for size in re.findall(r"\d+", dimensions):
            count *= int(size)
        digits = re.search(r"\d+", kind)
        bits = 8 * BYTES[kind] if kind in BYTES else int(digits[0]) if digits else 32
        sizes.append(-(-count * bits // 8))
    return tuple(sizes)


def parse(text: str) -> Program:
    """Raises UserError if the text is no HLO module."""
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, name, lines = "", "", []
    for line in text.splitlines():
        if line.endswith("{") and " -> " in line and not line.startswith(" "):
            head = NAME.match(line.removeprefix("ENTRY ").strip())
            name, lines = head[1] if head else "", []
            entry = name if line.startswith("ENTRY") else entry
        elif line.startswith("}") and name:
            computations[name], name = tuple(lines), ""
        elif name and " = " in line:
            lines.append(_instruction(line))
    if not entry:
        raise UserError("This is not the text of a compiled program: it has no ENTRY computation.")
    return Program(computations, entry)


def _closing(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return i
    return len(text) - 1


def _instruction(line: str) -> Instruction:
    name, _, right = line.strip().removeprefix("ROOT ").partition(" = ")
    end = _closing(right, 0) + 1 if right.startswith("(") else right.index(" ")
    shape, right = right[:end], right[end:].strip()
    opcode, _, _ = right.partition("(")
    close = _closing(right, len(opcode))
    operands = tuple(re.findall(r"%([\w.\-]+)", right[len(opcode) : close]))
    return Instruction(name.lstrip("%"), opcode, array_bytes(shape), operands, right[close + 1 :])


def attribute(rest: str, name: str) -> str | None:
    """The value of `name=...` in an instruction's attributes, brackets whole; None if it has none."""
    found = re.search(rf"[ ,]{name}=", rest)
    if not found:
        return None
    start = end = found.end()
    while end < len(rest) and rest[end] not in ", ":
        end = _closing(rest, end) + 1 if rest[end] in "([{" else end + 1
    return rest[start:end]


def trip_count(instruction: Instruction) -> int | None:
    """Turns of a while loop, None if the compiler does not know."""
    found = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.rest)
    return int(found[1]) if found else None


def branches(instruction: Instruction) -> list[str]:
    """Computations of a conditional, in the order of its index (false before true)."""
    listed = attribute(instruction.rest, "branch_computations")
    if listed is not None:
        return re.findall(r"%?([\w.\-]+)", listed)
    pair = [attribute(instruction.rest, name) for name in ("false_computation", "true_computation")]
    return [name.lstrip("%") for name in pair if name]


Shares = Callable[[Instruction], Sequence[float] | None]


def switch_shares(shares: Sequence[float]) -> Shares:
    """For `walk`: a switch with this many branches takes them by these shares, as the pipeline's executor does.

    Known by its number of branches alone: names of scopes are no part of what JAX's compilation cache goes by, so a
    cached program may carry those of an older source.
    """
    return lambda conditional: shares if len(branches(conditional)) == len(shares) else None


def walk(
    program: Program, unknown_trips: float = 0.0, shares: Shares = lambda _: None
) -> Iterator[tuple[str, Instruction, float]]:
    """(computation, instruction, times a step runs it) of everything, callees included.

    unknown_trips: turns of a loop whose number only the data says. The further rounds of an exchange are the only such
    loops here, and they do not turn unless a buffer overflows. shares: how often a conditional takes each of its
    branches, summing to one; None: each is counted as always taken, so that the sum is a bound.
    """

    def visit(name: str, times: float) -> Iterator[tuple[str, Instruction, float]]:
        for instruction in program.computations.get(name, ()):
            yield name, instruction, times
            if instruction.opcode == "while":
                turns = trip_count(instruction)
                body = (attribute(instruction.rest, "body") or "").lstrip("%")
                yield from visit(body, times * (unknown_trips if turns is None else turns))
            elif instruction.opcode == "conditional":
                names = branches(instruction)
                parts = shares(instruction) or [1.0] * len(names)
                for branch, part in zip(names, parts, strict=True):
                    yield from visit(branch, times * part)
            elif instruction.opcode in CALLERS:
                callee = attribute(instruction.rest, "calls") or attribute(instruction.rest, "to_apply")
                if callee:
                    yield from visit(callee.lstrip("%"), times)

    yield from visit(program.entry, 1.0)
