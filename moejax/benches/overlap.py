"""What can run while tokens travel: one MoE layer compiled for absent GPUs, schedulers and places of the shared expert.

    layer, forward and backward, ep devices --compile for --gpu, each variant--> schedule --what stands beside--> rows

    JAX_PLATFORMS=cpu python -m moejax.bench overlap --gpu h200 --json FILE

`scheduler`: XLA's latency-hiding scheduler, on or off (`xla_gpu_enable_latency_hiding_scheduler`). `shared`: the shared
expert `before` the dispatch or `after` the combine, held there by a barrier, or `free`, without one. Backward is
mirrored: what was before is after. Bytes are those that leave a device for one layer, forward and backward, the further
rounds of an overflow left out; `overlapped` are those with other work between their start and their end. Nothing runs:
the schedule says what may overlap, not how long it takes. Needs JAX's CUDA plugin (`moejax[aot]`), no GPU.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from moejax import cli
from moejax.config import (
    Config,
    DataConfig,
    ExpertsConfig,
    Granularity,
    ModelConfig,
    MoEConfig,
    Overflow,
    ParallelConfig,
    PipelineConfig,
    TrainConfig,
    Transport,
    validate,
)
from moejax.errors import UserError
from moejax.hardware.absent_gpu import absent_mesh, bytes_per_device
from moejax.hardware.overlap import spans, summary
from moejax.mesh import MeshShape
from moejax.models.mlp import swiglu
from moejax.moe.choose import make_transport
from moejax.moe.exchange import through_experts
from moejax.moe.layer import ExpertWeights, expert_mlps

SHARED = ("before", "free", "after")
SCHEDULERS = {"off": False, "on": True}
OPTION = "xla_gpu_enable_latency_hiding_scheduler"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", default="h200", help="kind of absent GPU (%(default)s)")
    parser.add_argument("--ep", type=cli.whole_number, default=8, help="devices that share out the experts (8)")
    parser.add_argument("--tokens", type=cli.whole_number, default=16384, help="tokens of each device (%(default)s)")
    parser.add_argument("--experts", type=cli.whole_number, default=64, help="experts in all (%(default)s)")
    parser.add_argument("--top-k", type=cli.whole_number, default=4, help="experts per token (%(default)s)")
    parser.add_argument("--width", type=cli.whole_number, default=4096, help="model width (%(default)s)")
    parser.add_argument("--hidden", type=cli.whole_number, default=4096, help="hidden width of all experts (4096)")
    parser.add_argument(
        "--transport", default="rowwise", choices=[t.value for t in Transport if t != Transport.auto], help="(rowwise)"
    )


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows with scheduler, shared, collectives, with_work_beside, bytes, overlapped_bytes, overlapped_share,
    peak_bytes. Raises UserError for sizes that do not fit together, and where nothing can be compiled."""
    if arguments.experts % arguments.ep:
        raise UserError(f"--ep {arguments.ep} does not divide --experts {arguments.experts}.")
    if arguments.top_k > arguments.experts:
        raise UserError(f"--top-k {arguments.top_k} is more than --experts {arguments.experts}.")
    mesh = absent_mesh(arguments.gpu, MeshShape(ep=arguments.ep))
    sizes = dict(mesh.shape)
    rows = []
    for shared in SHARED:
        with jax.set_mesh(mesh), jax.default_device(mesh.devices.flat[0]):
            lowered = jax.jit(layer(arguments, shared, mesh)).lower(*shapes(arguments, mesh))
            for scheduler, on in SCHEDULERS.items():
                compiled = lowered.compile(compiler_options={OPTION: on})
                memory = bytes_per_device(compiled)
                rows.append(
                    {
                        "scheduler": scheduler,
                        "shared": shared,
                        **summary(spans(compiled.as_text(), sizes)),
                        "peak_bytes": memory["peak"] or memory["arguments"] + memory["temporaries"],
                        "gpu": arguments.gpu,
                        "ep": arguments.ep,
                        "tokens": arguments.tokens,
                        "transport": arguments.transport,
                    }
                )
    return rows


def shapes(arguments: argparse.Namespace, mesh: Any) -> tuple[Any, ...]:
    """x, grad [T D]; ids, weights [T K]; experts' weights; the shared expert's weights."""
    a, tokens = arguments, arguments.tokens * arguments.ep

    def shape(dtype: Any, spec: PartitionSpec, *sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))

    rows, whole = PartitionSpec("ep"), PartitionSpec()
    x = shape(jnp.bfloat16, rows, tokens, a.width)
    ids, weights = shape(jnp.int32, rows, tokens, a.top_k), shape(jnp.float32, rows, tokens, a.top_k)
    pair = lambda spec, *lead: ExpertWeights(  # noqa: E731
        shape(jnp.bfloat16, spec, *lead, a.width, 2 * a.hidden), shape(jnp.bfloat16, spec, *lead, a.hidden, a.width)
    )
    return x, x, ids, weights, pair(rows, a.experts), pair(whole)


def layer(arguments: argparse.Namespace, place: str, mesh: Any) -> Any:
    """f(x, grad, ids, weights, experts, shared) -> (y, gradients of x, weights, experts, shared)."""
    transport = make_transport(Transport(arguments.transport), as_config(arguments), MeshShape(ep=arguments.ep))

    def forward(x: Any, weights: Any, experts: Any, shared: Any, ids: Any) -> Any:
        routed = lambda x: through_experts(transport, expert_mlps, experts, x, ids, weights, arguments.experts)[0]  # noqa: E731
        always = lambda x: swiglu(x @ shared.w_up_gate) @ shared.w_down  # noqa: E731
        if place == "before":
            first, x = lax.optimization_barrier((always(x), x))
            return routed(x) + first
        if place == "after":
            first, x = lax.optimization_barrier((routed(x), x))
            return first + always(x)
        return routed(x) + always(x)

    def both(x: Any, grad: Any, ids: Any, weights: Any, experts: Any, shared: Any) -> Any:
        y, pull = jax.vjp(lambda x, w, e, s: forward(x, w, e, s, ids), x, weights, experts, shared)
        return y, pull(grad)

    rows, whole = PartitionSpec("ep"), PartitionSpec()
    return jax.shard_map(
        both,
        mesh=mesh,
        in_specs=(rows, rows, rows, rows, rows, whole),
        out_specs=(rows, (rows, rows, rows, rows)),  # the shared expert's gradient is each device's own share
        check_vma=False,
    )


def as_config(arguments: argparse.Namespace) -> Config:
    moe = MoEConfig(num_experts=arguments.experts, top_k=arguments.top_k, hidden=arguments.hidden)
    experts = ExpertsConfig(overflow=Overflow.exact, granularity=Granularity.expert)
    return validate(
        Config(
            model=ModelConfig(d_model=arguments.width, moe=moe),
            parallel=ParallelConfig(experts=experts, pipeline=PipelineConfig(microbatches=1)),
            data=DataConfig(sequence_length=arguments.tokens),
            train=TrainConfig(batch_tokens=arguments.ep * arguments.tokens),
        )
    )
