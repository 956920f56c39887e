"""Olmo-core 3 to moejax: settings and weights of its MoE-v2 model (`OLMoDDPModel`).

    settings {"d": 64, "experts": 16, ...} --import_model_config--> ModelConfig
    tensors {"blocks.1.routed_experts.w_down": ...} --import_params--> params in model order
    folder stepN/ --OlmoCoreFolder--> params, both moments, step; tensor by tensor, without torch

Settings are the arguments of the released model builder (`MoERouterConfigV2` options by their own names). Whatever is
asked for and cannot be expressed here is refused by name. Every tensor is accounted for: none left over, none invented.
Names and shapes: Olmo-core 3.0.0 `nn/ddp/block.py`, `nn/moe/v2`; the router is flat, experts pack up before gate.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from moejax import config as c
from moejax.checkpoint.mapping import Index, Piece, assemble, check_tensors, whole
from moejax.config_moe import validate_moe
from moejax.errors import UserError
from moejax.models.transformer import Params, abstract_params
from moejax.moe.router import SIGMOID_EPSILON

Tensors = Mapping[str, np.ndarray]

# What the builder assumes where a setting is absent
DEFAULTS: dict[str, Any] = dict(
    peri_norm=True,
    shared=True,
    attn="default",
    gating_function="softmax",
    normalize_expert_weights=1.0,
    restore_weight_scale=True,
    expert_weight_scale=None,
    original_top_k=None,
    bias=False,
    bias_gamma=None,
    score_correction_bias=False,
    n_group=None,
    topk_group=None,
    jitter_eps=None,
    sigmoid_stability_epsilon=SIGMOID_EPSILON,
    global_load_balancing=False,
    lb_loss_weight=0.005,
    lb_loss_granularity="local_batch",
    z_loss_weight=2e-4,
    random_expert_assignment=False,
    uniform_expert_assignment=False,
)
SIZES = ("d", "heads", "kv", "head_dim", "layers", "experts", "top_k", "hidden", "vocab")
ROUTER_SETTINGS = tuple(name for name in DEFAULTS if name not in ("peri_norm", "shared", "attn"))
# Settings that change nothing about the numbers
WITHOUT_EFFECT = ("record_routing_batch_size", "use_recompute_fp32_cast")
GRANULARITY = {"local_batch": c.BalanceGranularity.local, "instance": c.BalanceGranularity.instance}


def import_model_config(settings: Mapping[str, Any]) -> c.ModelConfig:
    """The model that the builder's settings describe: one leading dense layer, embedding norm, untied head.

    Raises UserError naming a setting that is missing, unknown, or has no counterpart here.
    """
    known = {**DEFAULTS, **settings}
    missing = [name for name in SIZES if name not in known]
    if missing:
        raise UserError(f"The Olmo-core settings lack {', '.join(missing)}.")
    for name, value in settings.items():
        inert = value is None or value is False or name in WITHOUT_EFFECT
        if name not in (*SIZES, *DEFAULTS) and not inert:
            raise UserError(
                f"The Olmo-core setting {name}={value!r} has no counterpart in moejax; it cannot be imported."
            )
    if known["attn"] not in ("default", "fused_v2"):
        raise UserError(f"The Olmo-core setting attn={known['attn']!r} cannot be imported; default and fused_v2 can.")
    router = router_config({name: known[name] for name in ROUTER_SETTINGS})
    moe = c.MoEConfig(
        num_experts=known["experts"],
        top_k=known["top_k"],
        hidden=known["hidden"],
        shared_hidden=known["hidden"] if known["shared"] else 0,
        router=router,
    )
    validate_moe(moe)
    return c.ModelConfig(
        d_model=known["d"],
        n_layers=known["layers"],
        n_dense_layers=1,
        vocab_size=known["vocab"],
        norm_placement=c.NormPlacement.peri if known["peri_norm"] else c.NormPlacement.reordered,
        norm_eps=1e-6,
        embed_scale=None,
        embed_norm=True,
        tie_embeddings=False,
        z_loss=1e-4,
        init_std=0.01,
        attention=c.AttentionConfig(
            n_heads=known["heads"],
            n_kv_heads=known["kv"],
            head_dim=known["head_dim"],
            qk_norm=c.QKNorm.head,
            rope_theta=500_000.0,
        ),
        moe=moe,
    )


def router_config(settings: Mapping[str, Any], where: str = "") -> c.RouterConfig:
    """The router that options of `MoERouterConfigV2` describe. where: what stands before their names in the file.

    Raises UserError naming an option that has no counterpart here.
    """
    for name, value in settings.items():
        if name not in ROUTER_SETTINGS and value not in (None, False, 0):
            raise UserError(
                f"The Olmo-core option {where}{name}={value!r} has no counterpart in moejax; it cannot be imported."
            )
    known = {**{name: DEFAULTS[name] for name in ROUTER_SETTINGS}, **settings}
    assignment = c.Assignment.learned
    for name in ("random", "uniform"):
        if known[f"{name}_expert_assignment"]:
            assignment = c.Assignment(name)
    if (known["n_group"] is None) != (known["topk_group"] is None):
        raise UserError("The Olmo-core settings n_group and topk_group go together; one of them is missing.")
    if known["gating_function"] == "sigmoid" and known["sigmoid_stability_epsilon"] != SIGMOID_EPSILON:
        raise UserError(
            f"The Olmo-core setting sigmoid_stability_epsilon={known['sigmoid_stability_epsilon']!r} cannot be "
            f"imported; {SIGMOID_EPSILON} can."
        )
    score_bias = c.ScoreBias.fixed if known["score_correction_bias"] else c.ScoreBias.none
    if known["bias_gamma"]:
        score_bias = c.ScoreBias.sign
    return c.RouterConfig(
        gating=_one_of(c.Gating, "gating_function", known["gating_function"]),
        normalize=known["normalize_expert_weights"],
        restore_scale=bool(known["restore_weight_scale"]),
        weight_scale=known["expert_weight_scale"] or 1.0,
        original_top_k=known["original_top_k"],
        bias=bool(known["bias"]),
        jitter=known["jitter_eps"] or 0.0,
        groups=known["n_group"] or 1,
        top_groups=known["topk_group"] or 1,
        score_bias=score_bias,
        score_bias_rate=known["bias_gamma"] or 0.0,
        assignment=assignment,
        lb_loss=known["lb_loss_weight"] or 0.0,
        lb_granularity=_granularity(known["lb_loss_granularity"], known["global_load_balancing"]),
        z_loss=known["z_loss_weight"] or 0.0,
    )


def _one_of(kind: Any, name: str, value: Any) -> Any:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(member.value for member in kind)
        raise UserError(f"The Olmo-core setting {name}={value!r} cannot be imported; there are {known}.") from None


def _granularity(value: Any, over_all_devices: bool) -> c.BalanceGranularity:
    if value not in GRANULARITY:
        raise UserError(
            f"The Olmo-core setting lb_loss_granularity={value!r} cannot be imported; "
            f"there are {', '.join(GRANULARITY)}."
        )
    if not over_all_devices:
        return GRANULARITY[value]
    if value != "local_batch":
        raise UserError(f"The Olmo-core setting global_load_balancing does not go with lb_loss_granularity={value!r}.")
    return c.BalanceGranularity.batch


def import_score_bias(model: c.ModelConfig, buffers: Tensors) -> np.ndarray | None:
    """fp32[L, E] by MoE layer, from the buffers beside the weights; None for a router without one.

    Raises UserError for one that is missing, left over, or not of E numbers.
    """
    names = []
    if model.moe.router.score_bias != c.ScoreBias.none:
        layers = range(model.n_dense_layers, model.n_layers)
        names = [f"blocks.{layer}.routed_experts_router.score_bias" for layer in layers]
    missing, left = set(names) - set(buffers), set(buffers) - set(names)
    if missing:
        raise UserError(f"The Olmo-core checkpoint has no buffer {min(missing)}, which this model needs.")
    if left:
        raise UserError(f"The Olmo-core checkpoint has a buffer that this model has no place for, {min(left)}.")
    rows = [np.asarray(buffers[name], np.float32) for name in names]
    for name, row in zip(names, rows, strict=True):
        if row.shape != (model.moe.num_experts,):
            raise UserError(
                f"The Olmo-core buffer {name} has shape {row.shape}; the model has {model.moe.num_experts} experts."
            )
    return np.stack(rows) if rows else None


def pieces(model: c.ModelConfig, *, fused: bool = False) -> list[Piece]:
    """Where every Olmo-core tensor lies in our weights; fused: queries, keys and values are one tensor, `w_qkv`."""
    d, v = model.d_model, model.vocab_size
    out = [Piece("embeddings.weight", (v, d), "embedding/table", whole((v, d)))]
    if model.embed_norm:
        out.append(Piece("embedding_norm.weight", (d,), "embedding/norm/gain", whole((d,))))
    for layer in range(model.n_layers):
        out += _block(model, layer, fused)
    out.append(Piece("lm_head.norm.weight", (d,), "head/norm/gain", whole((d,))))
    if not model.tie_embeddings:
        out.append(Piece("lm_head.w_out.weight", (v, d), "head/w", whole((d, v)), (1, 0)))
    return out


def _block(model: c.ModelConfig, layer: int, fused: bool) -> Iterator[Piece]:
    a, moe, d = model.attention, model.moe, model.d_model
    dense = layer < model.n_dense_layers
    stack, row = ("dense_blocks", layer) if dense else ("moe_blocks", layer - model.n_dense_layers)

    def piece(name: str, shape: tuple[int, ...], leaf: str, index: Index, axes: tuple[int, ...] | None = None) -> Piece:
        return Piece(f"blocks.{layer}.{name}", shape, f"{stack}/{leaf}", (row, *index), axes)

    first = 0
    parts = (
        (("qkv", a.n_heads + 2 * a.n_kv_heads),)
        if fused
        else (("q", a.n_heads), ("k", a.n_kv_heads), ("v", a.n_kv_heads))
    )
    for x, heads in parts:
        here = (slice(0, d), slice(first, first + heads), slice(0, a.head_dim))
        first += heads
        yield piece(f"attention.w_{x}.weight", (heads * a.head_dim, d), "attention/w_qkv", here, (1, 0))
    for x, heads in (("q", a.n_heads), ("k", a.n_kv_heads)) if a.qk_norm != c.QKNorm.none else ():
        size = a.head_dim * (heads if a.qk_norm == c.QKNorm.full else 1)
        yield piece(f"attention.{x}_norm.weight", (size,), f"attention/{x}_norm/gain", whole((size,)))
    out = whole((a.n_heads, a.head_dim, d))
    yield piece("attention.w_out.weight", (d, a.n_heads * a.head_dim), "attention/w_out", out, (1, 0))
    for ours, theirs in norm_names(model.norm_placement).items():
        yield piece(f"{theirs}.weight", (d,), f"{ours}/gain", whole((d,)))
    hidden = model.dense_width if dense else moe.shared_hidden
    if hidden:
        mlp = "mlp" if dense else "moe/shared"
        yield piece("shared_experts.w_up_gate", (d, 2 * hidden), f"{mlp}/w_up_gate", whole((d, 2 * hidden)))
        yield piece("shared_experts.w_down", (1, hidden, d), f"{mlp}/w_down", whole((hidden, d)))
    if not dense:
        e, f = moe.num_experts, moe.hidden
        yield piece("routed_experts_router.weight", (e, d), "moe/router/w", whole((d, e)), (1, 0))
        if moe.router.bias:
            yield piece("routed_experts_router.bias", (e,), "moe/router/b", whole((e,)))
        up_gate = whole((e, d, 2 * f))
        yield piece("routed_experts.w_up_gate", (e, 2 * f, d), "moe/experts/w_up_gate", up_gate, (0, 2, 1))
        yield piece("routed_experts.w_down", (e, f, d), "moe/experts/w_down", whole((e, f, d)))


def is_fused(names: Iterable[str]) -> bool:
    """Whether a checkpoint with these tensors has the attention layout `fused_v2`."""
    return any(name.endswith("attention.w_qkv.weight") for name in names)


def import_params(model: c.ModelConfig, tensors: Tensors) -> Params:
    """fp32 params in model order from Olmo-core tensors (weights, gradients or moments: anything weight-shaped).

    Both attention layouts are read (`w_q`, `w_k`, `w_v`, and the fused `w_qkv`); tensors may be flat. Raises
    UserError for a tensor that is missing, left over, or of another size than the model says.
    """
    table = pieces(model, fused=is_fused(tensors))
    sizes = {name: (math.prod(np.shape(tensor)),) for name, tensor in tensors.items()}
    check_tensors(table, sizes, "The Olmo-core checkpoint", flat=True)
    return assemble(abstract_params(model), table, lambda name: np.asarray(tensors[name]))


def norm_names(placement: c.NormPlacement) -> dict[str, str]:
    """Our name of each block norm to Olmo-core's; its `attention_norm` is the inner one when pre, the outer one
    otherwise."""
    if placement == c.NormPlacement.pre:
        return {"attention_in_norm": "attention_norm", "mlp_in_norm": "feed_forward_norm"}
    outer = {"attention_out_norm": "attention_norm", "mlp_out_norm": "feed_forward_norm"}
    if placement == c.NormPlacement.peri:
        outer |= {"attention_in_norm": "attention_input_norm", "mlp_in_norm": "feed_forward_input_norm"}
    return outer
