"""Pipeline schedules measured: step time, memory and bubble of each, with what its table says, on simulated devices.

A row per schedule, stash and mode. The steps take turns. `bubble_table` is the table's, in step, with an op of one of v
chunks costing 1/v. `bubble_measured` compares two lengths of the same pipeline: with T(M) the time of M microbatches, M
more cost T(2M) - T(M) when the pipeline is full, and what is above M times that rate is the fill and drain:
1 - 2 (T(2M) - T(M)) / T(2M), a figure for 2M microbatches. On simulated devices the idle stages of the `switch` mode
lend their core to the others, so its bubble is measured on real devices only; the `masked` mode works through it and
shows it anywhere. `recompute_flops_ratio`: products executed over those of a step that keeps all (forward 1, each
gradient 1).
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax import config_io
from moejax.benches._interleave import interleaved
from moejax.config import Config, Recompute, Stash
from moejax.errors import UserError
from moejax.mesh import make_mesh, parse_mesh, prepare_devices
from moejax.parallel.schedules import Op, Schedule, bubble
from moejax.parallel.step import TrainProgram

SHAPE = (
    "model.d_model=128",
    "model.n_dense_layers=0",
    "model.vocab_size=512",
    "model.moe.num_experts=4",
    "model.moe.top_k=2",
    "precision.params=float32",
    "precision.compute=float32",
    "data.sequence_length=128",
)
SCHEDULES = "gpipe,1f1b,1f1b_lockstep,interleaved_1f1b,zero_bubble,zero_bubble_v"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schedules", default=SCHEDULES, help="comma between (%(default)s)")
    parser.add_argument("--stashes", default="inputs,residuals", help="inputs, residuals, named (%(default)s)")
    parser.add_argument("--modes", default="switch,masked", help="switch, masked (%(default)s)")
    parser.add_argument("--stages", type=int, default=4, help="pipeline stages (%(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="even, 2M in the row (%(default)s)")
    parser.add_argument("--turns", type=int, default=5, help="timed steps of each; 0: sizes only (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of tokens and weights (%(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="fields of the configuration, as in training")


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    if arguments.microbatches < 2 or arguments.microbatches % 2:
        raise UserError(f"--microbatches={arguments.microbatches} must be even: half of them are timed too.")
    prepare_devices(arguments.stages)
    cases = [
        (schedule, stash, mode)
        for schedule in arguments.schedules.split(",")
        for stash in arguments.stashes.split(",")
        for mode in arguments.modes.split(",")
    ]
    steps: dict[str, Callable[[], Any]] = {}
    rows = []
    for schedule, stash, mode in cases:
        config = case_config(arguments, schedule, stash, mode)
        program = TrainProgram(config, make_mesh(parse_mesh(config.parallel.mesh)))
        halves = {}
        for microbatches in (arguments.microbatches, arguments.microbatches // 2):
            compiled, call = compiled_gradients(program, microbatches, arguments.seed)
            halves[microbatches] = compiled
            if arguments.turns:
                steps[f"{schedule},{stash},{mode},{microbatches}"] = call
        chunks = program.schedule.chunks
        rows.append(
            {
                "schedule": schedule,
                "stash": stash,
                "mode": mode,
                "stages": arguments.stages,
                "chunks": chunks,
                "microbatches": arguments.microbatches,
                "bubble_table": bubble(program.schedule, op_costs(program.schedule, stash)),
                "temp_bytes": halves[arguments.microbatches].memory_analysis().temp_size_in_bytes,
                "temp_bytes_half": halves[arguments.microbatches // 2].memory_analysis().temp_size_in_bytes,
                "recompute_flops_ratio": recompute_flops_ratio(program.schedule, config),
                "seed": arguments.seed,
            }
        )
    if arguments.turns:
        timings = interleaved(steps, arguments.turns)
        for row in rows:
            name = f"{row['schedule']},{row['stash']},{row['mode']}"
            whole, half = (timings[f"{name},{m}"] for m in (arguments.microbatches, arguments.microbatches // 2))
            row["seconds"], row["spread"] = whole.seconds, whole.spread
            row["bubble_measured"] = 1.0 - 2.0 * (whole.seconds - half.seconds) / whole.seconds
    return rows


def case_config(arguments: argparse.Namespace, schedule: str, stash: str, mode: str) -> Config:
    length = next((o.split("=")[1] for o in arguments.overrides if o.startswith("data.sequence_length=")), "128")
    return config_io.load(
        None,
        [
            *SHAPE,
            f"model.n_layers={2 * arguments.stages}",
            *arguments.overrides,
            f"parallel.mesh='pp={arguments.stages}'",
            f"parallel.pipeline.schedule={schedule}",
            f"parallel.pipeline.stash={stash}",
            f"parallel.pipeline.mode={mode}",
            f"parallel.pipeline.microbatches={arguments.microbatches}",
            f"train.batch_tokens={int(length) * arguments.microbatches}",
            f"train.seed={arguments.seed}",
        ],
    )


def compiled_gradients(program: TrainProgram, microbatches: int, seed: int) -> tuple[Any, Callable[[], Any]]:
    """Forward and backward of one batch, compiled, and a call that runs it over the gradients of the call before."""
    config = program.config
    length, rng = config.data.sequence_length, np.random.default_rng(seed)
    ids = rng.integers(0, config.model.vocab_size, (microbatches, length + 1))
    batch = program.place_batch(
        {
            "tokens": ids[:, :-1],
            "labels": ids[:, 1:],
            "segment_ids": np.zeros((len(ids), length), np.int32),
            "positions": np.broadcast_to(np.arange(length), (len(ids), length)),
        }
    )
    params = program.init().params
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), program.abstract)
    zeros = jax.device_put(zeros, program.named(program.zero_specs))
    step = jax.jit(lambda old, *rest: program.gradients(*rest), donate_argnums=0, keep_unused=True)
    compiled = step.lower(zeros, params, batch, jax.random.key(seed)).compile()
    box = [zeros]

    def call() -> Any:
        box[0], totals, _ = compiled(box[0], params, batch, jax.random.key(seed))
        return box[0], totals

    return compiled, call


def op_costs(schedule: Schedule, stash: str) -> dict[Op, float]:
    """Products of each op: forward 1, each gradient 1, and the forward again where only the input was kept."""
    again = stash == Stash.inputs
    costs = {
        Op.FORWARD: 1.0,
        Op.BACKWARD: 2.0 + again,
        Op.BACKWARD_INPUT: 1.0 + again,
        Op.BACKWARD_WEIGHT: 1.0 + 2.0 * again,  # the data gradients of the layers above its own are needed once more
    }
    return {op: cost / schedule.chunks for op, cost in costs.items()}


def recompute_flops_ratio(schedule: Schedule, config: Config) -> float:
    """Products executed over forward and backward once, blocks alone."""
    stash, recompute = config.parallel.pipeline.stash, config.parallel.recompute
    virtual, split = schedule.virtual_stages, bool((schedule.op == Op.BACKWARD_WEIGHT).any())
    forward, backward = 1.0, 2.0
    if stash == Stash.inputs or virtual == 1:
        forward = (virtual - 1) / virtual  # the last forward runs inside the backward alone
        backward += 3.0 if split else 1.0
    if stash == Stash.named or recompute != Recompute.none:
        backward += 2.0 if split and stash == Stash.inputs else 1.0
    if recompute == Recompute.full:
        backward += 1.0
    return (forward + backward) / 3.0
