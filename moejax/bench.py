"""Measure something: `python -m moejax.bench NAME ... [--json FILE]`, a table on the screen and rows in a file.

    NAME --> moejax/benches/NAME.py: add_arguments, run --> rows --> table
                                                                 `-> {"bench": NAME, "machine": {...}, "rows": [...]}

A benchmark is a module in `moejax/benches` (dashes for underscores; a leading underscore is no benchmark). Its docstring's
first line is its help; `add_arguments(parser)` adds options; `run(arguments)` returns rows, dicts with the same keys.
Variants are compared in one run and by ratios (`benches/_interleave.py`), and inputs are named by their seed.
"""

import argparse
import datetime
import importlib
import json
import os
import pkgutil
import platform
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from moejax import benches, cli
from moejax.errors import UserError


def benchmarks() -> dict[str, ModuleType]:
    """Every benchmark by its name on the command line."""
    modules = [m.name for m in pkgutil.iter_modules(benches.__path__) if not m.name.startswith("_")]
    return {name.replace("_", "-"): importlib.import_module(f"moejax.benches.{name}") for name in sorted(modules)}


def machine() -> dict[str, Any]:
    """Where and when the figures were taken."""
    devices = jax.devices()
    return {
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "jax": jax.__version__,
        "platform": platform.platform(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "load": round(os.getloadavg()[0], 1),  # over the last minute; above the number of cores, others were at work
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def table(name: str, rows: list[dict[str, Any]]) -> Table:
    """The rows; what is the same in all of them stands once, in the caption."""
    same = {key for key in rows[0] if len(rows) > 1 and all(row[key] == rows[0][key] for row in rows)}
    caption = ", ".join(f"{key} {spelled(rows[0][key])}" for key in rows[0] if key in same)
    result = Table(title=name, caption=caption or None)
    keys = [key for key in rows[0] if key not in same]
    for key in keys:
        result.add_column(key, justify="left" if isinstance(rows[0][key], str) else "right", overflow="fold")
    for row in rows:
        result.add_row(*(spelled(row[key]) for key in keys))
    return result


def spelled(value: Any) -> str:
    """Whole numbers with separators, others with four digits."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = cli.Parser(prog="python -m moejax.bench", description=(__doc__ or "").splitlines()[0])
    names = parser.add_subparsers(dest="name", metavar="NAME", required=True)
    modules = benchmarks()
    for name, module in modules.items():
        description = (module.__doc__ or "").strip()
        own = names.add_parser(
            name,
            help=description.splitlines()[0],
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(own)
        own.add_argument("--json", type=Path, metavar="FILE", help="write the rows and the machine here")
    options = parser.parse_args(arguments)
    target: Path | None = options.json
    if target is not None and (target.is_dir() or not os.access(target.absolute().parent, os.W_OK)):
        raise UserError(f"--json cannot write {target}; name a file in a folder that exists and can be written.")
    rows = modules[options.name].run(options)
    Console(width=None if os.isatty(1) else 140).print(table(options.name, rows))
    if target is not None:
        result = {"bench": options.name, "machine": machine(), "rows": rows}
        try:
            target.write_text(json.dumps(result, indent=1) + "\n")
        except OSError as error:
            raise UserError(f"--json cannot write {target}: {error.strerror}.") from error
    return 0


if __name__ == "__main__":
    cli.run(main)
