"""What a plan is about: a config on a mesh of one kind of GPU, with the table and the layout that training would use.

    Config, MeshShape, Gpu --make_setup--> Setup: schedule, layers of every stage, tokens of a device, transport

Everything here is what `TrainProgram` decides, by the same functions, without a device and without an array.
"""

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moejax import accounting
from moejax.config import (
    AttentionImplementation,
    Config,
    Dtype,
    ParallelConfig,
    PipelineConfig,
    PipelineEnds,
    Recompute,
    Region,
    RegionsConfig,
    Stash,
    Strategy,
)
from moejax.errors import UserError
from moejax.hardware.gpus import Gpu
from moejax.mesh import MeshShape, check_fit
from moejax.moe.choose import Choice, choose_transport
from moejax.parallel.layout import Layout, layers_of_virtual_stages, make_layout
from moejax.parallel.schedule_choice import choose_schedule
from moejax.parallel.schedule_wiring import Wiring, wire
from moejax.parallel.schedules import Schedule
from moejax.planning import report

ITEMSIZE = {Dtype.float32: 4, Dtype.bfloat16: 2}
MX_BYTES = 1 + 1 / 32  # of a number in MXFP8: E4M3, and its share of a scale for 32 of them
KERNEL_WIDTH = 64  # D and F of the experts must be multiples of it for the kernels (pallas_kernels)


@dataclass(frozen=True)
class Setup:
    """sequences, tokens: of a microbatch on one device. rows: of an expert receive buffer.
    ends_apart: embedding and head are cut over all stages."""

    config: Config
    config_file: str
    shape: MeshShape
    gpu: Gpu
    schedule: Schedule
    layout: Layout
    wiring: Wiring
    choice: Choice
    ends_apart: bool
    sequences: int
    tokens: int
    rows: int

    @property
    def param_bytes(self) -> int:
        return ITEMSIZE[self.config.precision.params]

    @property
    def compute_bytes(self) -> int:
        return ITEMSIZE[self.config.precision.compute]

    @property
    def keep_inputs(self) -> bool:
        return self.wiring.keep_inputs

    @property
    def recompute(self) -> Recompute:
        """What blocks compute again; `stash=named` goes by region as `recompute=named` does."""
        named = self.config.parallel.pipeline.stash == Stash.named
        return Recompute.named if named else self.config.parallel.recompute

    @property
    def kept_regions(self) -> tuple[str, ...]:
        """Regions that blocks keep although they compute the rest again."""
        if self.recompute == Recompute.none:
            return tuple(f.name for f in dataclasses.fields(RegionsConfig))
        if self.recompute in (Recompute.block, Recompute.full):
            return ()
        regions = self.config.parallel.regions
        return tuple(f.name for f in dataclasses.fields(RegionsConfig) if getattr(regions, f.name) == Region.keep)

    @property
    def mxfp8(self) -> frozenset[str]:
        """What is multiplied in MXFP8: of "experts", "shared_experts" (and dense MLPs), "attention" (projections)."""
        section = getattr(self.config.precision, "mxfp8", None)
        names = ("experts", "shared_experts", "attention")
        return frozenset(name for name in names if section is not None and getattr(section, name) == "mxfp8")

    @property
    def keeps_bf16(self) -> bool:
        """Whether weights that have MXFP8 copies stay in the compute dtype too."""
        section = getattr(self.config.precision, "mxfp8", None)
        return section is None or bool(section.keep_bf16)

    def slots(self, stack: str) -> int:
        """Rows of a stack of blocks that every stage has room for."""
        return self.layout.stacks[stack].slots if stack in self.layout.stacks else 0

    @property
    def fullest_chunk(self) -> tuple[int, int]:
        """(dense, MoE) layers of the chunk with the most of each."""
        kinds = self.layout.kinds
        return max(kind.n_dense for kind in kinds), max(kind.n_moe for kind in kinds)


def make_setup(config: Config, shape: MeshShape, gpu: Gpu, config_file: str = "") -> Setup:
    """Raises UserError if the config does not fit the mesh, as training would."""
    check_fit(config, shape)
    if config.parallel.strategy != Strategy.resident:
        raise UserError(
            f"The planner knows parallel.strategy=resident, not {config.parallel.strategy}; "
            "`python -m moejax.bench strategies --gpu h200` compiles both and compares them."
        )
    pipe, model = config.parallel.pipeline, config.model
    schedule = _schedule(config.parallel.pipeline, shape.pp)
    ends_apart = pipe.ends == PipelineEnds.sharded and shape.pp > 1
    keep_inputs = pipe.stash == Stash.inputs or schedule.virtual_stages == 1
    sequences = config.train.batch_tokens // config.data.sequence_length // pipe.microbatches // shape.data_shards
    tokens = sequences * config.data.sequence_length
    choice = choose_transport(config, shape)
    return Setup(
        config=config,
        config_file=config_file,
        shape=shape,
        gpu=gpu,
        schedule=schedule,
        layout=make_layout(model.n_layers, model.n_dense_layers, schedule, ends_apart),
        wiring=_wire(schedule, keep_inputs, ends_apart),
        choice=choice,
        ends_apart=ends_apart,
        sequences=sequences,
        tokens=tokens,
        rows=choice.transport.buffer_rows(tokens, model.moe.top_k, model.moe.num_experts),
    )


# A search asks for the same tables again and again; a schedule is equal to itself alone, so it can be a key.
_wire = functools.lru_cache(maxsize=256)(wire)


def _schedule(pipe: PipelineConfig, stages: int) -> Schedule:
    asked = dataclasses.replace(PipelineConfig(), **{name: getattr(pipe, name) for name in ASKED})
    return _chosen(asked, stages)


ASKED = ("schedule", "table", "chunks", "microbatches")  # what a schedule follows from


@functools.lru_cache(maxsize=256)
def _chosen(pipe: PipelineConfig, stages: int) -> Schedule:
    config = Config(parallel=ParallelConfig(pipeline=pipe))
    return choose_schedule(config, stages, pipe.microbatches)


def check_gpus(shape: MeshShape, gpus: int | None, nodes: int | None, gpu: Gpu) -> None:
    """Raises UserError if the mesh is for another number of devices than there are GPUs."""
    if gpus is not None and nodes is not None and gpus != nodes * gpu.gpus_per_node:
        raise UserError(
            f"--gpus {gpus} and --nodes {nodes} disagree: {nodes} nodes of {gpu.gpus_per_node} are "
            f"{nodes * gpu.gpus_per_node} GPUs; give one of them."
        )
    there = gpus if gpus is not None else None if nodes is None else nodes * gpu.gpus_per_node
    if there is not None and there != shape.devices:
        raise UserError(
            f"The mesh {shape} is for {shape.devices} GPUs and there are {there}; make dp, ep and pp multiply to "
            f"{there}, or let --search choose a mesh."
        )


# --- what of it goes into the report -------------------------------------------------------------------------------


def model_facts(setup: Setup) -> report.ModelFacts:
    c, m = setup.config, setup.config.model
    counts = accounting.parameter_counts(m)
    flops = accounting.flops_per_token(m, c.data.sequence_length)
    return report.ModelFacts(
        name=c.run.name if not setup.config_file else Path(setup.config_file).stem,
        config_file=setup.config_file,
        d_model=m.d_model,
        n_layers=m.n_layers,
        n_dense_layers=m.n_dense_layers,
        dense_hidden=m.dense_width,
        vocab_size=m.vocab_size,
        n_heads=m.attention.n_heads,
        n_kv_heads=m.attention.n_kv_heads,
        head_dim=m.attention.head_dim,
        num_experts=m.moe.num_experts,
        top_k=m.moe.top_k,
        hidden=m.moe.hidden,
        shared_hidden=m.moe.shared_hidden,
        shared_experts=m.moe.shared_experts,
        sequence_length=c.data.sequence_length,
        parameters_total=counts.total,
        parameters_active=counts.active,
        parameters=dataclasses.asdict(counts),
        flops_per_token_total=flops.total,
        flops_per_token=dataclasses.asdict(flops),
    )


def machine(setup: Setup) -> report.Machine:
    gpu = setup.gpu
    return report.Machine(
        gpu=gpu.name,
        gpus=setup.shape.devices,
        gpus_per_node=gpu.gpus_per_node,
        memory_bytes=gpu.memory_bytes,
        usable_bytes=gpu.usable_bytes,
        peak_tflops=dict(gpu.peak_tflops),
        hbm_bytes_per_second=gpu.hbm_bytes_per_second,
        nvlink_bytes_per_second=gpu.nvlink_bytes_per_second,
        network_bytes_per_second=gpu.network_bytes_per_second,
        source=gpu.source,
    )


def settings(setup: Setup) -> report.Settings:
    c, shape, experts = setup.config, setup.shape, setup.config.parallel.experts
    aligned = c.model.d_model % KERNEL_WIDTH == 0 and c.model.moe.hidden % KERNEL_WIDTH == 0
    bf16 = c.precision.compute == Dtype.bfloat16
    wanted = c.model.attention.implementation
    flash = bf16 if wanted == AttentionImplementation.auto else wanted != AttentionImplementation.xla
    return report.Settings(
        pp=shape.pp,
        dp=shape.dp,
        ep=shape.ep,
        microbatches=c.parallel.pipeline.microbatches,
        sequences=setup.sequences,
        tokens=setup.tokens,
        batch_tokens=c.train.batch_tokens,
        schedule=setup.schedule.name,
        chunks=setup.schedule.chunks,
        stash=c.parallel.pipeline.stash.value,
        recompute=setup.recompute.value,
        regions_kept=list(setup.kept_regions),
        ends=c.parallel.pipeline.ends.value,
        transport=setup.choice.transport.name,
        capacity_factor=experts.capacity_factor,
        capacity_rows=setup.rows,
        params_dtype=c.precision.params.value,
        compute_dtype=c.precision.compute.value,
        mxfp8=bool(setup.mxfp8),
        attention="flash" if flash else "xla",
        grouped_gemm="mosaic" if bf16 and aligned else "xla",
    )


def stages(setup: Setup) -> list[report.Stage]:
    schedule, model = setup.schedule, setup.config.model
    layers = layers_of_virtual_stages(model.n_layers, schedule.virtual_stages)
    found = []
    for stage in range(schedule.stages):
        virtual = [int(schedule.virtual_stage(stage, chunk)) for chunk in range(schedule.chunks)]
        here = np.concatenate([np.arange(layers[q].start, layers[q].stop) for q in virtual])
        dense = int((here < model.n_dense_layers).sum())
        found.append(
            report.Stage(
                index=stage,
                chunks=[[layers[q].start, layers[q].stop - 1] for q in virtual],
                dense_layers=dense,
                moe_layers=len(here) - dense,
                embedding=setup.ends_apart or 0 in virtual,
                head=setup.ends_apart or schedule.virtual_stages - 1 in virtual,
            )
        )
    return found
