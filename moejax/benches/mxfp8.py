"""What MXFP8 saves and costs beside bfloat16: bytes on the wire, in weights and in waiting activations, and time.

    config, twice --TrainProgram--> step as traced and compiled --> bytes, memory        rows, weights --> seconds

    python -m moejax.bench mxfp8 --json FILE

Both are one training step of the same model on `--ep` devices, `precision` apart. Wire: what every device hands to the
exchanges of rows in one step, forward and backward, whole buffers, as the program is written for a GPU. Weights: the
working copies of the experts on a device, gradients and master not counted. Kept: what one MoE block keeps of a
microbatch for its backward. Arguments, temporaries: of the compiled step, by its memory analysis. Times are this
machine's, in turns; where MXFP8 is emulated they say what the emulation costs, and the run says which it is.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from moejax import cli, config_io
from moejax.benches._interleave import interleaved
from moejax.config import Config
from moejax.context import single_device_context
from moejax.mesh import make_mesh, parse_mesh, prepare_devices
from moejax.parallel import mxfp8
from moejax.parallel.step import TrainProgram
from pallas_kernels import quantize, quantize_two_ways

SHAPE = (
    "model.d_model=256",
    "model.n_layers=4",
    "model.vocab_size=512",
    "model.attention.n_heads=8",
    "model.attention.n_kv_heads=2",
    "model.moe.num_experts=16",
    "model.moe.hidden=256",
    "model.moe.shared_hidden=256",
    "precision.params=bfloat16",
    "precision.compute=bfloat16",
    "data.sequence_length=128",
    "parallel.pipeline.microbatches=2",
    "parallel.experts.transport=rowwise",
)
EXCHANGES = ("ragged_all_to_all", "all_to_all")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ep", type=cli.whole_number, default=4, help="devices that share out the experts (%(default)s)"
    )
    parser.add_argument("--tokens", type=cli.whole_number, default=4096, help="tokens a step (%(default)s)")
    parser.add_argument("--turns", type=cli.whole_number, default=5, help="timed calls of each (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what is timed (%(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="fields of the configuration, as in training")


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows with quantity, bf16, mxfp8 and ratio (mxfp8 over bf16). Raises UserError for a config that does not fit."""
    prepare_devices(arguments.ep)
    own = [f"parallel.mesh='ep={arguments.ep}'", f"train.batch_tokens={arguments.tokens}"]
    plain = config_io.load(None, [*SHAPE, *arguments.overrides, *own])
    in_mx = config_io.load(None, [*SHAPE, *arguments.overrides, *own, "precision.mxfp8.experts=mxfp8"])
    quantities = [measured(TrainProgram(c, make_mesh(parse_mesh(c.parallel.mesh)))) for c in (plain, in_mx)]
    rows = [row(name, *(q[name] for q in quantities)) for name in quantities[0]]
    return rows + times(plain, arguments)


def row(quantity: str, bf16: float, mx: float) -> dict[str, Any]:
    return {"quantity": quantity, "bf16": bf16, "mxfp8": mx, "ratio": mx / bf16}


def measured(program: TrainProgram) -> dict[str, int]:
    """Bytes of one program, by name; per device."""
    memory = program.lower().compile().memory_analysis()
    return {
        "bytes on the wire, a step": wire_bytes(program),
        "bytes of resident expert weights": expert_bytes(program),
        "bytes an MoE block keeps of a microbatch": kept_bytes(program),
        "bytes of the step's arguments": memory.argument_size_in_bytes,
        "bytes of the step's temporaries": memory.temp_size_in_bytes,
    }


def wire_bytes(program: TrainProgram) -> int:
    """Of the rows that a device hands to its exchanges in one step (rounds beyond the first left out)."""
    key, parts = jax.random.key(0), program.config.parallel.pipeline.microbatches
    sequences = program.config.train.batch_tokens // program.config.data.sequence_length
    length = program.config.data.sequence_length
    ids = np.zeros((sequences, length), np.int32)
    batch = program.place_batch(dict.fromkeys(("tokens", "labels", "segment_ids", "positions"), ids))
    assert batch.tokens.shape[0] == parts
    params = program.abstract_state().params
    # with one stage, a branch of the switch over ops runs once a microbatch: as often as half of the ticks
    ticks = program.schedule.ticks
    return sum(_exchanged(jax.make_jaxpr(program.gradients)(params, batch, key).jaxpr)) * parts // ticks


def _exchanged(jaxpr: Any, times: int = 1) -> Iterator[int]:
    """Bytes of every exchange, as if each branch of the switch ran at each tick."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in EXCHANGES:
            rows = equation.invars[0].aval
            if rows.ndim > 1:  # counts and offsets have one axis
                yield times * rows.size * rows.dtype.itemsize
        elif equation.primitive.name != "while":
            inside = times * equation.params.get("length", 1) if equation.primitive.name == "scan" else times
            for inner in _inner(equation):
                yield from _exchanged(inner, inside)


def _inner(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            part = getattr(part, "jaxpr", part)
            if hasattr(part, "eqns"):
                yield part


def expert_bytes(program: TrainProgram) -> int:
    weights, specs = (
        tree["moe_blocks"]["moe"]["experts"] for tree in (program.abstract_state().params, program.working_specs)
    )
    return mxfp8.bytes_on_device(weights, specs, program.mesh)


def kept_bytes(program: TrainProgram) -> int:
    """Of what one MoE block keeps of one microbatch between its forward and its backward, by shape and dtype."""
    config, found = program.config, []
    sequences = config.train.batch_tokens // config.data.sequence_length // config.parallel.pipeline.microbatches
    segments = jax.ShapeDtypeStruct((sequences, config.data.sequence_length), jnp.int32)

    def region(params: Any, segment_ids: jax.Array) -> jax.Array:
        context = single_device_context(segment_ids)
        bias = jnp.zeros((config.model.n_layers, config.model.moe.num_experts))
        context = replace(context, transport=program.transport, recipe=program.recipe, score_bias=bias)
        x = jax.ShapeDtypeStruct((*segment_ids.shape, config.model.d_model), program.stages.compute)
        blocks = program.stages.blocks(params, x, replace(context, key=jax.random.key(0)))
        found.append(sum(math.prod(s.shape) * s.dtype.itemsize for s in blocks["moe_blocks"].kept))
        return segment_ids

    spec = PartitionSpec(("dp", "ep"))
    mapped = jax.shard_map(
        region, mesh=program.mesh, in_specs=(program.working_specs, spec), out_specs=spec, check_vma=False
    )
    jax.eval_shape(mapped, program.abstract_state().params, segments)
    return found[0]


def times(config: Config, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds to put rows and one device's expert weights of a layer into MXFP8, and to cast them to bfloat16."""
    rng, moe = np.random.default_rng(arguments.seed), config.model.moe
    tokens = arguments.tokens // config.parallel.pipeline.microbatches // arguments.ep
    x = jnp.asarray(rng.standard_normal((tokens, config.model.d_model)), jnp.float32)
    shape = moe.num_experts // arguments.ep, config.model.d_model, 2 * moe.hidden
    weights = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    cases: dict[str, tuple[Callable[..., Any], jax.Array]] = {
        "rows, bf16": (lambda x: x.astype(jnp.bfloat16), x),
        "rows, mxfp8": (quantize, x),
        "weights, bf16": (lambda w: w.astype(jnp.bfloat16), weights),
        "weights, mxfp8": (quantize_two_ways, weights),
    }
    calls = {name: _call(function, operand) for name, (function, operand) in cases.items()}
    timings = interleaved(calls, arguments.turns)
    names = {
        "rows": f"seconds to write {tokens} rows of {config.model.d_model}",
        "weights": f"seconds to write {weights.size:,} weights, both copies",
    }
    return [row(names[n], timings[f"{n}, bf16"].seconds, timings[f"{n}, mxfp8"].seconds) for n in names]


def _call(function: Callable[..., Any], operand: jax.Array) -> Callable[[], Any]:
    compiled = jax.jit(function)
    return lambda: compiled(operand)
