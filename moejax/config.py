"""The configuration tree: what can be set, what it means, and which combinations make sense.

    YAML file  +  dotted overrides  --config_io.load-->  Config  --validate-->  everything else

The field names are the public interface (`model.moe.num_experts=64` on every command), and the sentence beside each
field is what `--help` prints. Enum values are spelled as in the YAML. Only what works is here: an option without an
implementation is not a field.
"""

import collections
import dataclasses
import enum
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moejax.config_fields import option as option
from moejax.config_fields import require as require
from moejax.config_moe import Assignment as Assignment
from moejax.config_moe import BalanceGranularity as BalanceGranularity
from moejax.config_moe import ExpertsConfig as ExpertsConfig
from moejax.config_moe import Gating as Gating
from moejax.config_moe import Granularity as Granularity
from moejax.config_moe import MoEConfig as MoEConfig
from moejax.config_moe import Overflow as Overflow
from moejax.config_moe import PoolConfig as PoolConfig
from moejax.config_moe import RouterConfig as RouterConfig
from moejax.config_moe import ScoreBias as ScoreBias
from moejax.config_moe import Transport as Transport
from moejax.config_moe import validate_experts, validate_moe
from moejax.config_mxfp8 import Format as Format
from moejax.config_mxfp8 import Hardware as Hardware
from moejax.config_mxfp8 import MXFP8Config as MXFP8Config
from moejax.config_mxfp8 import SavedHidden as SavedHidden
from moejax.config_mxfp8 import ScaleRule as ScaleRule
from moejax.config_mxfp8 import validate_mxfp8

FULL_ATTENTION = -1  # in window patterns


class NormPlacement(enum.StrEnum):
    """Where RMSNorm stands in a block (N = norm): see `models/block.py`."""

    reordered = "reordered"  # h = x + N(Attn(x));     y = h + N(MLP(h))
    peri = "peri"  # h = x + N(Attn(N(x)));  y = h + N(MLP(N(h)))
    pre = "pre"  # h = x + Attn(N(x));     y = h + MLP(N(h))


class QKNorm(enum.StrEnum):
    none = "none"
    head = "head"  # over head_dim, one gain per head dimension
    full = "full"  # over all heads together, as OLMoE


class AttentionImplementation(enum.StrEnum):
    auto = "auto"  # cuDNN flash attention where the platform is a GPU, XLA elsewhere
    xla = "xla"
    cudnn = "cudnn"
    blocks = "blocks"  # flash attention in plain JAX: no S x S scores, on any platform


# Values that are no Python names, so the functional form: ScheduleName("1f1b").
ScheduleName = enum.StrEnum(
    "ScheduleName", ["gpipe", "1f1b", "1f1b_lockstep", "interleaved_1f1b", "zero_bubble", "zero_bubble_v"]
)


class Stash(enum.StrEnum):
    """What a stage keeps of a microbatch between its forward and its backward."""

    inputs = "inputs"  # its input; the backward runs the stage again
    residuals = "residuals"  # what the backward needs, weights and what is cheap to compute again left out
    named = "named"  # the inputs of blocks, and the regions that parallel.regions keeps


class PipelineMode(enum.StrEnum):
    switch = "switch"  # a stage runs its own op and nothing in idle ticks
    masked = "masked"  # every stage runs every op of the tick and keeps its own: the same control flow everywhere


class PipelineEnds(enum.StrEnum):
    stages = "stages"  # embedding on the first stage, head and loss on the last
    sharded = "sharded"  # both on all stages, cut by vocabulary


class Recompute(enum.StrEnum):
    none = "none"  # keep every residual of the microbatch in backward
    full = "full"  # keep the stage's input, and in its backward about sqrt(n) block inputs: parallel/segments.py
    block = "block"  # keep block inputs and the experts chosen, run each block's forward again in its backward
    named = "named"  # as block, but keep the regions that parallel.regions keeps


class Strategy(enum.StrEnum):
    """Which devices hold what."""

    resident = "resident"  # experts stay on their devices and tokens travel; the rest is whole on every device
    fsdp = "fsdp"  # every weight is cut over dp and ep and gathered layer by layer; tokens stay


class Region(enum.StrEnum):
    keep = "keep"
    recompute = "recompute"


class Best(enum.StrEnum):
    """What makes one checkpoint better than another: the lower, the better."""

    none = "none"
    loss = "loss"  # of the step that was saved, on its own batch
    held_out_loss = "held_out_loss"  # of an evaluation at that step


class Dtype(enum.StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class LRSchedule(enum.StrEnum):
    constant = "constant"  # linear warm-up, then constant
    cosine = "cosine"  # linear warm-up, then cosine to final_fraction
    wsd = "wsd"  # warm-up, stable, linear decay to final_fraction


class Writer(enum.StrEnum):
    jsonl = "jsonl"
    tensorboard = "tensorboard"
    wandb = "wandb"


@dataclass(frozen=True)
class AttentionConfig:
    n_heads: int = option(4, "Query heads.")
    n_kv_heads: int = option(2, "Key and value heads; must divide n_heads (grouped-query attention).")
    head_dim: int = option(32, "Width of one head; even, for rotary embedding.")
    qk_norm: QKNorm = option(
        QKNorm.head, "RMSNorm of queries and keys: none, head (per head) or full (all heads together)."
    )
    qkv_bias: bool = option(False, "A bias on queries, keys and values, as Qwen2-MoE.")
    rope_theta: float = option(500_000.0, "Base of the rotary frequencies.")
    window_pattern: tuple[int, ...] = option(
        (), "Sliding window in tokens per layer, repeated over the layers; -1 is full attention; empty: all full."
    )
    full_first: bool = option(
        True, "With a window pattern: full attention in the first layer, and the pattern starts at the second."
    )
    full_last: bool = option(True, "With a window pattern: full attention in the last layer all the same.")
    implementation: AttentionImplementation = option(
        AttentionImplementation.auto,
        "Attention kernel: auto, xla, cudnn (GPU, bf16), or blocks (no S x S scores, any platform).",
    )


@dataclass(frozen=True)
class ModelConfig:
    d_model: int = option(128, "Width of the residual stream.")
    n_layers: int = option(4, "Blocks, dense ones included.")
    n_dense_layers: int = option(1, "Leading blocks with one dense MLP instead of experts.")
    dense_hidden: int | None = option(
        None, "Hidden width of dense blocks; null: top_k * hidden + shared_hidden, the active width of an MoE block."
    )
    vocab_size: int = option(288, "Rows of the embedding; at least the tokenizer's vocabulary.")
    norm_placement: NormPlacement = option(NormPlacement.peri, "reordered, peri or pre.")
    norm_eps: float = option(1e-6, "Epsilon of every RMSNorm.")
    embed_scale: float | None = option(None, "Factor on the embedding; null: sqrt(d_model).")
    embed_norm: bool = option(True, "RMSNorm on the scaled embedding.")
    tie_embeddings: bool = option(False, "Use the embedding as output head too.")
    z_loss: float = option(1e-4, "Weight of the z-loss of the output logits.")
    init_std: float = option(0.02, "Standard deviation of the truncated-normal (3 sigma) initial weights.")
    attention: AttentionConfig = option(AttentionConfig(), "Attention.")
    moe: MoEConfig = option(MoEConfig(), "Experts.")

    @property
    def dense_width(self) -> int:
        """Hidden width of a dense block."""
        active = self.moe.top_k * self.moe.hidden + self.moe.shared_experts * self.moe.shared_hidden
        return active if self.dense_hidden is None else self.dense_hidden

    @property
    def n_moe_layers(self) -> int:
        return self.n_layers - self.n_dense_layers

    @property
    def windows(self) -> tuple[int, ...]:
        """Attention window of every layer, the token itself included; FULL_ATTENTION where there is none.

        Source: Olmo-core `SlidingWindowAttentionConfig`, whose pattern begins after a first layer with full attention.
        """
        a = self.attention
        pattern = a.window_pattern or (FULL_ATTENTION,)
        sizes = [pattern[(layer - a.full_first) % len(pattern)] for layer in range(self.n_layers)]
        if a.full_first:
            sizes[0] = FULL_ATTENTION
        if a.full_last:
            sizes[-1] = FULL_ATTENTION
        return tuple(sizes)


@dataclass(frozen=True)
class PipelineConfig:
    schedule: ScheduleName = option(
        ScheduleName("1f1b"),
        "Order of forwards and backwards: gpipe, 1f1b, 1f1b_lockstep, interleaved_1f1b, zero_bubble or zero_bubble_v.",
    )
    table: str | None = option(None, "CSV file of a schedule of your own (docs/pipeline.md); it replaces schedule.")
    chunks: int | None = option(
        None, "Pieces of the model on each stage; null: 2 for interleaved_1f1b and zero_bubble_v, else 1."
    )
    microbatches: int = option(
        4, "Parts of the batch that go through the pipeline one after the other; also without pp."
    )
    stash: Stash = option(Stash.inputs, "What stays between a forward and its backward: inputs, residuals or named.")
    mode: PipelineMode = option(
        PipelineMode.switch, "switch: idle ticks cost nothing; masked: every stage runs every op of a tick."
    )
    ends: PipelineEnds = option(
        PipelineEnds.stages, "Embedding and head on the first and last stage (stages), or cut over all (sharded)."
    )


@dataclass(frozen=True)
class RegionsConfig:
    """What blocks keep for their backward where it is by name (recompute=named, stash=named): keep or recompute."""

    attention: Region = option(Region.keep, "What attention puts out, before its output projection.")
    dispatch: Region = option(Region.recompute, "Token rows as they arrive at their experts.")
    hidden: Region = option(Region.recompute, "The first product of every MLP and expert, before SwiGLU.")


@dataclass(frozen=True)
class ParallelConfig:
    mesh: str = option(
        "dp=1", "Devices by axis, e.g. dp=2,ep=8,pp=4, any order, absent axes are 1; the product is the device count."
    )
    strategy: Strategy = option(
        Strategy.resident,
        "resident: experts stay, tokens travel; fsdp: all weights cut over dp and ep, gathered layer by layer (pp=1).",
    )
    experts: ExpertsConfig = option(ExpertsConfig(), "Expert parallelism.")
    pipeline: PipelineConfig = option(PipelineConfig(), "Pipeline parallelism and gradient accumulation.")
    recompute: Recompute = option(
        Recompute.none, "What the backward computes again instead of keeping: none, full, block or named."
    )
    regions: RegionsConfig = option(RegionsConfig(), "What named keeps.")


@dataclass(frozen=True)
class PrecisionConfig:
    params: Dtype = option(Dtype.bfloat16, "Dtype of the resident weights; the master copy is always fp32.")
    compute: Dtype = option(Dtype.bfloat16, "Dtype of activations; router, norms, softmax and losses are fp32.")
    mxfp8: MXFP8Config = option(
        MXFP8Config(), "What is kept, sent and multiplied in 8 bits; router, norms and head never."
    )


@dataclass(frozen=True)
class DataConfig:
    paths: tuple[str, ...] = option(
        (), "Text files, folders, .jsonl(.gz); empty: the source of Python's standard library."
    )
    weights: tuple[float, ...] = option((), "Mixture weight of each path; empty: all documents as one corpus.")
    tokenizer: str = option("bytes", "bytes, or the path of a Hugging Face tokenizer.json.")
    sequence_length: int = option(128, "Tokens per sequence.")
    seed: int = option(0, "Seed of the shuffle; with the epoch it decides the order.")
    validation_fraction: float = option(0.02, "Share of the sequences held out for evaluation.")
    cache_dir: str = option(".cache/moejax/tokens", "Where tokenised files are kept.")


@dataclass(frozen=True)
class TrainConfig:
    steps: int = option(300, "Optimizer steps.")
    batch_tokens: int = option(8_192, "Tokens per optimizer step, over all devices.")
    seed: int = option(0, "Seed of the initial weights and of random routing.")
    eval_every: int = option(0, "Steps between evaluations on held-out text; 0: only at the end.")
    eval_batches: int = option(4, "Batches per evaluation; 0: no evaluation at all.")
    init_from: str | None = option(
        None, "Run folder, or one of its checkpoints, whose weights a new run begins with; null: fresh ones."
    )
    profile: tuple[int, ...] = option(
        (), "Two steps, start and stop, of a profiler trace written into the run folder; empty: none."
    )


@dataclass(frozen=True)
class LRScheduleConfig:
    kind: LRSchedule = option(LRSchedule.wsd, "constant, cosine or wsd, each after a linear warm-up.")
    warmup_steps: int = option(20, "Steps of linear warm-up from 0; at most half of train.steps.")
    decay_steps: int = option(0, "Steps of the final linear decay of wsd; 0: a fifth of train.steps.")
    final_fraction: float = option(0.1, "Learning rate at the end, as a fraction of learning_rate (cosine, wsd).")


@dataclass(frozen=True)
class OptimizerConfig:
    learning_rate: float = option(3e-3, "Peak learning rate.")
    betas: tuple[float, float] = option((0.9, 0.95), "Decay of the first and second moment.")
    eps: float = option(1e-8, "Added to the root of the second moment.")
    weight_decay: float = option(0.1, "Decoupled decay of matrices, routers and experts; norms have none.")
    decay_embeddings: bool = option(False, "Decay the embedding table too.")
    clip: float = option(1.0, "Largest global gradient norm; 0: no clipping.")
    schedule: LRScheduleConfig = option(LRScheduleConfig(), "Learning rate over the steps.")


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = option(100, "Steps between checkpoints; 0: only at the end and on interruption.")
    keep: int = option(2, "Newest checkpoints kept.")
    keep_every: int = option(0, "Checkpoints of steps that are a multiple of this are kept for good; 0: none are.")
    best: Best = option(
        Best.none, "Keep the checkpoint with the lowest loss or held_out_loss too; none: only those that keep holds."
    )
    fall_back: bool = option(
        False, "Go on from the newest whole checkpoint where the last one is damaged; false: stop and say so."
    )


@dataclass(frozen=True)
class RunConfig:
    dir: str = option("runs", "Folder that holds the run folders.")
    name: str = option("tiny", "Name of the run; the same name resumes.")
    log_every: int = option(10, "Steps between printed lines.")
    writers: tuple[Writer, ...] = option((Writer.jsonl,), "Where metrics go: jsonl, tensorboard, wandb.")


@dataclass(frozen=True)
class Config:
    model: ModelConfig = option(ModelConfig(), "The network.")
    parallel: ParallelConfig = option(ParallelConfig(), "How it is spread over devices.")
    precision: PrecisionConfig = option(PrecisionConfig(), "Number formats.")
    data: DataConfig = option(DataConfig(), "Text.")
    train: TrainConfig = option(TrainConfig(), "Length and size of the run.")
    optimizer: OptimizerConfig = option(OptimizerConfig(), "AdamW.")
    checkpoint: CheckpointConfig = option(CheckpointConfig(), "Saving.")
    run: RunConfig = option(RunConfig(), "Where it is written.")


def _numbers(section: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """(field, value) of every number with a fraction, those in lists too."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _numbers(value, f"{prefix}{field.name}.")
        else:
            values = value if isinstance(value, tuple) else (value,)
            yield from ((prefix + field.name, number) for number in values if isinstance(number, float))


def validate(config: Config) -> Config:
    """Refuse impossible combinations, one sentence each; what depends on the mesh is checked by `mesh.check_fit`."""
    model, attention = config.model, config.model.attention
    for name, value in _numbers(config):
        require(math.isfinite(value), f"{name}={value} must be a finite number.")
    positive = {
        "model.d_model": model.d_model,
        "model.n_layers": model.n_layers,
        "model.vocab_size": model.vocab_size,
        "model.attention.n_heads": attention.n_heads,
        "model.attention.n_kv_heads": attention.n_kv_heads,
        "model.attention.head_dim": attention.head_dim,
        "model.attention.rope_theta": attention.rope_theta,
        "model.norm_eps": model.norm_eps,
        "model.init_std": model.init_std,
        "parallel.pipeline.microbatches": config.parallel.pipeline.microbatches,
        "data.sequence_length": config.data.sequence_length,
        "train.steps": config.train.steps,
        "train.batch_tokens": config.train.batch_tokens,
        "checkpoint.keep": config.checkpoint.keep,
        "run.log_every": config.run.log_every,
        "optimizer.eps": config.optimizer.eps,
    }
    for name, value in positive.items():
        require(value > 0, f"{name}={value} must be greater than 0.")
    not_negative = {
        "model.n_dense_layers": model.n_dense_layers,
        "model.z_loss": model.z_loss,
        "optimizer.learning_rate": config.optimizer.learning_rate,
        "optimizer.weight_decay": config.optimizer.weight_decay,
        "optimizer.clip": config.optimizer.clip,
        "optimizer.schedule.warmup_steps": config.optimizer.schedule.warmup_steps,
        "optimizer.schedule.decay_steps": config.optimizer.schedule.decay_steps,
        "checkpoint.every": config.checkpoint.every,
        "checkpoint.keep_every": config.checkpoint.keep_every,
        "train.eval_every": config.train.eval_every,
        "train.eval_batches": config.train.eval_batches,
    }
    for name, value in not_negative.items():
        require(value >= 0, f"{name}={value} must not be negative.")
    require(
        attention.n_heads % attention.n_kv_heads == 0,
        f"model.attention.n_kv_heads={attention.n_kv_heads} does not divide "
        f"model.attention.n_heads={attention.n_heads}.",
    )
    require(
        attention.head_dim % 2 == 0,
        f"model.attention.head_dim={attention.head_dim} is odd; rotary embedding needs an even width.",
    )
    require(
        all(window == FULL_ATTENTION or window > 0 for window in attention.window_pattern),
        f"model.attention.window_pattern={list(attention.window_pattern)} must hold window sizes > 0, "
        f"or {FULL_ATTENTION} for full attention.",
    )
    require(
        attention.implementation != AttentionImplementation.cudnn or config.precision.compute == Dtype.bfloat16,
        f"model.attention.implementation=cudnn computes in bfloat16, not precision.compute={config.precision.compute}; "
        "take xla or auto.",
    )
    require(
        model.n_dense_layers <= model.n_layers,
        f"model.n_dense_layers={model.n_dense_layers} is more than there are layers, model.n_layers={model.n_layers}.",
    )
    for name, width in {"model.dense_hidden": model.dense_hidden, "model.embed_scale": model.embed_scale}.items():
        require(width is None or width > 0, f"{name}={width} must be greater than 0, or null for its default.")
    validate_moe(model.moe)
    validate_experts(config.parallel.experts)
    transport = config.parallel.experts.transport
    require(
        config.parallel.strategy != Strategy.fsdp or transport in (Transport.auto, Transport.local),
        f"parallel.experts.transport={transport} carries tokens to experts, and under parallel.strategy=fsdp every "
        "device has all experts; set transport=auto, or strategy=resident.",
    )
    validate_mxfp8(config)
    for name, beta in zip(("first", "second"), config.optimizer.betas, strict=True):
        require(0 <= beta < 1, f"optimizer.betas: the {name}, {beta}, is not in [0, 1).")
    for name, seed in {"train.seed": config.train.seed, "data.seed": config.data.seed}.items():
        require(0 <= seed < 2**32, f"{name}={seed} is not between 0 and 2^32 - 1.")
    schedule = config.optimizer.schedule
    require(
        schedule.kind != LRSchedule.wsd or schedule.decay_steps <= config.train.steps,
        f"optimizer.schedule.decay_steps={schedule.decay_steps} is more than train.steps={config.train.steps}; "
        "0 takes a fifth of them.",
    )
    require(
        0 <= schedule.final_fraction <= 1,
        f"optimizer.schedule.final_fraction={schedule.final_fraction} is not between 0 and 1.",
    )
    data = config.data
    require(0 <= data.validation_fraction < 1, f"data.validation_fraction={data.validation_fraction} is not in [0, 1).")
    require(
        data.validation_fraction > 0 or config.train.eval_batches == 0,
        "data.validation_fraction=0 leaves no text to evaluate on; hold some out, or set train.eval_batches=0 as well.",
    )
    require(
        not data.weights or len(data.weights) == len(data.paths),
        f"data.weights has {len(data.weights)} entries for {len(data.paths)} data.paths; one weight a path, or none.",
    )
    require(all(w > 0 for w in data.weights), f"data.weights={list(data.weights)} must all be greater than 0.")
    pipe, recompute = config.parallel.pipeline, config.parallel.recompute
    require(
        pipe.stash != Stash.residuals or recompute == Recompute.none,
        f"parallel.pipeline.stash=residuals keeps what parallel.recompute={recompute} would compute again; "
        "set recompute=none, or stash=named.",
    )
    require(
        pipe.stash != Stash.named or recompute not in (Recompute.block, Recompute.full),
        f"parallel.pipeline.stash=named keeps what parallel.regions says, and parallel.recompute={recompute} nothing; "
        "set recompute=named.",
    )
    require(pipe.chunks is None or pipe.chunks > 0, f"parallel.pipeline.chunks={pipe.chunks} must be greater than 0.")
    length, batch, parts = data.sequence_length, config.train.batch_tokens, config.parallel.pipeline.microbatches
    require(
        batch % (length * parts) == 0,
        f"train.batch_tokens={batch} is not a multiple of data.sequence_length={length} times "
        f"parallel.pipeline.microbatches={parts}; "
        f"the nearest that is: {max(1, round(batch / (length * parts))) * length * parts}.",
    )
    saves, evaluations = config.checkpoint.every, config.train.eval_every
    require(
        config.checkpoint.best != Best.held_out_loss
        or (config.train.eval_batches > 0 and not (evaluations == 0 and saves or evaluations and saves % evaluations)),
        f"checkpoint.best=held_out_loss compares evaluations at the steps that are saved, and with checkpoint.every="
        f"{saves}, train.eval_every={evaluations}, train.eval_batches={config.train.eval_batches} some have none; "
        f"set train.eval_every={saves or 'N'} and train.eval_batches above 0.",
    )
    profile = config.train.profile
    require(
        not profile or (len(profile) == 2 and 0 <= profile[0] < profile[1]),
        f"train.profile={list(profile)} must be two steps, start before stop, or empty.",
    )
    require(
        not profile or profile[1] <= config.train.steps,
        f"train.profile={list(profile)} ends after the last step, train.steps={config.train.steps}.",
    )
    require(
        re.fullmatch(r"[^\s/\\.][^/\\]*", config.run.name) is not None,
        f"run.name={config.run.name!r} must be the name of a folder inside run.dir={config.run.dir}: "
        "not empty, no slash, no dot in front.",
    )
    twice = [writer for writer, n in collections.Counter(config.run.writers).items() if n > 1]
    require(not twice, f"run.writers names {', '.join(twice)} more than once.")
    return config
