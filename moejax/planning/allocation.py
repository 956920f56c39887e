"""What the compiler allocated, and what lives at the peak: XLA's own reports, read.

lowered --compile_reporting--> compiled program, and the text of the live ranges
live ranges + program --peak_by_scope--> bytes alive at the peak, by the part of the step that made them
"""

import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Named scopes of the program to the parts of a report, the innermost that is found wins.
PARTS = {
    "dispatch": "dispatch",
    "combine": "dispatch",
    "plan": "dispatch",
    "experts": "experts",
    "shared_expert": "shared expert",
    "router": "router",
    "router_losses": "router",
    "attention": "attention",
    "mlp": "dense blocks",
    "moe": "rest of the MoE block",
    "head": "head",
    "embedding": "embedding",
    "optimizer": "optimizer",
    "reduce_gradients": "gradient reduction",
}
ELSEWHERE = "state, accumulators and rings"
LIVE = re.compile(r"^\s+(?P<name>[^\s{]+)\{(?P<index>[\d,]*)\}: (?P<bytes>\d+) bytes", re.MULTILINE)


def compile_reporting(lowered: Any) -> tuple[Any, str]:
    """(compiled program, XLA's report of live ranges; empty if this version writes none)."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True, "xla_dump_hlo_module_re": ".*"}
        compiled = lowered.compile(compiler_options=options)
        reports = sorted(Path(folder).glob("*live-range.txt"), key=lambda path: path.stat().st_size)
        return compiled, reports[-1].read_text() if reports else ""


def peak_buffers(report: str) -> list[tuple[str, int]]:
    """(instruction, bytes) of every buffer alive when most bytes are, largest first."""
    _, _, rest = report.partition("(peak):")
    section, _, _ = rest.partition("Stack trace breakdown")
    return [(match["name"], int(match["bytes"])) for match in LIVE.finditer(section)]


def scopes(program_text: str) -> dict[str, str]:
    """Name stack of every instruction that has one."""
    found = re.findall(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*?op_name="([^"]*)"', program_text, re.MULTILINE)
    return dict(found)


def part_of(scope: str) -> str:
    """Which part of the step a name stack belongs to: "jit(step)/.../moe/dispatch/gather" is dispatch."""
    words = re.split(r"[/()]+", scope)
    return next((PARTS[word] for word in reversed(words) if word in PARTS), ELSEWHERE)


def peak_by_scope(report: str, program_text: str) -> dict[str, int]:
    """Bytes alive at the peak, parameters of the program included, by part; largest first."""
    by_name: Mapping[str, str] = scopes(program_text)
    total: Counter[str] = Counter()
    for name, size in peak_buffers(report):
        total[part_of(by_name.get(name, ""))] += size
    return dict(total.most_common())
