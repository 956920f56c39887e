"""Olmo-core 3 to moejax: settings and weights of its MoE-v2 model (`OLMoDDPModel`).

    settings {"d": 64, "experts": 16, ...} --import_model_config--> ModelConfig
    tensors {"blocks.1.routed_experts.w_down": ...} --import_params--> params in model order      (export_params: back)

Settings are the arguments of the released model builder (`MoERouterConfigV2` options by their own names). Whatever is
asked for and cannot be expressed here is refused by name. Every tensor is accounted for: none left over, none invented.
Names and shapes: Olmo-core 3.0.0 `nn/ddp/block.py`, `nn/moe/v2`; the router is flat, experts pack up before gate.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from moejax import config as c
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
    router = c.RouterConfig(
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
    reader = _Reader(buffers)
    rows = [reader.take(name) for name in names]
    reader.finish()
    for name, row in zip(names, rows, strict=True):
        if row.shape != (model.moe.num_experts,):
            raise UserError(
                f"The Olmo-core buffer {name} has shape {row.shape}; the model has {model.moe.num_experts} experts."
            )
    return np.stack(rows) if rows else None


def import_params(model: c.ModelConfig, tensors: Tensors) -> Params:
    """fp32 params in model order from Olmo-core tensors (weights, gradients or moments: anything weight-shaped).

    Both attention layouts are read (`w_q`, `w_k`, `w_v`, and the fused `w_qkv`). Raises UserError for a tensor that is
    missing, left over, or of another size than the model says.
    """
    shapes = abstract_params(model)
    reader = _Reader(tensors)
    params: Params = {
        "embedding": {"table": reader.take("embeddings.weight")},
        "head": {
            "norm": {"gain": reader.take("lm_head.norm.weight")},
            "w": reader.take("lm_head.w_out.weight", _transposed),
        },
    }
    if model.embed_norm:
        params["embedding"]["norm"] = {"gain": reader.take("embedding_norm.weight")}
    blocks = [_import_block(model, reader, layer) for layer in range(model.n_layers)]
    for name, part in (
        ("dense_blocks", blocks[: model.n_dense_layers]),
        ("moe_blocks", blocks[model.n_dense_layers :]),
    ):
        if part:
            params[name] = jax.tree.map(lambda *rows: np.stack(rows), *part)
    reader.finish()

    def fit(path: Any, shape: jax.ShapeDtypeStruct, value: np.ndarray) -> np.ndarray:
        if value.size != math.prod(shape.shape):
            where = ".".join(key.key for key in path)
            raise UserError(
                f"The Olmo-core tensors for {where} hold {value.size} numbers; the model has {shape.shape} there."
            )
        return np.ascontiguousarray(value.reshape(shape.shape), np.float32)

    return jax.tree_util.tree_map_with_path(fit, shapes, params)


def _transposed(x: np.ndarray) -> np.ndarray:
    return x.T


class _Reader:
    """Hands out tensors by name and knows which were never asked for."""

    def __init__(self, tensors: Tensors):
        self.tensors, self.used = tensors, set[str]()

    def take(self, name: str, transform: Callable[[np.ndarray], np.ndarray] = lambda x: x) -> np.ndarray:
        if name not in self.tensors:
            raise UserError(f"The Olmo-core checkpoint has no tensor {name}, which this model needs.")
        self.used.add(name)
        return transform(np.asarray(self.tensors[name], np.float32))

    def finish(self) -> None:
        left = sorted(set(self.tensors) - self.used)
        if left:
            raise UserError(
                f"The Olmo-core checkpoint has {len(left)} tensors that this model has no place for, such as {left[0]}."
            )


def _import_block(model: c.ModelConfig, reader: _Reader, layer: int) -> Params:
    block, a, moe = f"blocks.{layer}.", model.attention, model.moe
    d, e = model.d_model, moe.num_experts
    if block + "attention.w_qkv.weight" in reader.tensors:
        rows_QD = reader.take(block + "attention.w_qkv.weight")
    else:
        rows_QD = np.concatenate([reader.take(f"{block}attention.w_{x}.weight") for x in "qkv"])
    attention: Params = {
        "w_qkv": rows_QD.T.reshape(d, -1, a.head_dim),
        "w_out": reader.take(block + "attention.w_out.weight", _transposed).reshape(a.n_heads, a.head_dim, d),
    }
    if a.qk_norm != c.QKNorm.none:
        for x in "qk":
            attention[f"{x}_norm"] = {"gain": reader.take(f"{block}attention.{x}_norm.weight")}
    params: Params = {"attention": attention}
    for ours, theirs in norm_names(model.norm_placement).items():
        params[ours] = {"gain": reader.take(f"{block}{theirs}.weight")}
    shared = None
    if layer < model.n_dense_layers or moe.shared_hidden:
        shared = {
            "w_up_gate": reader.take(block + "shared_experts.w_up_gate"),
            "w_down": reader.take(block + "shared_experts.w_down", lambda x: x.reshape(-1, d)),
        }
    if layer < model.n_dense_layers:
        params["mlp"] = shared
        return params
    router = {"w": reader.take(block + "routed_experts_router.weight", lambda x: x.reshape(e, d).T)}
    if moe.router.bias:
        router["b"] = reader.take(block + "routed_experts_router.bias")
    params["moe"] = {
        "router": router,
        "experts": {
            "w_up_gate": reader.take(block + "routed_experts.w_up_gate", lambda x: x.swapaxes(1, 2)),
            "w_down": reader.take(block + "routed_experts.w_down"),
        },
    }
    if shared is not None:
        params["moe"]["shared"] = shared
    return params


def norm_names(placement: c.NormPlacement) -> dict[str, str]:
    """Our name of each block norm to Olmo-core's; its `attention_norm` is the inner one when pre, the outer one otherwise."""
    if placement == c.NormPlacement.pre:
        return {"attention_in_norm": "attention_norm", "mlp_in_norm": "feed_forward_norm"}
    outer = {"attention_out_norm": "attention_norm", "mlp_out_norm": "feed_forward_norm"}
    if placement == c.NormPlacement.peri:
        outer |= {"attention_in_norm": "attention_input_norm", "mlp_in_norm": "feed_forward_input_norm"}
    return outer
