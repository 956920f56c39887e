"""Grouped GEMM against one dense product of equal FLOPs and against lax.ragged_dot.

A row per number of groups and direction (forward, data gradient, weight gradient). `dense_ratio` is the share of the
dense product's FLOP/s, `ragged_dot_speedup` the time of `lax.ragged_dot` over ours; group sizes are uneven, by seed.
"""

import argparse
from typing import Any

from moejax import cli
from moejax.errors import UserError
from moejax.mesh import prepare_devices
from pallas_kernels import bench


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--groups", type=cli.whole_numbers, default=(8, 32, 64, 128), help="numbers of groups, e.g. 8,32 (8,32,64,128)"
    )
    parser.add_argument("--rows", type=int, default=8192, help="rows in all groups together (%(default)s)")
    parser.add_argument("--width", type=int, default=256, help="D, the width of a row (%(default)s)")
    parser.add_argument("--hidden", type=int, default=512, help="F, the width of a result (%(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(%(default)s)")
    parser.add_argument("--routing", choices=bench.ROUTINGS, default="dirichlet", help="how sizes fall (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of values and sizes (%(default)s)")
    parser.add_argument("--repeats", type=int, default=41, help="turns whose median counts (%(default)s)")
    parser.add_argument("--implementation", default="auto", help="of grouped_gemm: auto, loop or xla (%(default)s)")


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    prepare_devices(1)  # memory as training has it
    options = ("rows", "width", "hidden", "dtype", "routing", "seed", "repeats", "implementation")
    try:
        return bench.grouped_gemm_rows(arguments.groups, **{name: getattr(arguments, name) for name in options})
    except ValueError as error:
        raise UserError(str(error)) from error
