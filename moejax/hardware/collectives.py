"""What a compiled step sends: every collective in it, along which mesh axes, how often, and how many bytes.

    compiled.as_text(), mesh sizes --read--> [Collective] --by_kind--> rows: kind, axes, times, bytes a device sends

Bytes are those that leave one device in a ring or direct exchange among n devices, the least that any algorithm sends:

    all-gather          (n - 1)/n of the result          all-to-all           (n - 1)/n of the operand
    reduce-scatter      (n - 1)/n of the operand         ragged-all-to-all    (n - 1)/n of the operand, a bound:
    all-reduce        2 (n - 1)/n of the operand                              how many rows go is in the data
    collective-permute  the operand                      collective-broadcast the operand

Loops count with their trip counts. See `hlo.walk` for loops and branches that only the data decides.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from moejax.hardware import hlo

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


class Collective(NamedTuple):
    """One instruction of a device's program.

    axes: mesh axes along which its groups run, in mesh order; empty when every group is one device.
    group: devices that take part together. payload: bytes of its operands on one device. sent: bytes that leave a
    device each time it runs. times: runs a step. scope: where it was written (the program's name stack).
    synchronous: the device waits for it; else other work may stand between its start and its end.
    """

    name: str
    kind: str
    axes: tuple[str, ...]
    group: int
    payload: int
    sent: float
    times: float
    scope: str
    synchronous: bool

    @property
    def bytes_per_step(self) -> float:
        return self.sent * self.times


def read(
    text: str, mesh: Mapping[str, int], unknown_trips: float = 0.0, shares: hlo.Shares = lambda _: None
) -> list[Collective]:
    """Every collective that a step runs, in the order of the text.

    mesh: size of each axis, outermost first, as `dict(mesh.shape)`; device i of the program is the i-th in row-major
    order. unknown_trips, shares: see `hlo.walk`.
    """
    program = hlo.parse(text)
    sizes = {
        name: {i.name: i.bytes for i in instructions} for name, instructions in program.computations.items()
    }  # of results, within their computation
    found = []
    for computation, instruction, times in hlo.walk(program, unknown_trips, shares):
        kind = instruction.opcode.removesuffix("-start")
        if kind not in KINDS:
            continue
        groups = device_groups(instruction, mesh)
        group = max(map(len, groups), default=1)
        operands = instruction.operands[:1] if kind == "ragged-all-to-all" else instruction.operands
        payload = sum(sizes[computation].get(name, 0) for name in operands)
        found.append(
            Collective(
                instruction.name,
                kind,
                axes_of(groups, mesh),
                group,
                payload,
                sent_bytes(kind, payload, group),
                times,
                instruction.scope,
                synchronous(instruction),
            )
        )
    return found


def sent_bytes(kind: str, operand: float, group: int) -> float:
    """Bytes that leave each device of a group; operand: bytes of the operand on one device."""
    if group <= 1:
        return 0.0
    away = (group - 1) / group
    factors = {"all-gather": group - 1, "all-reduce": 2 * away, "collective-permute": 1, "collective-broadcast": 1}
    return operand * factors.get(kind, away)


def synchronous(instruction: hlo.Instruction) -> bool:
    return not instruction.opcode.endswith("-start") or '"is_sync":true' in instruction.rest


def device_groups(instruction: hlo.Instruction, mesh: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Devices that exchange with each other, by index; of a permute, the pairs of different ones."""
    pairs = hlo.attribute(instruction.rest, "source_target_pairs")
    if pairs is not None:
        return [pair for pair in _listed(pairs) if len(set(pair)) > 1]
    found = re.search(r"replica_groups=(.*)", instruction.rest)
    text = found[1] if found else ""
    if text.startswith("mesh"):
        return _named(text)
    if text.startswith("["):
        return _iota(text)
    listed = _listed(hlo.attribute(instruction.rest, "replica_groups") or "{}")
    return listed or [tuple(range(int(np.prod(list(mesh.values())))))]


def _listed(text: str) -> list[tuple[int, ...]]:
    """{{0,1},{2,3}}"""
    groups = re.findall(r"\{([\d, ]+)\}", text)
    return [tuple(int(i) for i in group.split(",")) for group in groups]


def _iota(text: str) -> list[tuple[int, ...]]:
    """[4,2]<=[2,2,2]T(0,2,1): devices in order, reshaped, transposed, and cut into 4 groups of 2."""
    numbers = lambda part: [int(i) for i in part.split(",")]  # noqa: E731
    match = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    assert match, f"replica groups of an unknown form: {text[:80]}"
    grid = np.arange(np.prod(numbers(match[2]))).reshape(numbers(match[2]))
    if match[3]:
        grid = grid.transpose(numbers(match[3]))
    return [tuple(row) for row in grid.reshape(numbers(match[1])).tolist()]


def _named(text: str) -> list[tuple[int, ...]]:
    """mesh['pp'=2,'dp'=2,'ep'=4] {'dp','ep':(2)2}: axes, or parts of them (outer size, own size)."""
    match = re.match(r"mesh\[([^\]]*)\][^{]*\{([^}]*)\}", text)
    assert match, f"replica groups of an unknown form: {text[:80]}"
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match[1])}
    grid = np.arange(int(np.prod(list(sizes.values()))))
    coordinates = dict(zip(sizes, np.unravel_index(grid, list(sizes.values())), strict=True))
    # a device's group is named by the coordinates that are not exchanged over
    for name, _, outer, own in re.findall(r"'([^']+)'(:\((\d+)\)(\d+))?", match[2]):
        if not own:
            coordinates[name] = coordinates[name] * 0
        else:
            inner = sizes[name] // (int(outer) * int(own))
            part = coordinates[name]
            coordinates[name] = part // (inner * int(own)) * inner + part % inner
    keys = np.stack(list(coordinates.values()), axis=1)
    groups: dict[tuple[int, ...], list[int]] = {}
    for device, key in zip(grid.tolist(), map(tuple, keys.tolist()), strict=True):
        groups.setdefault(key, []).append(device)
    return [tuple(group) for group in groups.values()]


def axes_of(groups: Sequence[tuple[int, ...]], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ."""
    varying: set[str] = set()
    for group in groups:
        coordinates = np.unravel_index(np.array(group), list(mesh.values()))
        varying |= {name for name, values in zip(mesh, coordinates, strict=True) if len(set(values.tolist())) > 1}
    return tuple(name for name in mesh if name in varying)


def by_kind(collectives: Sequence[Collective]) -> list[dict[str, Any]]:
    """Rows kind, axes ("dp,ep"), calls (a step), bytes (that leave a device in a step), most bytes first."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for c in collectives:
        key = (c.kind, ",".join(c.axes))
        row = rows.setdefault(key, {"kind": key[0], "axes": key[1], "calls": 0.0, "bytes": 0.0})
        row["calls"] += c.times
        row["bytes"] += c.bytes_per_step
    return sorted(rows.values(), key=lambda row: -row["bytes"])


def bytes_per_step(collectives: Sequence[Collective]) -> float:
    """Bytes that leave one device in a step."""
    return sum(c.bytes_per_step for c in collectives)
