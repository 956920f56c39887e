"""All transports on the same routing: bytes, memory, time, and the distance from the one that sends nothing.

    seed, routing --> x, ids, weights of every device --each transport: forward, backward of an expert layer--> rows

    python -m moejax.bench dispatch --ep 8 --json FILE
    python -m moejax.bench dispatch --ep 8 --routing learned --run runs/tiny        # loads as that run's routers had
    them

A routing is a load of the experts: `balanced` even, `zipf` by rank^-1 (ranks shuffled by the seed), `one-hot` every
token to the same K experts, `learned` as the least even layer of a run's last step. Tokens draw K different experts by
it. Transports take turns, and times are medians, since machines are shared. On CPU devices are simulated and the ragged
exchange is spelled out with an all-gather (`moe/collectives.py`): seconds there rank nothing, bytes and rows do not
change.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from moejax.config import (
    Config,
    DataConfig,
    Dtype,
    ExpertsConfig,
    ModelConfig,
    MoEConfig,
    Overflow,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    TrainConfig,
    Transport,
    validate,
)
from moejax.errors import UserError
from moejax.mesh import MeshShape, make_mesh, prepare_devices
from moejax.moe.choose import make_transport, options
from moejax.moe.dispatch import Transport as TransportObject
from moejax.moe.exchange import through_experts
from moejax.moe.layer import ExpertWeights, expert_mlps
from moejax.moe.local import Local

ROUTINGS = ("balanced", "zipf", "one-hot", "learned")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ep", type=int, default=8, help="devices that share out the experts (default: 8)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each device (default: 512)")
    parser.add_argument("--experts", type=int, default=32, help="experts in all (default: 32)")
    parser.add_argument("--top-k", type=int, default=4, help="experts per token (default: 4)")
    parser.add_argument("--width", type=int, default=128, help="model width (default: 128)")
    parser.add_argument("--hidden", type=int, default=128, help="hidden width of an expert (default: 128)")
    parser.add_argument("--routing", nargs="+", choices=ROUTINGS, help="default: all, learned only with --run")
    parser.add_argument("--run", metavar="RUN", help="run folder whose last step gives the learned load")
    parser.add_argument("--capacity-factor", type=float, default=1.25, help="buffer rows over tokens * top-k (1.25)")
    parser.add_argument("--devices-per-node", type=int, default=None, help="for hierarchical (default: half of --ep)")
    parser.add_argument("--repeat", type=int, default=5, help="timed calls of each (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="names the inputs (default: 0)")


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows with transport, routing, bytes_sent_per_device (the busiest device's, forward and backward), buffer_rows,
    rounds, temp_bytes (of the compiled program, a device), seconds (median) and max_abs_error (of outputs and gradients
    of x).

    Raises UserError for sizes that do not fit together. A transport outside its limits has no row.
    """
    config = as_config(arguments)
    prepare_devices(arguments.ep)
    shape = MeshShape(ep=arguments.ep)
    mesh = make_mesh(shape)
    routings = arguments.routing or [name for name in ROUTINGS if name != "learned" or arguments.run]
    fitting = [Transport(option.transport) for option in options(config, shape) if option.refusal is None]
    programs = {name: compile_layer(make_transport(name, config, shape), mesh, arguments) for name in fitting}
    rows = []
    for routing in routings:
        inputs = make_inputs(arguments, expert_load(arguments, routing))
        expected = reference(inputs, arguments.experts)
        seconds, answers = take_turns(programs, inputs, arguments.repeat)
        for name, compiled in programs.items():
            transport = make_transport(name, config, shape)
            y, dx, rounds = answers[name]
            errors = [np.max(np.abs(np.asarray(a, np.float64) - b)) for a, b in zip((y, dx), expected, strict=True)]
            rows.append(
                {
                    "transport": name.value,
                    "routing": routing,
                    "bytes_sent_per_device": sent_bytes(transport, inputs[1], arguments, int(rounds)),
                    "buffer_rows": transport.buffer_rows(arguments.tokens, arguments.top_k, arguments.experts),
                    "rounds": int(rounds),
                    "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
                    "seconds": statistics.median(seconds[name]),
                    "max_abs_error": float(max(errors)),
                }
            )
    return rows


def as_config(arguments: argparse.Namespace) -> Config:
    """The arguments as the configuration that would run such a layer, checked like any other."""
    ep, tokens = arguments.ep, arguments.tokens
    if ep < 1 or tokens < 1 or arguments.repeat < 1:
        raise UserError(f"--ep {ep}, --tokens {tokens} and --repeat {arguments.repeat} must be at least 1.")
    if arguments.experts % ep:
        raise UserError(f"--ep {ep} does not divide --experts {arguments.experts}.")
    moe = MoEConfig(num_experts=arguments.experts, top_k=arguments.top_k, hidden=arguments.hidden)
    per_node = arguments.devices_per_node or max(1, ep // 2)
    experts = ExpertsConfig(
        capacity_factor=arguments.capacity_factor, devices_per_node=per_node, overflow=Overflow.exact
    )
    return validate(
        Config(
            model=ModelConfig(d_model=arguments.width, moe=moe),
            parallel=ParallelConfig(experts=experts, pipeline=PipelineConfig(microbatches=1)),
            precision=PrecisionConfig(Dtype.float32, Dtype.float32),
            data=DataConfig(sequence_length=tokens),
            train=TrainConfig(batch_tokens=ep * tokens),
        )
    )


def expert_load(arguments: argparse.Namespace, routing: str) -> np.ndarray:
    """fp64[E], summing to one."""
    experts = arguments.experts
    if routing == "zipf":
        load = np.random.default_rng(arguments.seed).permutation(1.0 / np.arange(1, experts + 1))
    elif routing == "one-hot":
        load = (np.arange(experts) < arguments.top_k).astype(float)
    elif routing == "learned":
        load = learned_load(arguments.run, experts)
    else:
        load = np.ones(experts)
    return load / load.sum()


def learned_load(run: str | None, experts: int) -> np.ndarray:
    """Routes per expert of the least even layer, from the last step in a run's metrics.jsonl."""
    if run is None:
        raise UserError("--routing learned needs --run, the folder of a run whose routers have learned.")
    path = Path(run) / "metrics.jsonl"
    try:
        records = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"The metrics of the run cannot be read from {path}: {error}.") from None
    counts = [record["expert_counts"] for record in records if "expert_counts" in record]
    if not counts:
        raise UserError(f"{path} holds no expert_counts; the run has taken no step yet, or has no experts.")
    load_LE = np.asarray(counts[-1], float)
    if load_LE.shape[1] != experts:
        raise UserError(f"The run in {run} has {load_LE.shape[1]} experts; say --experts {load_LE.shape[1]}.")
    return load_LE[np.argmax(load_LE.max(1) / load_LE.mean(1))]


def make_inputs(arguments: argparse.Namespace, load_E: np.ndarray) -> tuple[Any, ...]:
    """x, ids, weights, expert weights and the cotangent, of all devices, fp32."""
    rng = np.random.default_rng(arguments.seed)
    tokens, k = arguments.ep * arguments.tokens, arguments.top_k
    # the k largest of log load + Gumbel noise: k different experts, drawn by load
    with np.errstate(divide="ignore"):
        keys = np.log(load_E) + rng.gumbel(size=(tokens, len(load_E)))
    ids = np.argsort(-keys, axis=1, kind="stable")[:, :k].astype(np.int32)
    if arguments.experts % k == 0 and np.all(load_E == load_E[0]):  # even to the row, not only on average
        ids = ((np.arange(tokens)[:, None] * k + np.arange(k)) % arguments.experts).astype(np.int32)
    d, f = arguments.width, arguments.hidden
    normal = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    weights = ExpertWeights(normal(arguments.experts, d, 2 * f) / d**0.5, normal(arguments.experts, f, d) / f**0.5)
    return normal(tokens, d), ids, np.abs(normal(tokens, k)), weights, normal(tokens, d)


def layer(transport: TransportObject, experts: int) -> Any:
    """f(x, ids, weights, params, grad) -> (y, gradient of x, rounds); the gradients of params are computed too."""

    def forward_and_backward(x: Any, ids: Any, weights: Any, params: Any, grad: Any) -> Any:
        def loss(x: Any, weights: Any, params: Any) -> Any:
            y, traffic = through_experts(transport, expert_mlps, params, x, ids, weights, experts)
            return jnp.sum(y * grad), (y, traffic.rounds)

        (dx, *rest), (y, rounds) = jax.grad(loss, (0, 1, 2), has_aux=True)(x, weights, params)
        return y, dx, rounds[None], rest

    return forward_and_backward


def compile_layer(transport: TransportObject, mesh: Mesh, arguments: argparse.Namespace) -> Any:
    spec = PartitionSpec("ep")
    inputs = jax.eval_shape(lambda: make_inputs(arguments, np.ones(arguments.experts)))
    region = jax.shard_map(
        layer(transport, arguments.experts), mesh=mesh, in_specs=(spec,) * 5, out_specs=(spec,) * 4, check_vma=False
    )
    return jax.jit(region).lower(*inputs).compile()


def reference(inputs: tuple[Any, ...], experts: int) -> tuple[np.ndarray, np.ndarray]:
    """y and the gradient of x with every expert on one device."""
    y, dx, _, _ = jax.jit(layer(Local(), experts))(*inputs)
    return np.asarray(y, np.float64), np.asarray(dx, np.float64)


def take_turns(programs: dict[Transport, Any], inputs: tuple[Any, ...], repeat: int) -> tuple[dict, dict]:
    """(seconds of each call, last answer) by transport, after one call each that is not timed."""
    seconds: dict[Transport, list[float]] = {name: [] for name in programs}
    answers: dict[Transport, Any] = {}
    placed = {name: jax.device_put(inputs, compiled.input_shardings[0]) for name, compiled in programs.items()}
    for turn in range(repeat + 1):
        for name, compiled in programs.items():
            start = time.perf_counter()
            y, dx, rounds, _ = jax.block_until_ready(compiled(*placed[name]))
            if turn:
                seconds[name].append(time.perf_counter() - start)
            answers[name] = (np.asarray(y), np.asarray(dx), np.asarray(rounds)[0])
    return seconds, answers


def sent_bytes(transport: TransportObject, ids: np.ndarray, arguments: argparse.Namespace, rounds: int) -> int:
    """Bytes that leave the busiest device in the four exchanges of a layer, forward and backward, under this
    routing."""
    shape, ep = (arguments.tokens, arguments.top_k, arguments.experts), arguments.ep
    if transport.name == "local":
        return 0
    if transport.name in ("all_to_all", "all_gather"):  # what they send does not depend on the routing
        return int(2 * rounds * transport.sent_bytes(*shape, arguments.width, 4))
    owner = ids.reshape(ep, -1) // (arguments.experts // ep)
    n_SD = np.stack([np.bincount(row, minlength=ep) for row in owner])
    if transport.name == "rowwise":
        away = n_SD * ~np.eye(ep, dtype=bool)
        rows = away.sum(1) + away.sum(0)  # as source, and as owner on the way back
    else:
        per_node = transport.per_node  # pyright: ignore[reportAttributeAccessIssue]
        nodes = ep // per_node
        n_aibj = n_SD.reshape(nodes, per_node, nodes, per_node)
        inside = n_aibj.sum(2) * ~np.eye(per_node, dtype=bool)  # [a, i, j]: (a, i) to (a, j)
        across = n_aibj.sum(1) * ~np.eye(nodes, dtype=bool)[:, :, None]  # [a, b, j]: (a, j) to (b, j)
        rows = (inside.sum(2) + inside.sum(1) + across.sum(1) + across.sum(0)).reshape(-1)
    return int(2 * rows.max() * arguments.width * 4)
