"""Measures the grouped GEMM against one dense product of equal FLOPs and against `lax.ragged_dot`, in one run.

    seed --> values, group sizes --> per direction: ours, dense, ragged_dot, turn by turn --> medians --> ratios, error

    python -m pallas_kernels.bench                                   # 8, 32, 64, 128 groups over 8,192 rows, 256 x 512
    python -m pallas_kernels.bench --groups 64 --dtype bfloat16 --routing zipf --json rows.json

Needs jax and numpy only, and runs on whatever device jax finds. Ratios are of medians over turns in which the three
take each other's place in line, since machines are shared and clocks move; absolute figures are for orientation.
Inputs are random, never zeros (time depends on values on GPU), and named by their seed.

Every call writes into the buffer of its previous call (donation), as a training step does with its state. Otherwise the
operating system would be measured: a fresh 64 MiB result, the weight gradient of 128 experts, costs 19 to 29 ms of page
faults here, where filling it costs 2 ms and the dense product 11 ms (2 cores, 2026-11).
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels.grouped_gemm import (
    grouped_gemm,
    grouped_gemm_reference,
    grouped_gemm_weight_grad,
    grouped_gemm_weight_grad_reference,
    resolve_implementation,
)

DIRECTIONS = ("forward", "data_gradient", "weight_gradient")
ROUTINGS = ("dirichlet", "zipf", "uniform")
RAGGED_DOT_SECONDS = 2.0  # spent on lax.ragged_dot per direction, at least one call; on CPU it takes E times dense


def draw_group_sizes(groups: int, rows: int, routing: str, seed: int) -> np.ndarray:
    """int32[groups] with sum `rows`: each row picks its group by the routing's shares, which the seed draws.

    dirichlet: shares uniform on the simplex, from nearly none to ln(groups) + 0.6 times the mean: many tiny groups.
    zipf: share proportional to rank^-0.5, ranks shuffled. uniform: equal shares, equal sizes where they divide.
    Raises ValueError for another name.
    """
    rng = np.random.default_rng(seed)
    if routing == "uniform":
        return np.diff(np.arange(groups + 1) * rows // groups).astype(np.int32)
    if routing == "dirichlet":
        shares = rng.dirichlet(np.ones(groups))
    elif routing == "zipf":
        shares = rng.permutation((1.0 + np.arange(groups)) ** -0.5)
    else:
        raise ValueError(f"There is no routing {routing!r}: use one of {', '.join(ROUTINGS)}.")
    return rng.multinomial(rows, shares / shares.sum()).astype(np.int32)


def grouped_gemm_rows(
    groups: Sequence[int] = (8, 32, 64, 128),
    *,
    rows: int = 8192,
    width: int = 256,
    hidden: int = 512,
    dtype: str = "float32",
    routing: str = "dirichlet",
    seed: int = 0,
    repeats: int = 41,
    implementation: str = "auto",
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """One row of figures per number of groups and direction; `report` gets each as soon as it is measured.

    The products are [rows, width] x [groups, width, hidden] and its two gradients. Keys of a row:
    groups, rows, width, hidden, dtype, routing, seed, largest_group, implementation, device: what was measured;
    direction: "forward", "data_gradient" or "weight_gradient";
    milliseconds, gflops: median time of a call, and 2 * rows * width * hidden over it;
    dense_ratio: FLOP/s over those of one dense product of the same FLOPs; ragged_dot_speedup: time of
    `lax.ragged_dot` (or its gradient) over ours; max_abs_error: largest distance from the same product in float64.
    Raises ValueError for an unknown routing or implementation, or a count that is not positive.
    """
    if min(rows, width, hidden, repeats, *groups) < 1:
        raise ValueError("Groups, rows, width, hidden and repeats must all be at least 1.")
    chosen = resolve_implementation(implementation)
    results = []
    for num_groups in groups:
        sizes = draw_group_sizes(num_groups, rows, routing, seed)
        common = {
            "groups": num_groups, "rows": rows, "width": width, "hidden": hidden, "dtype": dtype, "routing": routing,
            "seed": seed, "largest_group": int(sizes.max()), "implementation": chosen,
            "device": jax.devices()[0].device_kind,
        }  # fmt: skip
        rng = np.random.default_rng(seed)
        lhs_RD, grad_RF, rhs_EDF = (
            jnp.asarray(rng.standard_normal(shape, np.float32), dtype)
            for shape in ((rows, width), (rows, hidden), (num_groups, width, hidden))
        )
        for direction in DIRECTIONS:
            row = common | _measure(direction, lhs_RD, grad_RF, rhs_EDF, sizes, repeats, implementation)
            results.append(row)
            report(row)
    return results


def _measure(
    direction: str,
    lhs_RD: Array,
    grad_RF: Array,
    rhs_EDF: Array,
    sizes: np.ndarray,
    repeats: int,
    implementation: str,
) -> dict[str, Any]:
    sizes_E = jnp.asarray(sizes)

    def ragged_dot(lhs_RD: Array, rhs_EDF: Array) -> Array:
        return lax.ragged_dot(lhs_RD, rhs_EDF, sizes_E)

    if direction == "forward":
        operands = (lhs_RD, rhs_EDF)
        ours = _Call(lambda x, w: grouped_gemm(x, w, sizes_E, implementation=implementation), *operands)
        dense = _Call(jnp.matmul, lhs_RD, rhs_EDF[0])
        ragged = _Call(ragged_dot, *operands)
        expected = grouped_gemm_reference(*operands, sizes)
    elif direction == "data_gradient":
        operands = (grad_RF, rhs_EDF)
        ours = _Call(
            lambda g, w: grouped_gemm(g, w, sizes_E, transpose_rhs=True, implementation=implementation), *operands
        )
        dense = _Call(lambda g, w: g @ w.T, grad_RF, rhs_EDF[0])
        ragged = _Call(lambda g, w, x: jax.vjp(lambda x: ragged_dot(x, w), x)[1](g)[0], *operands, lhs_RD)
        expected = grouped_gemm_reference(*operands, sizes, transpose_rhs=True)
    else:
        operands = (lhs_RD, grad_RF)
        ours = _Call(lambda x, g: grouped_gemm_weight_grad(x, g, sizes_E, implementation=implementation), *operands)
        dense = _Call(lambda x, g: x.T @ g, *operands)
        ragged = _Call(lambda x, g, w: jax.vjp(lambda w: ragged_dot(x, w), w)[1](g)[0], *operands, rhs_EDF)
        expected = grouped_gemm_weight_grad_reference(*operands, sizes)

    error = float(np.abs(np.asarray(ours.result, np.float64) - expected).max())
    seconds = _medians([ours, dense], ragged, repeats)
    flops = 2 * lhs_RD.shape[0] * rhs_EDF.shape[1] * rhs_EDF.shape[2]
    return {
        "direction": direction,
        "milliseconds": 1e3 * seconds[0],
        "gflops": flops / seconds[0] / 1e9,
        "dense_ratio": seconds[1] / seconds[0],
        "ragged_dot_speedup": seconds[2] / seconds[0],
        "max_abs_error": error,
    }


class _Call:
    """A compiled function that writes its result over its previous one. Made, it has run once, in `first_seconds`."""

    def __init__(self, function: Callable[..., Array], *operands: Array):
        shape = jax.eval_shape(function, *operands)
        program = jax.jit(lambda out, *operands: function(*operands), donate_argnums=0, keep_unused=True)
        self._operands = operands
        self.result = jnp.zeros(shape.shape, shape.dtype)
        self._program = program.lower(self.result, *operands).compile()
        self.first_seconds = self.seconds()

    def seconds(self) -> float:
        begin = time.perf_counter()
        self.result = jax.block_until_ready(self._program(self.result, *self._operands))
        return time.perf_counter() - begin


def _medians(calls: list[_Call], slow: _Call, repeats: int) -> list[float]:
    """Median seconds of each call, `slow` last, over turns in rotating order; `slow` sits out past its budget."""
    calls = [*calls, slow]
    seconds: list[list[float]] = [[] for _ in calls]
    if slow.first_seconds > RAGGED_DOT_SECONDS / 2:
        seconds[-1].append(slow.first_seconds)
    for turn in range(repeats):
        for n in ((turn + i) % len(calls) for i in range(len(calls))):
            spent = sum(seconds[n])
            if calls[n] is not slow or not spent or spent + seconds[n][-1] < RAGGED_DOT_SECONDS:
                seconds[n].append(calls[n].seconds())
    return [float(np.median(times)) for times in seconds]


HEADER = (
    f"{'groups':>6} {'rows':>7} {'largest':>7}  {'direction':<15} {'ms':>8} {'GFLOP/s':>8} {'of dense':>8} "
    f"{'vs ragged_dot':>13} {'error':>8}"
)


def table_line(row: dict[str, Any]) -> str:
    """A row of figures as text, under `HEADER`."""
    return (
        f"{row['groups']:>6} {row['rows']:>7} {row['largest_group']:>7}  {row['direction']:<15} "
        f"{row['milliseconds']:>8.2f} {row['gflops']:>8.1f} {row['dense_ratio']:>8.2f} "
        f"{row['ragged_dot_speedup']:>12.1f}x {row['max_abs_error']:>8.1e}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: a table on the screen, and the rows as a JSON list with --json. Bad input exits with code 2."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groups", default="8,32,64,128", help="numbers of groups, by commas (%(default)s)")
    parser.add_argument("--rows", type=int, default=8192, help="rows in all groups together (%(default)s)")
    parser.add_argument("--width", type=int, default=256, help="D, the width of a row (%(default)s)")
    parser.add_argument("--hidden", type=int, default=512, help="F, the width of a result (%(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--routing", choices=ROUTINGS, default="dirichlet", help="how sizes are drawn (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the values and the sizes (%(default)s)")
    parser.add_argument("--repeats", type=int, default=41, help="turns whose median counts (%(default)s)")
    parser.add_argument("--implementation", default="auto", help="of grouped_gemm (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here, a list of objects")
    options = parser.parse_args(arguments)
    try:
        groups = [int(number) for number in options.groups.split(",")]
    except ValueError:
        parser.error(f"--groups takes whole numbers separated by commas, such as 8,32, got {options.groups!r}.")
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json cannot write {options.json}: there is no folder {options.json.parent}.")
    try:
        chosen = resolve_implementation(options.implementation)
        print(
            f"grouped GEMM by {chosen!r} on {jax.devices()[0].device_kind}, jax {jax.__version__}: "
            f"D x F = {options.width} x {options.hidden}, {options.dtype}, {options.routing} routing, "
            f"seed {options.seed}\n{HEADER}"
        )
        rows = grouped_gemm_rows(
            groups,
            rows=options.rows,
            width=options.width,
            hidden=options.hidden,
            dtype=options.dtype,
            routing=options.routing,
            seed=options.seed,
            repeats=options.repeats,
            implementation=options.implementation,
            report=lambda row: print(table_line(row), flush=True),
        )
    except ValueError as error:
        parser.error(str(error))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
