"""Measure something: `python -m moejax.bench NAME ... [--json FILE]`, a table on the screen and rows in a file.

    NAME --> moejax/benches/NAME.py: add_arguments, run --> rows --> table
                                                                 `-> {"bench": NAME, "machine": {...}, "rows": [...]}

A benchmark is a module in `moejax/benches` (dashes for underscores; a leading underscore is no benchmark). Its
docstring's first line is its help; `add_arguments(parser)` adds options; `run(arguments)` returns rows, dicts with the
same keys.
Variants are compared in one run and by ratios (`benches/_interleave.py`), and inputs are named by their seed.
"""

import argparse
import datetime
import importlib
import json
import os
import pkgutil
import platform
import sys
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


def overview(modules: dict[str, ModuleType]) -> argparse.ArgumentParser:
    """The parser of the command without a NAME: its help lists the benchmarks."""
    lines = [f"  {name:<16} {first_line(module)}" for name, module in modules.items()]
    return cli.Parser(
        prog="python -m moejax.bench",
        usage="python -m moejax.bench NAME ... [--json FILE]",
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(["benchmarks (NAME --help says more):", *lines]),
    )


def first_line(module: ModuleType) -> str:
    return (module.__doc__ or "").strip().splitlines()[0]


def main(arguments: Sequence[str] | None = None) -> int:
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    modules = benchmarks()
    if name not in modules:
        if name.startswith("-"):
            overview(modules).parse_args([name])
        raise UserError(f"There is no benchmark {name!r}; there are {', '.join(modules)}.")
    module = modules[name]
    parser = cli.Parser(
        prog=f"python -m moejax.bench {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows and the machine here")
    options = parser.parse_intermixed_args(rest)
    target: Path | None = options.json
    if target is not None and (target.is_dir() or not os.access(target.absolute().parent, os.W_OK)):
        raise UserError(f"--json cannot write {target}; name a file in a folder that exists and can be written.")
    rows = module.run(options)
    Console(width=None if os.isatty(1) else 140).print(table(name, rows))
    if target is not None:
        result = {"bench": name, "machine": machine(), "rows": rows}
        try:
            target.write_text(json.dumps(result, indent=1) + "\n")
        except OSError as error:
            raise UserError(f"--json cannot write {target}: {error.strerror}.") from error
    return 0


if __name__ == "__main__":
    cli.run(main)
