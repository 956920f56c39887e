"""What a model costs: weights in all, weights a token meets, and model FLOPs per token, from shapes alone.

    ModelConfig --parameter_counts--> ParameterCounts      (embedding, head, attention, dense, router, experts, ...)
    ModelConfig, S --flops_per_token--> FlopsPerToken --teraflops, mfu--> how well a measured tokens/s uses the device

Each sum over layers has its one-layer form (`block_parameters`, `block_flops_per_token`), for placing blocks on
pipeline stages. No array is made and nothing needs JAX. FLOP formulas stand here and nowhere else in the project.

Letters: D width, N query heads, M kv heads, H head width, F expert hidden, E experts, K experts per token, V
vocabulary, S positions, W attention window.
"""

import dataclasses
from dataclasses import dataclass
from typing import Self

from moejax.config import FULL_ATTENTION, ModelConfig, NormPlacement, QKNorm
from moejax.errors import UserError


@dataclass(frozen=True)
class _Parts:
    """A record whose fields add up: part by part with `+`, all together in `total`."""

    def __add__(self, other: Self) -> Self:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return type(self)(*(a + b for a, b in pairs))

    def _sum(self) -> int | float:
        return sum(dataclasses.astuple(self))


@dataclass(frozen=True)
class ParameterCounts(_Parts):
    """Numbers of weights by part. `total` is all of them, `active` those that one token passes through.

    experts: the K routed experts a token reaches, in every MoE layer. idle_experts: the other E - K. norms: every gain,
    those of queries and keys included. head: 0 when it is the embedding. The embedding counts as active whole, as in
    Olmo-core's `num_active_params`.
    """

    embedding: int = 0
    head: int = 0
    attention: int = 0
    dense: int = 0
    router: int = 0
    experts: int = 0
    idle_experts: int = 0
    shared: int = 0
    norms: int = 0

    @property
    def total(self) -> int:
        return int(self._sum())

    @property
    def active(self) -> int:
        return self.total - self.idle_experts


@dataclass(frozen=True)
class FlopsPerToken(_Parts):
    """Model FLOPs of one token, forward and backward, by part; a multiply and an add are two."""

    attention: float = 0.0  # the four projections
    attention_scores: float = 0.0  # q k^T and its product with v
    dense: float = 0.0
    router: float = 0.0
    experts: float = 0.0
    shared: float = 0.0
    head: float = 0.0

    @property
    def total(self) -> float:
        return float(self._sum())


def _swiglu(d_model: int, hidden: int) -> int:
    """Weights of up, gate and down."""
    return 3 * d_model * hidden


def _biases(model: ModelConfig) -> int:
    a = model.attention
    return a.head_dim * (a.n_heads + 2 * a.n_kv_heads) if a.qkv_bias else 0


def block_parameters(model: ModelConfig, layer: int) -> ParameterCounts:
    """Weights of one block; the leading `n_dense_layers` are dense, the others routed and shared experts."""
    a, moe, d = model.attention, model.moe, model.d_model
    projections = 2 * d * a.head_dim * (a.n_heads + a.n_kv_heads)
    block_norms = d * (4 if model.norm_placement == NormPlacement.peri else 2)
    qk_norms = {QKNorm.none: 0, QKNorm.head: 2, QKNorm.full: a.n_heads + a.n_kv_heads}[a.qk_norm] * a.head_dim
    common = ParameterCounts(attention=projections + _biases(model), norms=block_norms + qk_norms)
    if layer < model.n_dense_layers:
        return common + ParameterCounts(dense=_swiglu(d, model.dense_width))
    mixing = d * moe.shared_experts if moe.shared_hidden and moe.shared_experts > 1 else 0
    return common + ParameterCounts(
        router=d * moe.num_experts + (moe.num_experts if moe.router.bias else 0) + mixing,
        experts=moe.top_k * _swiglu(d, moe.hidden),
        idle_experts=(moe.num_experts - moe.top_k) * _swiglu(d, moe.hidden),
        shared=moe.shared_experts * _swiglu(d, moe.shared_hidden) + (d if moe.shared_gate else 0),
    )


def parameter_counts(model: ModelConfig) -> ParameterCounts:
    """Weights of the whole model: every block, both ends and their norms."""
    table = model.vocab_size * model.d_model
    ends = ParameterCounts(
        embedding=table, head=0 if model.tie_embeddings else table, norms=model.d_model * (1 + int(model.embed_norm))
    )
    return sum((block_parameters(model, layer) for layer in range(model.n_layers)), start=ends)


def attended_keys(sequence_length: int, window: int = FULL_ATTENTION) -> float:
    """Mean number of keys a query looks at, causal: sum over p < S of min(p + 1, W) / S; (S + 1) / 2 in full.

    A window counts the query's own position. Borders between packed documents are not counted, so that the figure
    depends on the model alone.
    """
    if sequence_length < 1:
        raise UserError(f"A sequence of {sequence_length} tokens has no FLOPs; its length must be greater than 0.")
    reach = sequence_length if window == FULL_ATTENTION else min(window, sequence_length)
    return reach - reach * (reach - 1) / (2 * sequence_length)


def block_flops_per_token(model: ModelConfig, sequence_length: int, layer: int) -> FlopsPerToken:
    """FLOPs of one block; depends on the layer by its kind, dense or experts, and by its attention window."""
    counts = block_parameters(model, layer)
    keys = attended_keys(sequence_length, model.windows[layer])
    return FlopsPerToken(
        attention=6.0 * (counts.attention - _biases(model)),
        attention_scores=12.0 * model.attention.n_heads * model.attention.head_dim * keys,
        dense=6.0 * counts.dense,
        router=6.0 * counts.router,
        experts=6.0 * counts.experts,
        shared=6.0 * counts.shared,
    )


def flops_per_token(model: ModelConfig, sequence_length: int) -> FlopsPerToken:
    """Model FLOPs of one token, forward and backward, nothing computed twice (recompute is not model work).

        sum over layers [ 6 (2 D N H + 2 D M H) + 12 N H keys + (18 D F_dense  or  6 D E + 18 D F K + 18 D F_shared) ]
        + 6 D V,      keys = (S + 1) / 2, or what the layer's window leaves of them (`attended_keys`)

    Every weight of a matrix costs 2 FLOPs forward and 4 backward; a key costs 4 N H forward. Norms, rotary embedding,
    softmax and the embedding look-up are not counted. The convention of Olmo-core 3's benchmarks
    (`benchmark_num_flops_per_token`), so that its TFLOP/s and ours are the same quantity.
    """
    head = FlopsPerToken(head=6.0 * model.d_model * model.vocab_size)
    return sum((block_flops_per_token(model, sequence_length, layer) for layer in range(model.n_layers)), start=head)


def teraflops(flops: FlopsPerToken, tokens_per_second: float) -> float:
    """Model TFLOP/s at a throughput; per device if the throughput is."""
    return flops.total * tokens_per_second / 1e12


def mfu(flops: FlopsPerToken, tokens_per_second: float, peak_teraflops: float, devices: int = 1) -> float:
    """Model FLOP utilisation, 0..1: model TFLOP/s over the peak of all devices.

    tokens_per_second: over all devices. peak_teraflops: of one device, dense, in the dtype the matrices run in.
    """
    if peak_teraflops <= 0 or devices < 1:
        raise UserError(
            f"Utilisation needs a peak and devices greater than 0, not {peak_teraflops} TFLOP/s on {devices}."
        )
    return teraflops(flops, tokens_per_second) / (peak_teraflops * devices)
