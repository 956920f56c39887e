"""Measures the grouped GEMM against one dense product of equal FLOPs and against other people's, in one run.

    seed --> values, group sizes --> per direction: ours, dense, the others, in turn --> medians --> ratios, error

    python -m pallas_kernels.bench                                   # 8, 32, 64, 128 groups over 8,192 rows, 256 x 512
    python -m pallas_kernels.bench --shapes all --json benchmarks/results/h200-grouped-gemm.json       # on a GPU
    python -m pallas_kernels.bench --groups 64 --dtype bfloat16 --routing zipf --json rows.json
    python -m pallas_kernels.bench --autotune                        # on a GPU: fills its table in pallas_kernels/tiles

Needs jax and numpy only, and runs on whatever device jax finds. Ratios are of medians over turns in which all take
each other's place in line, since machines are shared and clocks move; absolute figures are for orientation.
Inputs are random, never zeros (time depends on values on GPU), and named by their seed.

Every call writes into the buffer of its previous call (donation), as a training step does with its state. Otherwise the
operating system would be measured: a fresh 64 MiB result, the weight gradient of 128 experts, costs 19 to 29 ms of page
faults here, where filling it costs 2 ms and the dense product 11 ms (2 cores, 2026-11).
"""

import argparse
import datetime
import functools
import importlib.util
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
ROUTINGS = ("dirichlet", "zipf", "uniform", "learned")


class Shape(NamedTuple):
    """One of a layer's two grouped products on a device: [rows, width] x [groups, width, hidden]."""

    groups: int
    rows: int
    width: int
    hidden: int


# Rows: tokens of a microbatch times experts per token, what a device has at balance. "up_gate" is D x 2F, "down" F x D.
# Sources: configs/olmoe_1b_7b.yaml on one GPU and over ep=8, moe_8l_64e.yaml and medium_128e.yaml over ep=8.
SHAPES = {
    "olmoe-1b-7b": {"up_gate": Shape(64, 32_768, 2048, 2048), "down": Shape(64, 32_768, 1024, 2048)},
    "olmoe-1b-7b-ep8": {"up_gate": Shape(8, 32_768, 2048, 2048), "down": Shape(8, 32_768, 1024, 2048)},
    "moe-8l-64e-ep8": {"up_gate": Shape(8, 65_536, 4096, 8192), "down": Shape(8, 65_536, 4096, 4096)},
    "medium-128e-ep8": {"up_gate": Shape(16, 65_536, 3072, 6144), "down": Shape(16, 65_536, 3072, 3072)},
}
CHECKED_GROUPS = 2  # an error is looked for in the largest groups, and there in so many rows or columns
CHECKED_LINES = 256
PEAK_WIDTH = {"cpu": 1024, "gpu": 8192}  # of the square product whose rate counts as the dense peak
RAGGED_DOT_SECONDS = 2.0  # spent on lax.ragged_dot per direction, at least one call; on CPU it takes E times dense


def draw_group_sizes(
    groups: int, rows: int, routing: str, seed: int, shares: Sequence[float] | None = None
) -> np.ndarray:
    """int32[groups] with sum `rows`: each row picks its group by the routing's shares, which the seed draws.

    dirichlet: shares uniform on the simplex, from nearly none to ln(groups) + 0.6 times the mean: many tiny groups.
    zipf: share proportional to rank^-0.5, ranks shuffled. uniform: equal shares, equal sizes where they divide.
    learned: `shares` of a trained router's experts, of any scale; the seed says which run of `groups` of them is ours.
    Raises ValueError for another name, or for shares that are fewer than the groups or not counts.
    """
    rng = np.random.default_rng(seed)
    if routing == "uniform":
        return np.diff(np.arange(groups + 1) * rows // groups).astype(np.int32)
    if routing == "dirichlet":
        odds = rng.dirichlet(np.ones(groups))
    elif routing == "zipf":
        odds = rng.permutation((1.0 + np.arange(groups)) ** -0.5)
    elif routing == "learned":
        if shares is None or len(shares) < groups or min(shares) < 0 or not sum(shares) > 0:
            raise ValueError(f"Learned routing takes the loads of {groups} or more experts: give a file with --shares.")
        odds = np.roll(np.asarray(shares, np.float64), -rng.integers(len(shares)))[:groups] + 1e-12
    else:
        raise ValueError(f"There is no routing {routing!r}: use one of {', '.join(ROUTINGS)}.")
    return rng.multinomial(rows, odds / odds.sum()).astype(np.int32)


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
    shares: Sequence[float] | None = None,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """One row of figures per number of groups and direction; `report` gets each as soon as it is measured.

    The products are [rows, width] x [groups, width, hidden] and its two gradients. Keys of a row:
    groups, rows, width, hidden, dtype, routing, seed, largest_group, implementation, device: what was measured;
    direction: "forward", "data_gradient" or "weight_gradient";
    milliseconds, gflops: median time of a call, and 2 * rows * width * hidden over it;
    dense_ratio: FLOP/s over those of one dense product of the same FLOPs; peak_share: over those of a large square
    product of the same dtype in this run; ragged_dot_speedup, tokamax_speedup: time of `lax.ragged_dot` and of tokamax
    (or their gradient) over ours, the latter None where tokamax is not installed; max_abs_error: largest distance from
    the same product in float64, of the two largest groups and 256 rows or columns of each.
    Raises ValueError for an unknown routing or implementation, or a count that is not positive.
    """
    if min(rows, width, hidden, repeats, *groups) < 1:
        raise ValueError("Groups, rows, width, hidden and repeats must all be at least 1.")
    chosen = resolve_implementation(implementation, dtype=dtype, widths=(width, hidden))
    peak = _dense_peak(dtype, repeats)
    results = []
    for num_groups in groups:
        sizes = draw_group_sizes(num_groups, rows, routing, seed, shares)
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
            row["peak_share"] = row["gflops"] / peak
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

    def by(implementation: str) -> _Call:
        if direction == "weight_gradient":
            return _Call(
                lambda x, g: grouped_gemm_weight_grad(x, g, sizes_E, implementation=implementation), lhs_RD, grad_RF
            )
        transpose = direction == "data_gradient"
        product = functools.partial(grouped_gemm, transpose_rhs=transpose, implementation=implementation)
        return _Call(lambda x, w: product(x, w, sizes_E), grad_RF if transpose else lhs_RD, rhs_EDF)

    ours = by(implementation)
    if direction == "forward":
        dense = _Call(jnp.matmul, lhs_RD, rhs_EDF[0])
        ragged = _Call(ragged_dot, lhs_RD, rhs_EDF)
    elif direction == "data_gradient":
        dense = _Call(lambda g, w: g @ w.T, grad_RF, rhs_EDF[0])
        ragged = _Call(lambda g, w, x: jax.vjp(lambda x: ragged_dot(x, w), x)[1](g)[0], grad_RF, rhs_EDF, lhs_RD)
    else:
        dense = _Call(lambda x, g: x.T @ g, lhs_RD, grad_RF)
        ragged = _Call(lambda x, g, w: jax.vjp(lambda w: ragged_dot(x, w), w)[1](g)[0], lhs_RD, grad_RF, rhs_EDF)
    others = [by("tokamax")] if importlib.util.find_spec("tokamax") else []

    error = _error(direction, ours.result, lhs_RD, grad_RF, rhs_EDF, sizes)
    seconds = _medians([ours, dense, *others], ragged, repeats)
    flops = 2 * lhs_RD.shape[0] * rhs_EDF.shape[1] * rhs_EDF.shape[2]
    return {
        "direction": direction,
        "milliseconds": 1e3 * seconds[0],
        "gflops": flops / seconds[0] / 1e9,
        "dense_ratio": seconds[1] / seconds[0],
        "ragged_dot_speedup": seconds[-1] / seconds[0],
        "tokamax_speedup": seconds[2] / seconds[0] if others else None,
        "max_abs_error": error,
    }


def _error(direction: str, result: Array, lhs_RD: Array, grad_RF: Array, rhs_EDF: Array, sizes: np.ndarray) -> float:
    """Largest distance from float64, of `CHECKED_LINES` rows (columns, of a weight gradient) of the largest groups."""
    ends, worst = np.cumsum(sizes), 0.0
    for group in np.argsort(-sizes, kind="stable")[:CHECKED_GROUPS].tolist():
        begin, end = int(ends[group] - sizes[group]), int(ends[group])
        if direction == "weight_gradient":
            lines = slice(0, CHECKED_LINES)
            factors = (lhs_RD[begin:end, lines], grad_RF[begin:end])
            expected = grouped_gemm_weight_grad_reference(*factors, [end - begin])
            actual = result[group : group + 1, lines]
        else:
            end, transpose = min(end, begin + CHECKED_LINES), direction == "data_gradient"
            rows, weight = (grad_RF if transpose else lhs_RD)[begin:end], rhs_EDF[group : group + 1]
            expected = grouped_gemm_reference(rows, weight, [end - begin], transpose_rhs=transpose)
            actual = result[begin:end]
        worst = max(worst, float(np.abs(np.asarray(actual, np.float64) - expected).max(initial=0)))
    return worst


def _dense_peak(dtype: str, repeats: int) -> float:
    """GFLOP/s of a large square product, the median of a few."""
    width = PEAK_WIDTH.get(jax.default_backend(), 4096)
    values = np.random.default_rng(0).standard_normal((2, width, width), np.float32)
    call = _Call(jnp.matmul, *(jnp.asarray(x, dtype) for x in values))
    return 2 * width**3 / float(np.median([call.seconds() for _ in range(min(repeats, 9))])) / 1e9


def machine() -> dict[str, Any]:
    """What measured: device, driver's version if it tells, jax, date."""
    device = jax.devices()[0]
    return {
        "device": f"{len(jax.devices())} x {device.device_kind}",
        "platform_version": " ".join(str(getattr(device.client, "platform_version", "")).split()),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
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
    f"{'of peak':>7} {'vs ragged_dot':>13} {'vs tokamax':>10} {'error':>8}"
)


def table_line(row: dict[str, Any]) -> str:
    """A row of figures as text, under `HEADER`."""
    tokamax = "" if row["tokamax_speedup"] is None else f"{row['tokamax_speedup']:.2f}x"
    return (
        f"{row['groups']:>6} {row['rows']:>7} {row['largest_group']:>7}  {row['direction']:<15} "
        f"{row['milliseconds']:>8.2f} {row['gflops']:>8.1f} {row['dense_ratio']:>8.2f} "
        f"{row['peak_share']:>7.2f} {row['ragged_dot_speedup']:>12.1f}x {tokamax:>10} {row['max_abs_error']:>8.1e}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: a table on the screen, machine and rows as JSON with --json. Bad input exits with code 2."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groups", default="8,32,64,128", help="numbers of groups, by commas (%(default)s)")
    parser.add_argument("--rows", type=int, default=8192, help="rows in all groups together (%(default)s)")
    parser.add_argument("--width", type=int, default=256, help="D, the width of a row (%(default)s)")
    parser.add_argument("--hidden", type=int, default=512, help="F, the width of a result (%(default)s)")
    parser.add_argument("--shapes", help=f"of models, by commas: all, {', '.join(SHAPES)}")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="(float32; bfloat16 with --shapes)")
    parser.add_argument("--routing", choices=ROUTINGS, help="how sizes fall (dirichlet; with --shapes uniform, zipf)")
    parser.add_argument("--shares", type=Path, metavar="FILE", help="JSON list of experts' loads, for learned routing")
    parser.add_argument("--seed", type=int, default=0, help="of the values and the sizes (%(default)s)")
    parser.add_argument("--repeats", type=int, default=41, help="turns whose median counts (%(default)s)")
    parser.add_argument("--implementation", default="auto", help="of grouped_gemm (%(default)s)")
    parser.add_argument("--autotune", action="store_true", help="time tiles on this GPU and save the best ones")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the machine and the rows here")
    options = parser.parse_args(arguments)
    try:
        groups = [int(number) for number in options.groups.split(",")]
    except ValueError:
        parser.error(f"--groups takes whole numbers separated by commas, such as 8,32, got {options.groups!r}.")
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json cannot write {options.json}: there is no folder {options.json.parent}.")
    names = list(SHAPES) if options.shapes == "all" else (options.shapes or "").split(",")
    unknown = [name for name in names if options.shapes and name not in SHAPES]
    if unknown:
        parser.error(f"--shapes knows {', '.join(SHAPES)} and all, not {unknown[0]!r}.")
    try:
        shares = json.loads(options.shares.read_text()) if options.shares else None
    except (OSError, ValueError) as error:
        parser.error(f"--shares cannot read a JSON list of loads from {options.shares}: {error}.")
    try:
        if options.autotune:
            from pallas_kernels.autotune import autotune

            path = autotune(SHAPES, options.seed, report=lambda line: print(line, flush=True))
            print(f"written: {path}")
            return 0
        dtype = options.dtype or ("bfloat16" if options.shapes else "float32")
        routings = [options.routing] if options.routing else ["dirichlet"]
        if options.shapes and not options.routing:
            routings = ["uniform", "zipf"] + (["learned"] if shares else [])
        common: dict[str, Any] = {name: getattr(options, name) for name in ("seed", "repeats", "implementation")}
        common |= {"dtype": dtype, "shares": shares}
        plan = [("", "", Shape(n, options.rows, options.width, options.hidden)) for n in groups]
        if options.shapes:
            plan = [(name, product, shape) for name in names for product, shape in SHAPES[name].items()]
        rows: list[dict[str, Any]] = []
        for routing in routings:
            for name, product, shape in plan:
                labels = {"shape": name, "product": product} if name else {}
                rows += _print_rows(labels, shape, routing, not rows, common)
    except ValueError as error:
        parser.error(str(error))
    if options.json is not None:
        result = {"bench": "grouped-gemm", "machine": machine(), "rows": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _print_rows(
    names: dict[str, str], shape: Shape, routing: str, first: bool, common: dict[str, Any]
) -> list[dict[str, Any]]:
    widths = (shape.width, shape.hidden)
    if first or names:
        chosen = resolve_implementation(common["implementation"], dtype=common["dtype"], widths=widths)
        print(
            f"{' '.join(names.values())}{': ' if names else ''}grouped GEMM by {chosen!r} on "
            f"{jax.devices()[0].device_kind}, jax {jax.__version__}: D x F = {shape.width} x {shape.hidden}, "
            f"{common['dtype']}, {routing} routing, seed {common['seed']}\n{HEADER}"
        )
    rows = grouped_gemm_rows(
        [shape.groups],
        rows=shape.rows,
        width=shape.width,
        hidden=shape.hidden,
        routing=routing,
        report=lambda row: print(table_line(row), flush=True),
        **common,
    )
    return [names | row for row in rows]


if __name__ == "__main__":
    sys.exit(main())
