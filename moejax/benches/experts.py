"""Tokens per second of forward and backward as the number of experts grows, active parameters held equal.

The headline of a mixture of experts: the same work per token, whatever the number of experts. Each row is one model,
all with the same tokens and K experts per token, on one device, through the gradients of the real train step (losses,
router statistics and fp32 accumulation included, optimizer not). The models take turns; `ratio` is the throughput over
that of the first, the median over the turns, and `spread` the distance of the quartiles of the time, as a share of it.
Tokens and weights are random, by seed.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax import cli, config_io
from moejax.accounting import flops_per_token, parameter_counts
from moejax.benches._interleave import interleaved
from moejax.config import Config
from moejax.errors import UserError
from moejax.mesh import MeshShape, make_mesh, prepare_devices
from moejax.parallel.step import TrainProgram

# Wide enough that the experts are half of the work, small enough that a step takes seconds on two cores.
SHAPE = (
    "model.d_model=256",
    "model.n_layers=4",
    "model.vocab_size=4096",
    "model.attention.n_heads=8",
    "model.attention.n_kv_heads=2",
    "model.moe.hidden=256",
    "model.moe.shared_hidden=256",
    "precision.params=float32",
    "precision.compute=float32",
    "data.sequence_length=256",
    "parallel.pipeline.microbatches=1",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--experts", type=cli.whole_numbers, default=(8, 32, 128), help="numbers of experts, e.g. 8,32 (8,32,128)"
    )
    parser.add_argument("--tokens", type=cli.whole_number, default=16384, help="tokens a step (%(default)s)")
    parser.add_argument("--turns", type=cli.whole_number, default=7, help="timed steps of each (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of tokens and weights (%(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="fields of the configuration, as in training")


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    if len(set(arguments.experts)) < len(arguments.experts):
        raise UserError("--experts names a number twice; each is one row.")
    prepare_devices(1)  # memory as training has it: fresh pages would cost a third of the time
    configs = {}
    for experts in arguments.experts:
        own = (f"model.moe.num_experts={experts}", f"train.batch_tokens={arguments.tokens}")
        configs[experts] = config_io.load(None, [*SHAPE, f"train.seed={arguments.seed}", *arguments.overrides, *own])
    timings = interleaved({str(n): step_of(config, arguments.seed) for n, config in configs.items()}, arguments.turns)
    rows = []
    for experts, config in configs.items():
        counts, timing = parameter_counts(config.model), timings[str(experts)]
        tokens_per_s = arguments.tokens / timing.seconds
        flops = flops_per_token(config.model, config.data.sequence_length).total
        rows.append(
            {
                "experts": experts,
                "active_params": counts.active,
                "total_params": counts.total,
                "tokens_per_s": tokens_per_s,
                "ratio": timing.ratio,
                "spread": timing.spread,
                "model_gflops_per_s": flops * tokens_per_s / 1e9,
                "top_k": config.model.moe.top_k,
                "tokens": arguments.tokens,
                "turns": arguments.turns,
                "seed": arguments.seed,
            }
        )
    return rows


def step_of(config: Config, seed: int) -> Callable[[], Any]:
    """A call that runs forward and backward of one batch, over the gradients of the call before.

    The old gradients are donated, as a training step's buffers are: fresh memory would cost page faults that grow with
    the number of experts, and training does not pay them.
    """
    program = TrainProgram(config, make_mesh(MeshShape(), jax.devices()[:1]))
    rng = np.random.default_rng(seed)
    length = config.data.sequence_length
    ids = rng.integers(0, config.model.vocab_size, (config.train.batch_tokens // length, length + 1))
    batch = program.place_batch(
        {
            "tokens": ids[:, :-1],
            "labels": ids[:, 1:],
            "segment_ids": np.zeros((len(ids), length), np.int32),
            "positions": np.broadcast_to(np.arange(length), (len(ids), length)),
        }
    )
    params = program.init().params
    # placed as the step returns them, or the second call would compile it again
    gradients = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32, device=p.sharding), params)
    step = jax.jit(lambda old, *rest: program.gradients(*rest), donate_argnums=0, keep_unused=True)
    key = jax.random.key(seed)
    box = [gradients]

    def call() -> Any:
        box[0], totals, _ = step(box[0], params, batch, key)
        return box[0], totals

    return call
