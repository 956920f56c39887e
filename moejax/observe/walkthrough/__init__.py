"""The walkthrough: a plan as one page that shows a model on a mesh, and lets another mesh be tried.

    planning.report.to_json(plan) --write--> one HTML file: no network, no framework, opens from disk

The page opens with the plan's own model, mesh and schedule: devices and what each holds, tokens walking to experts and
back, the pipeline's timeline, traffic by axis, memory against the card. `schedule.js` and `model.js` compute what
changes with the mesh, by the formulas of `moejax.planning` (tests/observe/test_walkthrough.py compares the numbers);
`drawings.js` draws and moves; `view.js` holds what is chosen.
"""

import json
from pathlib import Path
from typing import Any

from moejax.errors import UserError

FOLDER = Path(__file__).parent
PARTS = ("style.css", "schedule.js", "model.js", "drawings.js", "view.js")


def page(report: dict[str, Any]) -> str:
    """The whole page as text; report: `planning.report.to_json` of a plan."""
    text = (FOLDER / "page.html").read_text(encoding="utf-8")
    for name in PARTS:
        text = text.replace(f"/*{name}*/", (FOLDER / name).read_text(encoding="utf-8"))
    # "<" could end the script: as an escape it is the same string
    data = json.dumps(report, ensure_ascii=False).replace("<", "\\u003c")
    return text.replace("/*report*/null", data)


def write(path: str | Path, report: dict[str, Any]) -> None:
    """Writes the page. Raises UserError if the file cannot be written."""
    try:
        Path(path).write_text(page(report), encoding="utf-8")
    except OSError as error:
        raise UserError(f"The page cannot be written to {path}: {error.strerror}.") from None
