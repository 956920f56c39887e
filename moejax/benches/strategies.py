"""Experts that stay against weights that travel: `parallel.strategy` resident and fsdp, the same model on 8 devices.

    one config, a few batch sizes --both strategies: compile--> bytes a token, peak bytes    --take turns--> tokens/s

    python -m moejax.bench strategies --json FILE                  # runs on simulated devices, eight layers, 64 experts
    python -m moejax.bench strategies --gpu h200 --json FILE       # configs/moe_8l_64e.yaml compiled for 8 absent GPUs

The 2.7x table of Olmo-core 3 with its cause: fsdp moves every weight three times a microbatch, so its bytes are those
of the model; resident experts move tokens, so their bytes are those of the batch. Bytes are read from the compiled
program's collectives, summed over the devices, and divided by the tokens of a step. `ratio` is the throughput over that
of fsdp at the same batch, the median over the turns. `meet_tokens`: tokens a step at which both are equally fast,
between the batches where the ratio passes 1, else where the lines through the two largest batches' times cross; None
if they do not. Resident tokens take transport all_to_all on a CPU, where the ragged exchange is spelled out.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from moejax import cli, config_io
from moejax.benches._interleave import interleaved
from moejax.config import Config
from moejax.errors import UserError
from moejax.hardware import hlo
from moejax.hardware.absent_gpu import absent_mesh, bytes_per_device
from moejax.hardware.collectives import bytes_per_step, read
from moejax.mesh import make_mesh, parse_mesh, prepare_devices
from moejax.parallel.step import TrainProgram

FULL = Path(__file__).resolve().parents[2] / "configs" / "moe_8l_64e.yaml"
# `moe_8l_64e` with every width a 64th (of 4096) and short sequences; heads and vocabulary in proportion.
SCALED = (
    "model.d_model=64",
    "model.n_layers=8",
    "model.n_dense_layers=1",
    "model.vocab_size=1568",
    "model.norm_placement=reordered",
    "model.attention.n_heads=4",
    "model.attention.n_kv_heads=1",
    "model.attention.head_dim=16",
    "model.moe.num_experts=64",
    "model.moe.hidden=64",
    "model.moe.shared_hidden=64",
    "model.moe.router.assignment=random",
    "precision.params=float32",
    "precision.compute=float32",
    "data.sequence_length=32",
    "parallel.pipeline.microbatches=1",
)
STRATEGIES = ("fsdp", "resident")  # the first is what ratios are over


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mesh", default="ep=8", help="devices; fsdp takes dp and ep as one (%(default)s)")
    parser.add_argument(
        "--tokens", type=cli.whole_numbers, default=(256, 1024, 4096), help="tokens a step (256,1024,4096)"
    )
    parser.add_argument("--turns", type=cli.whole_number, default=5, help="timed steps of each (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of tokens and weights (%(default)s)")
    parser.add_argument("--gpu", help="compile the full-size model for absent GPUs of this kind, and run nothing")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="fields of the configuration, as in training")


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows with strategy, tokens (a step), bytes_per_token, peak_bytes (a device), tokens_per_s, ratio, spread, ...

    With --gpu tokens_per_s, ratio, spread and meet_tokens are None. Raises UserError for sizes that do not fit.
    """
    if len(set(arguments.tokens)) < len(arguments.tokens):
        raise UserError("--tokens names a number twice; each is one pair of rows.")
    shape = parse_mesh(arguments.mesh)
    if arguments.gpu:
        programs = {s: program(arguments, s, None, absent_mesh(arguments.gpu, shape)) for s in STRATEGIES}
        return [measured(p, s, p.lower().compile()) for s, p in programs.items()]
    prepare_devices(shape.devices)
    mesh = make_mesh(shape)
    rows, seconds = [], {name: [] for name in STRATEGIES}
    for tokens in sorted(arguments.tokens):
        programs = {s: program(arguments, s, tokens, mesh) for s in STRATEGIES}
        steps = {s: compiled_step(p, arguments.seed) for s, p in programs.items()}
        timings = interleaved({s: call for s, (_, call) in steps.items()}, arguments.turns)
        for name, timing in timings.items():
            seconds[name].append(timing.seconds)
            figures = {"tokens_per_s": tokens / timing.seconds, "ratio": timing.ratio, "spread": timing.spread}
            rows.append(measured(programs[name], name, steps[name][0]) | figures)
    meet = meeting(sorted(arguments.tokens), seconds["fsdp"], seconds["resident"])
    return [row | {"meet_tokens": meet, "turns": arguments.turns, "seed": arguments.seed} for row in rows]


def program(arguments: argparse.Namespace, strategy: str, tokens: int | None, mesh: Mesh) -> TrainProgram:
    settings = [f"parallel.strategy={strategy}", f"parallel.mesh='{arguments.mesh}'", *arguments.overrides]
    if arguments.gpu:
        return TrainProgram(config_io.load(str(FULL), settings), mesh)
    settings.append(f"train.batch_tokens={tokens}")
    if strategy == "resident":
        settings.insert(0, "parallel.experts.transport=all_to_all")
    return TrainProgram(config_io.load(None, [*SCALED, f"train.seed={arguments.seed}", *settings]), mesh)


def measured(program: TrainProgram, strategy: str, compiled: Any) -> dict[str, Any]:
    """What the compiled step says without being run."""
    config, devices = program.config, program.mesh.size
    shares = hlo.switch_shares(program.branch_shares())
    sent = bytes_per_step(read(compiled.as_text(), dict(program.mesh.shape), shares=shares)) * devices
    memory = bytes_per_device(compiled)
    held = memory["arguments"] + memory["outputs"] - memory["aliased"] + memory["temporaries"]
    return {
        "strategy": strategy,
        "tokens": config.train.batch_tokens,
        "bytes_per_token": sent / config.train.batch_tokens,
        "peak_bytes": memory["peak"] or held,
        "tokens_per_s": None,
        "ratio": None,
        "spread": None,
        "transport": program.transport.name,
        "microbatches": config.parallel.pipeline.microbatches,
        "devices": devices,
        "experts": config.model.moe.num_experts,
        "meet_tokens": None,
    }


def compiled_step(program: TrainProgram, seed: int) -> tuple[Any, Callable[[], Any]]:
    """The compiled step, and a call that takes one, optimizer included, from where the one before left off."""
    compiled = program.lower().compile()
    box, batch = [program.init()], program.place_batch(random_batch(program.config, seed))

    def call() -> Any:
        box[0], metrics = compiled(box[0], batch)
        return metrics.loss

    return compiled, call


def random_batch(config: Config, seed: int) -> dict[str, np.ndarray]:
    length = config.data.sequence_length
    ids = np.random.default_rng(seed).integers(
        0, config.model.vocab_size, (config.train.batch_tokens // length, length + 1)
    )
    zeros = np.zeros((len(ids), length), np.int32)
    return {
        "tokens": ids[:, :-1],
        "labels": ids[:, 1:],
        "segment_ids": zeros,
        "positions": zeros + np.arange(length, dtype=np.int32),
    }


def meeting(tokens: Sequence[int], fsdp: Sequence[float], resident: Sequence[float]) -> float | None:
    """Tokens at which both take the same seconds; see the module. None for fewer than two batches."""
    lead = [f - r for f, r in zip(fsdp, resident, strict=True)]
    pairs = list(zip(range(len(tokens) - 1), range(1, len(tokens)), strict=True))
    passing = [(a, b) for a, b in pairs if lead[a] > 0 >= lead[b]]
    if not pairs:
        return None
    a, b = passing[0] if passing else pairs[-1]
    slope = (lead[b] - lead[a]) / (tokens[b] - tokens[a])
    crossing = tokens[a] - lead[a] / slope if slope else None
    return crossing if crossing is not None and slope < 0 and crossing > 0 else None
