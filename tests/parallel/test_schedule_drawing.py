"""Pictures of schedules: every op is shown once, where it belongs; figures are the priced ones; grey suffices."""

import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from moejax.errors import UserError
from moejax.parallel.schedule_drawing import COLOURS, svg_timeline, text_timeline
from moejax.parallel.schedule_makers import make_schedule
from moejax.parallel.schedules import Op, bubble, peak_stash, step_time

FORWARD_1_BACKWARD_2 = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0, Op.BACKWARD_INPUT: 1.0, Op.BACKWARD_WEIGHT: 1.0}


@pytest.mark.parametrize("width", [None, 60])
def test_text_shows_every_op_once_in_its_row(width):
    schedule = make_schedule("zero_bubble", 3, 4, 2)
    text = text_timeline(schedule, width)
    for stage in range(3):
        rows = [line.split(" | ")[0].split()[2:] for line in text.splitlines() if line.startswith(f"stage {stage}")]
        shown = Counter(word for row in rows for word in row if word != ".")
        assert shown == Counter(f"{letter}{m}{chunk}" for letter in "FBW" for m in range(4) for chunk in "ab")
    assert width is None or max(map(len, text.splitlines()[1:])) <= width
    assert f"bubble {100 * bubble(schedule):.1f}%" in text
    assert f"peak stash {peak_stash(schedule).max()}" in text


def panels(svg: str) -> tuple[list[str], list[tuple[str, float, float]]]:
    """Captions, and (tooltip, left, right) of every op."""
    space = "{http://www.w3.org/2000/svg}"
    root = ElementTree.fromstring(svg)
    captions = [text.text or "" for text in root.iter(f"{space}text") if text.get("class") == "caption"]
    cells = []
    for group in root.iter(f"{space}g"):
        rectangle = next(group.iter(f"{space}rect"))
        left, width = float(rectangle.attrib["x"]), float(rectangle.attrib["width"])
        cells.append((group.findtext(f"{space}title") or "", left, left + width))
    return captions, cells


@pytest.mark.parametrize("asynchronous", [False, True])
def test_svg_shows_several_schedules_on_one_time_axis_with_their_figures(asynchronous):
    schedules = [make_schedule("1f1b", 3, 4), make_schedule("interleaved_1f1b", 3, 4, 2)]
    captions, cells = panels(svg_timeline(schedules, FORWARD_1_BACKWARD_2, asynchronous, unit_width=30))
    assert len(cells) == sum(int((schedule.op > 0).sum()) for schedule in schedules)
    for schedule, words in zip(schedules, captions, strict=True):
        assert f"bubble {100 * bubble(schedule, FORWARD_1_BACKWARD_2, asynchronous):.1f}%" in words
        assert f"peak stash {peak_stash(schedule).max()}" in words
    count = int((schedules[0].op > 0).sum())
    for schedule, part in zip(schedules, (cells[:count], cells[count:]), strict=True):
        # From the axis' zero at 62 to the end of the step, an op of a half-stage counting half.
        assert min(left for _, left, _ in part) == 62
        end = 62 + 30 * step_time(schedule, FORWARD_1_BACKWARD_2, asynchronous) / schedule.chunks
        assert max(right for _, _, right in part) == pytest.approx(end, abs=0.02)


def test_svg_escapes_names_and_refuses_an_empty_list():
    captions, _ = panels(svg_timeline([replace(make_schedule("1f1b", 1, 1), name='<&">')]))
    assert captions[0].startswith('<&">: 1 stages')
    with pytest.raises(UserError, match="no schedule to draw"):
        svg_timeline([])


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb, WCAG 2."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def test_the_four_colours_differ_in_grey_and_carry_readable_letters():
    fills = [luminance(fill) for fill, _ in COLOURS.values()]
    assert len(fills) == 4 and all(a / b > 1.4 and a - b > 0.2 for a, b in zip(fills, fills[1:], strict=False))
    for fill, ink in COLOURS.values():
        bright, dark = sorted((luminance(fill), luminance(ink)), reverse=True)
        assert (bright + 0.05) / (dark + 0.05) >= 4.5  # WCAG AA for small text
