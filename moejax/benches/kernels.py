"""The GPU kernels compiled for GPUs that are not there: registers, spills, memory and instructions.

    python -m moejax.bench kernels --compile-only            # a row per kernel and chip
    python -m moejax.bench kernels --compile-only --layer    # memory of a whole sharded expert layer, 8 and 128 experts

Nothing is run and nothing is timed but the compiler; `python -m moejax.bench grouped-gemm` measures on a GPU. Needs the
`aot` extra. Each chip, and each layer, is a process of its own.
"""

import argparse
from typing import Any

from moejax.errors import UserError
from pallas_kernels import compile_only

LAYER_EXPERTS = (8, 128)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    chips = ("h200", "b200", "b300")
    parser.add_argument("--compile-only", action="store_true", help="say that no GPU is meant to run them; required")
    parser.add_argument("--layer", action="store_true", help="the expert layer on 8 devices instead of single kernels")
    parser.add_argument("--chips", nargs="+", choices=tuple(compile_only.CHIPS), default=chips, help="(all but h100)")
    parser.add_argument("--kernels", nargs="+", choices=compile_only.KERNELS, help="(all that the chip can run)")


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    if not arguments.compile_only:
        raise UserError(
            "Kernels are only compiled here: add --compile-only, or measure with `moejax.bench grouped-gemm`."
        )
    try:
        if arguments.layer:
            pairs = [(chip, experts) for chip in arguments.chips for experts in LAYER_EXPERTS]
            return [compile_only.compile_layer_row(chip, experts) for chip, experts in pairs]
        chosen = [(arguments.kernels or compile_only.kernels_of(chip), chip) for chip in arguments.chips]
        return [row for kernels, chip in chosen for row in compile_only.compile_rows(kernels, chip)]
    except compile_only.CannotCompile as error:
        raise UserError(str(error)) from error
