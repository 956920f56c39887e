"""Know before you rent: does it fit, how fast, on which mesh, and what moves.

    python -m moejax.plan --config configs/ultra_128e.yaml --mesh dp=8,ep=8,pp=8 --gpu b300           # compiled
    python -m moejax.plan --config configs/medium_64e.yaml --gpu h200 --gpus 64 --quick               # formulas
    python -m moejax.plan --config configs/medium_64e.yaml --gpu h200 --gpus 64 --search              # best meshes
    python -m moejax.plan --schedule 1f1b,zero_bubble_v                                               # pictures

The plan compiles the step that training would run, kernels included, for GPUs that are not there (the `aot` extra),
and reads memory and collectives from the compiler; the time is a roofline. `--quick` answers from formulas.
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from moejax import cli
from moejax.errors import UserError
from moejax.hardware.gpus import known_gpus, read_gpu
from moejax.mesh import parse_mesh
from moejax.planning import draw, quick, report, roofline, search, setup, show


def main(arguments: Sequence[str] | None = None) -> int:
    parser = cli.config_parser("plan", "What a step needs and how long it takes, before a GPU is rented.")
    parser.add_argument(
        "--gpu", default="h200", metavar="G", help=f"{', '.join(known_gpus())}, or path/to/own.yaml (%(default)s)"
    )
    parser.add_argument(
        "--gpus", type=cli.whole_number, metavar="N", help="how many GPUs there are (those of the mesh)"
    )
    parser.add_argument("--nodes", type=cli.whole_number, metavar="N", help="the same, in nodes")
    parser.add_argument("--quick", action="store_true", help="from formulas, in a second; nothing is compiled")
    parser.add_argument(
        "--search", action="store_true", help="try meshes, schedules, recompute and microbatches; compile the best"
    )
    parser.add_argument(
        "--compile", type=int, default=3, metavar="N", help="with --search: how many of the best are compiled (3)"
    )
    parser.add_argument(
        "--tokens-per-second",
        type=cli.whole_numbers,
        default=(),
        metavar="N,...",
        help="measured rates per GPU: what they are in TFLOP/s",
    )
    parser.add_argument(
        "--attained", metavar="compute=0.6,...", help=f"shares of the peaks that work reaches ({_spelled()})"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plan as data")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the plan as one page to explore")
    draw.add_arguments(parser)
    options = parser.parse_intermixed_args(arguments)
    if draw.wanted(options):
        return draw.draw(options)
    for target in (options.json, options.html):
        if target is not None and (target.is_dir() or not os.access(target.absolute().parent, os.W_OK)):
            raise UserError(f"{target} cannot be written; name a file in a folder that exists and can be written.")
    console = Console(width=None if os.isatty(1) else 120, highlight=False)
    plan, extra = _search(options, console) if options.search else (_plan(options), {})
    show.render(plan, console)
    data = report.to_json(plan) | extra
    if options.json is not None:
        _write(options.json, json.dumps(data, indent=1) + "\n")
    if options.html is not None:
        from moejax.observe import walkthrough  # here, since only a page needs it

        walkthrough.write(options.html, data)
        console.print(f"Page: {options.html.absolute()}")
    return 0


def _spelled() -> str:
    return ",".join(f"{name}={share}" for name, share in roofline.ATTAINED.items())


def read_attained(text: str | None) -> dict[str, float] | None:
    if text is None:
        return None
    shares = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            shares[name.strip()] = float(value)
        except ValueError:
            shares[name.strip()] = -1.0
    if set(shares) - set(roofline.ATTAINED) or not all(0 < share <= 1 for share in shares.values()):
        raise UserError(f"--attained {text}: write shares above 0 and up to 1 of these: {_spelled()}.")
    return shares


def _plan(options: argparse.Namespace) -> report.Plan:
    config, gpu = cli.read_config(options), read_gpu(options.gpu)
    shape = parse_mesh(config.parallel.mesh)
    setup.check_gpus(shape, options.gpus, options.nodes, gpu)
    what = setup.make_setup(config, shape, gpu, options.config)
    attained = read_attained(options.attained)
    if options.quick:
        plan = quick.quick_plan(what, attained, options.tokens_per_second)
    else:
        plan = _compiled().compiled_plan(what, options.gpu, attained, options.tokens_per_second)
    if not plan.verdict.fits:
        plan = search.with_smallest(what, plan)
    return plan


def _search(options: argparse.Namespace, console: Console) -> tuple[report.Plan, dict[str, Any]]:
    config, gpu = cli.read_config(options), read_gpu(options.gpu)
    there = options.gpus or (options.nodes * gpu.gpus_per_node if options.nodes else None)
    devices = there or parse_mesh(config.parallel.mesh).devices
    attained = read_attained(options.attained)
    compile_plan = None if options.quick else _compiled().compiled_plan
    found = search.search(config, gpu, devices, options.config, attained)
    winner = search.settle(found, options.gpu, compile_plan, options.compile, attained, options.tokens_per_second)
    console.print(search.table(found))
    return winner, {"search": search.rows(found)}


def _compiled() -> Any:
    """The module that compiles, with JAX kept from looking for a driver: a plan needs none."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
    from moejax.planning import compiled  # here, since it imports the whole of training

    return compiled


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from None


if __name__ == "__main__":
    cli.run(main)
