"""Seeing a schedule: a timeline as text or as SVG, stages down, time across.

    Schedule --text_timeline--> str, one character column group per tick
    [Schedule, ...] --svg_timeline--> one picture, one panel each, on a common time axis

Forward, backward, weight gradient and idle have four colours whose luminance falls in this order: idle, forward,
backward, weight; so a print in grey reads the same, and each cell carries its letter and microbatch besides.
"""

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from moejax.errors import UserError
from moejax.parallel.schedules import Op, Schedule, bubble, op_times, peak_stash, step_time

LETTERS = {Op.IDLE: ".", Op.FORWARD: "F", Op.BACKWARD: "B", Op.BACKWARD_INPUT: "B", Op.BACKWARD_WEIGHT: "W"}
_LEFT, _ROW = 62, 20  # pixels: margin for the stages' names, height of a row

# Fill and ink. Relative luminance (WCAG) of the fills: idle 0.83, forward 0.53, backward 0.30, weight gradient 0.05.
COLOURS = {
    "idle": ("#ebebeb", "#000000"),
    "forward": ("#93c7e6", "#000000"),
    "backward": ("#e07b39", "#000000"),
    "weight gradient": ("#27406b", "#ffffff"),
}
_COLOUR_OF = {
    Op.IDLE: "idle",
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "backward",
    Op.BACKWARD_WEIGHT: "weight gradient",
}


def label(op: int, microbatch: int, chunk: int, chunks: int) -> str:
    """What stands in a cell: the op's letter, the microbatch, and for more than one chunk its letter, as in `F12b`."""
    if op == Op.IDLE:
        return LETTERS[Op.IDLE]
    return f"{LETTERS[Op(op)]}{microbatch}" + (_chunk_letter(chunk) if chunks > 1 else "")


def _chunk_letter(chunk: int) -> str:
    """a, b, ..., z, then the number itself, with a stroke."""
    return chr(ord("a") + chunk) if chunk < 26 else f"/{chunk}"


def caption(schedule: Schedule, costs: Mapping[Op, float] | None = None, asynchronous: bool = False) -> str:
    """One line of figures: sizes, length, bubble in per cent, and the peak stash of the fullest stage."""
    chunks = f", {schedule.chunks} chunks ({schedule.placement})" if schedule.chunks > 1 else ""
    length = f"{schedule.ticks} ticks"
    if costs is not None or asynchronous:
        pace = "each stage at its own pace" if asynchronous else "in step"
        length += f", time {step_time(schedule, costs, asynchronous):g} {pace}"
    stash = peak_stash(schedule).max()
    return (
        f"{schedule.name}: {schedule.stages} stages, {schedule.microbatches} microbatches{chunks}; {length}; "
        f"bubble {100 * bubble(schedule, costs, asynchronous):.1f}%; peak stash {stash} stage inputs"
    )


def text_timeline(schedule: Schedule, width: int | None = None) -> str:
    """The table as text: a caption, then a line per stage with a column per tick and the stage's peak stash at its end.

    width: characters per line; a table that is wider goes on below, in blocks of ticks. None for no limit.
    """
    cells = [
        [
            label(int(schedule.op[t, s]), int(schedule.microbatch[t, s]), int(schedule.chunk[t, s]), schedule.chunks)
            for t in range(schedule.ticks)
        ]
        for s in range(schedule.stages)
    ]
    column = max((len(cell) for row in cells for cell in row), default=1)
    column = max(column, len(str(schedule.ticks - 1))) + 1
    margin = len(f"stage {schedule.stages - 1}")
    room = schedule.ticks if width is None else max(1, (width - margin - len(" | stash 000")) // column)
    stash = peak_stash(schedule)
    lines = [caption(schedule)]
    for begin in range(0, schedule.ticks, room):
        ticks = range(begin, min(begin + room, schedule.ticks))
        lines.append("tick".rjust(margin) + "".join(str(t).rjust(column) for t in ticks))
        for s, row in enumerate(cells):
            line = f"stage {s}".rjust(margin) + "".join(row[t].rjust(column) for t in ticks)
            lines.append(line + f" | stash {stash[s]}")
    kinds = {LETTERS[Op(int(op))]: _COLOUR_OF[Op(int(op))] for op in np.unique(schedule.op)}
    lines.append("   ".join(f"{letter} {kind}" for letter, kind in kinds.items()))
    return "\n".join(lines) + "\n"


def svg_timeline(
    schedules: Sequence[Schedule],
    costs: Mapping[Op, float] | None = None,
    asynchronous: bool = False,
    unit_width: float | None = None,
) -> str:
    """An SVG document: one panel per schedule, all on one time axis, each with its bubble and peak stash as figures.

    costs: time of an op on all layers of a stage, 1 for all when None. With v chunks an op has 1/v of the layers and is
      drawn 1/v as long, so that panels with different chunks can be compared.
    asynchronous: as in `op_times`; each stage at its own pace, or in step.
    unit_width: pixels per unit of time. None: as wide as the longest label in the shortest op needs.
    Raises UserError for an empty list, and for costs that lack an op.
    """
    if not schedules:
        raise UserError("there is no schedule to draw: name at least one")
    costs = dict.fromkeys(Op, 1.0) if costs is None else costs
    shares = [{op: cost / schedule.chunks for op, cost in costs.items()} for schedule in schedules]
    times = [op_times(schedule, share, asynchronous) for schedule, share in zip(schedules, shares, strict=True)]
    end = max(float(stop.max(initial=0.0)) for _, stop in times)
    if unit_width is None:
        lengths = np.concatenate([(stop - start).ravel() for start, stop in times])
        shortest = float(lengths.min(initial=end, where=lengths > 0)) or 1.0
        unit_width = (6.0 * max(map(_longest_label, schedules)) + 6.0) / shortest
    body: list[str] = []
    y = 46.0
    for schedule, share, (start, stop) in zip(schedules, shares, times, strict=True):
        words = escape(caption(schedule, share, asynchronous))
        body.append(f'<text class="caption" x="{_LEFT:g}" y="{y + 14:g}">{words}</text>')
        body += _panel(schedule, start * unit_width, stop * unit_width, y + 22)
        y += 22 + schedule.stages * _ROW + 12
    width, height = _LEFT + max(end * unit_width, 700.0) + 76, y + 34
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" font-family="sans-serif">'
    )
    style = "<style>.caption{font-size:13px;font-weight:bold}.name{font-size:11px}.cell{font-size:9px}</style>"
    paper = f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>'
    return "\n".join([head, style, paper, *_legend(), *body, *_axis(y, end, unit_width), "</svg>\n"])


def _panel(schedule: Schedule, start: np.ndarray, stop: np.ndarray, y: float) -> list[str]:
    """The rows of one schedule; start and stop are the cells' edges in pixels from the axis' zero."""
    out: list[str] = []
    end = float(stop.max(initial=0.0))
    stash = peak_stash(schedule)
    for s in range(schedule.stages):
        line = y + s * _ROW
        out.append(f'<text class="name" x="{_LEFT - 6:g}" y="{line + 14:g}" text-anchor="end">stage {s}</text>')
        out.append(_rectangle(_LEFT, line, end, "idle"))
        for t in np.flatnonzero(schedule.op[:, s] != Op.IDLE).tolist():
            out.append(_cell(schedule, t, s, _LEFT + float(start[t, s]), line, float(stop[t, s] - start[t, s])))
        out.append(f'<text class="name" x="{_LEFT + end + 6:.2f}" y="{line + 14:g}">stash {stash[s]}</text>')
    return out


def _longest_label(schedule: Schedule) -> int:
    chunk = len(_chunk_letter(schedule.chunks - 1)) if schedule.chunks > 1 else 0
    return 1 + len(str(schedule.microbatches - 1)) + chunk


def _rectangle(x: float, y: float, width: float, colour: str) -> str:
    fill = COLOURS[colour][0]
    return f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{_ROW}" fill="{fill}" stroke="#ffffff"/>'


def _cell(schedule: Schedule, tick: int, stage: int, x: float, y: float, width: float) -> str:
    """One op, with all it is in a tooltip. Odd chunks have a stripe at the foot, so that a fold shows from afar."""
    op, m, chunk = (int(table[tick, stage]) for table in (schedule.op, schedule.microbatch, schedule.chunk))
    colour = _COLOUR_OF[Op(op)]
    ink = COLOURS[colour][1]
    text = label(op, m, chunk, schedule.chunks)
    told = f"tick {tick}, stage {stage}: {Op(op).name.lower().replace('_', ' ')} of microbatch {m}, chunk {chunk}"
    parts = [f"<g><title>{told}</title>", _rectangle(x, y, width, colour)]
    if chunk % 2:
        stripe = max(width - 2, 0.0)
        parts.append(f'<rect x="{x + 1:.2f}" y="{y + 16:g}" width="{stripe:.2f}" height="2" fill="{ink}"/>')
    if width >= 5.5 * len(text):
        where = f'x="{x + width / 2:.2f}" y="{y + 13:g}" text-anchor="middle"'
        parts.append(f'<text class="cell" {where} fill="{ink}">{text}</text>')
    return "".join(parts) + "</g>"


def _legend() -> list[str]:
    out = []
    letters = {kind: LETTERS[op] for op, kind in _COLOUR_OF.items() if op != Op.IDLE}
    for i, (kind, (_, ink)) in enumerate(COLOURS.items()):
        x = _LEFT + 150 * i
        out.append(_rectangle(x, 14, 24, kind))
        letter = f'<text class="cell" x="{x + 12:g}" y="27" text-anchor="middle" fill="{ink}">{letters.get(kind, "")}'
        out.append(f'{letter}</text><text class="name" x="{x + 30:g}" y="28">{kind}</text>')
    return out


def _axis(y: float, end: float, unit_width: float) -> list[str]:
    """A ruler with a mark every 50 pixels or a little more, on 1, 2 or 5 times a power of ten."""
    wanted = 50 / unit_width
    power = 10.0 ** float(np.floor(np.log10(wanted)))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= wanted * (1 - 1e-9))
    out = [f'<path d="M{_LEFT:g} {y:g}H{_LEFT + end * unit_width:.2f}" stroke="#000000"/>']
    for i in range(int(end / step + 1e-9) + 1):
        x = _LEFT + i * step * unit_width
        out.append(f'<path d="M{x:.2f} {y:g}v5" stroke="#000000"/>')
        out.append(f'<text class="name" x="{x:.2f}" y="{y + 18:g}" text-anchor="middle">{i * step:g}</text>')
    unit = "time; an op of one of v chunks takes 1/v of a whole stage's"
    out.append(f'<text class="name" x="{_LEFT:g}" y="{y + 31:g}">{unit}</text>')
    return out
