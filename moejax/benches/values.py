"""The same shapes with different numbers in them: time by input family, and which inputs a result was measured on.

    family, seed --> operands --fingerprint--> grouped product, families take turns --> seconds, ratio, fingerprint
    --compare FILE --> seconds over those of an earlier result, only where the fingerprints are equal

    python -m moejax.bench values --json before.json
    python -m moejax.bench values --compare before.json

Time can depend on values and not on shapes alone: a GPU that multiplies zeros draws less power and may clock higher, a
processor may take denormal numbers slowly, and experts of uneven load leave lanes idle. So a figure without its inputs
says little, and two figures on different inputs nothing about the code.

The operation is the experts' first product, rows [R, D] by weights [E, D, F]. Families: `normal`; `zeros`; `ones`;
`sparse`, nine of ten zero; `integers`, -8 to 8; `denormal`, 1e-39 times normal; `zipf` and `one-hot`, normal numbers
over uneven groups; the others have even groups.
"""

import argparse
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax import cli
from moejax.benches._interleave import interleaved
from moejax.errors import UserError
from pallas_kernels import grouped_gemm

FAMILIES = ("normal", "zeros", "ones", "sparse", "integers", "denormal", "zipf", "one-hot")


class Operands(NamedTuple):
    rows_RD: np.ndarray
    weights_EDF: np.ndarray
    group_sizes_E: np.ndarray


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=cli.whole_number, default=8192, help="rows in all groups (%(default)s)")
    parser.add_argument("--experts", type=cli.whole_number, default=32, help="groups (%(default)s)")
    parser.add_argument("--width", type=cli.whole_number, default=256, help="contracted width (%(default)s)")
    parser.add_argument("--hidden", type=cli.whole_number, default=512, help="width of the result (%(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(%(default)s)")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES, help="default: all")
    parser.add_argument("--turns", type=cli.whole_number, default=11, help="timed calls of each (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="names the inputs (%(default)s)")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="rows of an earlier --json, on the same inputs")


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows with family, seconds (median), ratio (speed over the first family's), spread, fingerprint, and with
    --compare earlier_seconds and speedup. Raises UserError if FILE cannot be read or is about other inputs."""
    inputs = {family: make_operands(arguments, family) for family in arguments.families}
    marks = {family: fingerprint(operands) for family, operands in inputs.items()}
    earlier = same_inputs(arguments.compare, marks) if arguments.compare else {}
    timings = interleaved({family: product(operands) for family, operands in inputs.items()}, arguments.turns)
    rows = []
    for family, timing in timings.items():
        row = {
            "family": family,
            "seconds": timing.seconds,
            "ratio": timing.ratio,
            "spread": timing.spread,
            "fingerprint": marks[family],
            "rows": arguments.rows,
            "experts": arguments.experts,
            "dtype": arguments.dtype,
            "turns": arguments.turns,
            "seed": arguments.seed,
        }
        if arguments.compare:
            row |= {"earlier_seconds": earlier[family], "speedup": earlier[family] / timing.seconds}
        rows.append(row)
    return rows


def make_operands(arguments: argparse.Namespace, family: str) -> Operands:
    rng = np.random.default_rng([arguments.seed, FAMILIES.index(family)])
    shapes = ((arguments.rows, arguments.width), (arguments.experts, arguments.width, arguments.hidden))
    arrays = [numbers(rng, family, shape).astype(jnp.dtype(arguments.dtype)) for shape in shapes]
    return Operands(arrays[0], arrays[1], group_sizes(rng, family, arguments.rows, arguments.experts))


def numbers(rng: np.random.Generator, family: str, shape: tuple[int, ...]) -> np.ndarray:
    if family in ("zeros", "ones"):
        return np.full(shape, float(family == "ones"), np.float32)
    if family == "integers":
        return rng.integers(-8, 9, shape).astype(np.float32)
    values = rng.standard_normal(shape, np.float32)
    if family == "sparse":
        values *= rng.random(shape, np.float32) < 0.1
    return values * np.float32(1e-39) if family == "denormal" else values


def group_sizes(rng: np.random.Generator, family: str, rows: int, experts: int) -> np.ndarray:
    """int32[E], rows in all."""
    if family == "one-hot":
        return np.where(np.arange(experts) == 0, rows, 0).astype(np.int32)
    share = rng.permutation(1.0 / np.arange(1, experts + 1)) if family == "zipf" else np.ones(experts)
    bounds = np.rint(np.cumsum(share) / share.sum() * rows).astype(np.int32)
    return np.diff(bounds, prepend=0).astype(np.int32)


def fingerprint(operands: Operands) -> str:
    """16 hexadecimal digits of the operands' names, dtypes, shapes and bytes: the same only for the same inputs."""
    digest = hashlib.sha256()
    for name, array in operands._asdict().items():
        digest.update(f"{name} {array.dtype.name} {array.shape};".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def product(operands: Operands) -> Callable[[], Any]:
    compiled = jax.jit(grouped_gemm)
    placed = jax.device_put(tuple(operands))
    return lambda: compiled(*placed)


def same_inputs(path: Path, marks: dict[str, str]) -> dict[str, float]:
    """Seconds by family of an earlier result, if it was measured on the inputs with these fingerprints."""
    try:
        rows = {row["family"]: row for row in json.loads(path.read_text())["rows"]}
        found = {family: (str(rows[family]["fingerprint"]), float(rows[family]["seconds"])) for family in marks}
    except OSError as error:
        raise UserError(f"--compare cannot read {path}: {error.strerror}.") from None
    except KeyError as error:
        raise UserError(f"--compare {path} has no {error}; name a file written by bench values with --json.") from None
    except (ValueError, TypeError):
        raise UserError(f"--compare {path} is no result; name a file written by bench values with --json.") from None
    for family, mark in marks.items():
        if found[family][0] != mark:
            raise UserError(
                f"--compare {path} was measured on other inputs: its {family} has fingerprint {found[family][0]}, "
                f"these have {mark}, and time depends on values; give the same sizes, dtype and --seed."
            )
    return {family: seconds for family, (_, seconds) in found.items()}
