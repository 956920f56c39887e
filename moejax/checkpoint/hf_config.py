"""A Hugging Face `config.json` and our `ModelConfig`, both ways, for six architectures.

    {"model_type": "olmoe", "hidden_size": 2048, ...} --import_config--> ModelConfig --export_config--> the same keys

Every key is either used, without influence on the numbers, or refused by name; keys that are absent have the default of
transformers 5.12. Export is checked by importing what it wrote: what does not come back cannot be expressed there.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from moejax import config as c
from moejax import config_io
from moejax.errors import UserError

HFConfig = dict[str, Any]

CLASSES = {
    "olmoe": "OlmoeForCausalLM",
    "flex_olmo": "FlexOlmoForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmo3moe": "Olmo3MoeForCausalLM",
}
"""`model_type` to the class that `architectures` names."""

# Keys that change nothing about what the model computes
INERT = frozenset(
    """architectures auto_map bos_token_id dtype emo_eos_token_id eos_token_id initializer_range max_position_embeddings
    attention_gate_full_precision keys_to_ignore_at_inference linear_conv_kernel_dim linear_norm_eps model_type
    output_attentions output_hidden_states output_router_logits pad_token_id return_dict router_aux_loss_coef
    torch_dtype transformers_version use_cache _name_or_path _attn_implementation""".split()
)
# The defaults of transformers 5.12 that are not the same for all
DEFAULTS: dict[str, HFConfig] = {
    "olmoe": dict(rms_norm_eps=1e-5, rope_theta=10_000.0),
    "flex_olmo": dict(rms_norm_eps=1e-6, rope_theta=500_000.0),
    "qwen3_moe": dict(rms_norm_eps=1e-6, rope_theta=10_000.0),
    "qwen2_moe": dict(rms_norm_eps=1e-6, rope_theta=10_000.0),
    "mixtral": dict(rms_norm_eps=1e-5, rope_theta=1_000_000.0),
    "olmo3moe": dict(rms_norm_eps=1e-5, rope_theta=10_000.0),
}
# Fields of ModelConfig that are settings of training or of the machine, not of the architecture
FREE = (
    "moe.router.lb_",
    "moe.router.z_loss",
    "moe.router.assignment",
    "moe.router.jitter",
    "moe.router.score_bias_rate",
    "z_loss",
    "init_std",
    "attention.implementation",
)


class _Keys:
    """Hands out the keys of a config and knows which were never asked for."""

    def __init__(self, config: Mapping[str, Any]):
        self.config, self.used = config, set[str]()

    def get(self, key: str, default: Any = None) -> Any:
        self.used.add(key)
        return self.config.get(key, default)

    def need(self, *names: str) -> Any:
        """The value of the first of these keys that is there."""
        self.used.update(names)
        for name in names:
            if self.config.get(name) is not None:
                return self.config[name]
        raise UserError(f"The Hugging Face config lacks {' or '.join(names)}.")

    def only(self, key: str, *allowed: Any) -> None:
        """The key is absent, or one of these values."""
        value = self.get(key, allowed[0])
        if value not in allowed:
            raise UserError(
                f"The Hugging Face option {key}={value!r} has no counterpart in moejax; only {key}={allowed[0]!r} "
                f"can be "
                "imported."
            )

    def finish(self) -> None:
        for key, value in self.config.items():
            if key not in self.used and key not in INERT and value not in (None, False, [], {}):
                raise UserError(
                    f"The Hugging Face option {key}={value!r} has no counterpart in moejax; it cannot be imported."
                )


def architecture_of(config: Mapping[str, Any]) -> str:
    """`model_type`, if it is one that can be imported; raises UserError naming those that can."""
    kind = config.get("model_type")
    if kind not in CLASSES:
        raise UserError(f"The model type {kind!r} cannot be imported; {', '.join(CLASSES)} can.")
    return kind


def import_config(config: Mapping[str, Any]) -> c.ModelConfig:
    """The model that a `config.json` describes. Raises UserError naming an option that is missing or inexpressible.

    `router_aux_loss_coef` becomes `router.lb_loss`, though transformers takes its loss over all layers at once;
    z-losses are off.
    """
    kind, keys = architecture_of(config), _Keys(config)
    keys.only("hidden_act", "silu")
    keys.only("attention_dropout", 0.0, 0, None)
    keys.only("attention_bias", False)
    layers, d_model, heads = keys.need("num_hidden_layers"), keys.need("hidden_size"), keys.need("num_attention_heads")
    attention_width = keys.get("attention_hidden_size", d_model) if kind == "olmo3moe" else d_model
    dense, dense_hidden = _dense_layers(kind, keys, layers)
    experts = keys.need("n_routed_experts") if kind == "olmo3moe" else keys.need("num_experts", "num_local_experts")
    if kind != "olmo3moe":
        keys.used.update(("num_experts", "num_local_experts"))  # one of them is an alias of the other
    full = kind in ("olmoe", "flex_olmo") or (kind == "olmo3moe" and not keys.get("use_head_qk_norm", False))
    none = kind in ("qwen2_moe", "mixtral")
    attention = c.AttentionConfig(
        n_heads=heads,
        n_kv_heads=keys.get("num_key_value_heads") or heads,
        head_dim=keys.get("head_dim") or attention_width // heads,
        qk_norm=c.QKNorm.none if none else c.QKNorm.full if full else c.QKNorm.head,
        qkv_bias=bool(keys.get("qkv_bias", True)) if kind == "qwen2_moe" else False,
        rope_theta=_rope_theta(kind, keys),
        window_pattern=_windows(kind, keys, layers),
        full_first=False,
        full_last=False,
    )
    moe = c.MoEConfig(
        num_experts=experts,
        top_k=keys.need("num_experts_per_tok"),
        hidden=keys.need("intermediate_size" if kind in ("olmoe", "flex_olmo", "mixtral") else "moe_intermediate_size"),
        shared_hidden=keys.get("shared_expert_intermediate_size") or 0 if kind in ("qwen2_moe", "olmo3moe") else 0,
        shared_gate=kind == "qwen2_moe",
        router=_router(kind, keys),
    )
    model = c.ModelConfig(
        d_model=d_model,
        n_layers=layers,
        n_dense_layers=dense,
        dense_hidden=dense_hidden,
        vocab_size=keys.need("vocab_size"),
        norm_placement=_norm_placement(kind, keys),
        norm_eps=keys.get("rms_norm_eps", DEFAULTS[kind]["rms_norm_eps"]),
        embed_scale=float(keys.get("embed_scale") or 1.0) if kind == "olmo3moe" else 1.0,
        embed_norm=bool(keys.get("embed_norm", False)) if kind == "olmo3moe" else False,
        tie_embeddings=bool(keys.get("tie_word_embeddings", False)),
        z_loss=0.0,
        init_std=keys.get("initializer_range", 0.02),
        attention=attention,
        moe=moe,
    )
    keys.finish()
    return model


def _norm_placement(kind: str, keys: _Keys) -> c.NormPlacement:
    if kind == "olmo3moe":
        return c.NormPlacement.peri if keys.get("use_peri_ln", False) else c.NormPlacement.reordered
    return c.NormPlacement.reordered if kind == "flex_olmo" else c.NormPlacement.pre


def _rope_theta(kind: str, keys: _Keys) -> float:
    """Base of the rotary frequencies; scaled and partial rotary embeddings are refused."""
    parameters = dict(keys.get("rope_parameters") or {})
    scaling = dict(keys.get("rope_scaling") or {})
    keys.only("use_rope", True)
    keys.only("partial_rotary_factor", 1.0, 1, None)
    theta = parameters.pop("rope_theta", None) or keys.get("rope_theta") or DEFAULTS[kind]["rope_theta"]
    keys.used.add("rope_theta")
    scaling.pop("rope_theta", None)
    for name, options in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        for key in ("rope_type", "type"):
            if options.pop(key, "default") != "default":
                raise UserError(
                    f"The Hugging Face option {name}={keys.get(name)!r} scales rotary positions, which moejax cannot."
                )
        options = {key: value for key, value in options.items() if value not in (None, 1.0)}
        if options:
            raise UserError(f"The Hugging Face option {name}.{next(iter(options))} has no counterpart in moejax.")
    return float(theta)


def _dense_layers(kind: str, keys: _Keys, layers: int) -> tuple[int, int | None]:
    """How many leading layers are dense, and their width; raises UserError where dense layers come later."""
    if kind == "olmo3moe":
        given = keys.get("dense_layers_indices")
        dense = sorted(set([0] if given is None else given))
        named, hidden = f"dense_layers_indices={dense}", keys.get("dense_mlp_intermediate_size", 11_008)
        keys.only("dense_layers_use_shared_expert", False)
    elif kind in ("qwen2_moe", "qwen3_moe"):
        step, only = keys.get("decoder_sparse_step", 1), keys.get("mlp_only_layers") or []
        dense = [layer for layer in range(layers) if layer in only or (layer + 1) % step]
        named, hidden = f"decoder_sparse_step={step}, mlp_only_layers={only}", keys.get("intermediate_size")
    else:
        return 0, None
    if dense != list(range(len(dense))):
        raise UserError(
            f"The Hugging Face options {named} put dense layers behind layers with experts; moejax has leading "
            f"dense layers only."
        )
    if not dense:
        return 0, None
    if not hidden:
        raise UserError("The Hugging Face config lacks the width of its dense layers, intermediate_size.")
    return len(dense), hidden


def _windows(kind: str, keys: _Keys, layers: int) -> tuple[int, ...]:
    """Attention window of each layer; empty where all are full."""
    window = keys.get("sliding_window")
    types = keys.get("layer_types")
    if kind in ("qwen2_moe", "qwen3_moe"):
        switched, most = keys.get("use_sliding_window", False), keys.get("max_window_layers", 28)
        window = window if switched else None
        if kind == "qwen2_moe" and types is None:
            types = [
                "sliding_attention" if layer % 2 == 0 and layer < most else "full_attention" for layer in range(layers)
            ]
        if kind == "qwen3_moe":
            types = None
    elif kind == "olmo3moe":
        window = 4096 if "sliding_window" not in keys.config else window
        if types is None:
            types = ["sliding_attention" if layer % 2 == 0 else "full_attention" for layer in range(layers)]
    elif kind != "mixtral":
        window = None
    if not window:
        if types and set(types) - {"full_attention", "sliding_attention"}:
            raise UserError(f"The Hugging Face option layer_types={types} has no counterpart in moejax.")
        return ()
    known = {"full_attention": c.FULL_ATTENTION, "sliding_attention": window}
    if types is not None and (set(types) - set(known) or len(types) != layers):
        raise UserError(f"The Hugging Face option layer_types={types} has no counterpart in moejax.")
    return _shortest(tuple(known[kind] for kind in types) if types is not None else (window,))


def _shortest(windows: tuple[int, ...]) -> tuple[int, ...]:
    """The pattern as the config wants it: empty where all are full, one entry where all are alike."""
    alike = windows[:1] if len(set(windows)) == 1 else windows
    return () if alike == (c.FULL_ATTENTION,) else alike


def _router(kind: str, keys: _Keys) -> c.RouterConfig:
    balance = keys.get("router_aux_loss_coef", 0.01)
    if kind == "olmo3moe":
        original, top_k = keys.get("original_num_experts_per_tok"), keys.need("num_experts_per_tok")
        gating = keys.get("gating_function", "softmax")
        if gating not in ("softmax", "sigmoid"):
            raise UserError(f"The Hugging Face option gating_function={gating!r} has no counterpart in moejax.")
        return c.RouterConfig(
            gating=c.Gating(gating),
            normalize=keys.get("normalize_expert_weights", 1.0),
            restore_scale=bool(keys.get("restore_weight_scale", True)),
            weight_scale=math.sqrt(original / top_k) if original else 1.0,
            lb_loss=balance,
            z_loss=0.0,
        )
    if kind == "mixtral":
        keys.only("router_jitter_noise", 0.0, 0, None)
        normalize = True
    else:
        normalize = bool(keys.get("norm_topk_prob", False))
    return c.RouterConfig(normalize=1.0 if normalize else None, restore_scale=False, lb_loss=balance, z_loss=0.0)


# --- export ----------------------------------------------------------------------------------------------------------


def architectural(model: c.ModelConfig) -> dict[str, Any]:
    """What decides the logits, flat and spelled one way: losses and initialisation left out."""
    pattern = dataclasses.replace(
        model.attention, window_pattern=_shortest(model.windows), full_first=False, full_last=False
    )
    plain = dataclasses.replace(
        model,
        attention=pattern,
        dense_hidden=model.dense_width if model.n_dense_layers else None,
        embed_scale=math.sqrt(model.d_model) if model.embed_scale is None else model.embed_scale,
    )
    return {
        name: value for name, value in config_io.flatten(config_io.to_dict(plain)).items() if not name.startswith(FREE)
    }


def same_architecture(a: c.ModelConfig, b: c.ModelConfig) -> bool:
    return architectural(a) == architectural(b)


def export_config(
    model: c.ModelConfig,
    kind: str | None = None,
    *,
    dtype: str,
    sequence_length: int = 4096,
    end_of_document_id: int | None = None,
) -> HFConfig:
    """A `config.json` from which this model comes back. kind: `model_type`; None takes the first one that can say it.

    dtype: as `dtype` of the config spells it, e.g. bfloat16. end_of_document_id: becomes `eos_token_id`.

    Raises UserError naming the fields that the architecture cannot express.
    """
    if kind is not None and kind not in CLASSES:
        raise UserError(f"The model type {kind!r} cannot be exported; {', '.join(CLASSES)} can.")
    wanted, reasons = architectural(model), {}
    for name in CLASSES if kind is None else (kind,):
        config = _write(model, name) | {
            "bos_token_id": None,  # spelled out: some classes have defaults beyond the vocabulary
            "dtype": dtype,
            "eos_token_id": end_of_document_id,
            "max_position_embeddings": sequence_length,
            "pad_token_id": None,
        }
        back = architectural(import_config(config))
        different = [
            f"model.{field}={config_io._spelled(wanted[field])}" for field in wanted if back[field] != wanted[field]
        ]
        if not different:
            return config
        reasons[name] = ", ".join(different)
    name = min(reasons, key=lambda name: len(reasons[name]))
    what = (
        f"{name} cannot express"
        if kind
        else f"No exported architecture can express this model: the nearest, {name}, cannot express"
    )
    raise UserError(f"{what} {reasons[name]}.")


def _write(model: c.ModelConfig, kind: str) -> HFConfig:
    """The keys of this architecture, as near to the model as they go."""
    a, moe, router = model.attention, model.moe, model.moe.router
    window = next((w for w in model.windows if w != c.FULL_ATTENTION), None)
    dense = list(range(model.n_dense_layers))
    types = ["full_attention" if w == c.FULL_ATTENTION else "sliding_attention" for w in model.windows]
    config: HFConfig = {
        "architectures": [CLASSES[kind]],
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": model.d_model,
        "initializer_range": model.init_std,
        "model_type": kind,
        "num_attention_heads": a.n_heads,
        "num_experts_per_tok": moe.top_k,
        "num_hidden_layers": model.n_layers,
        "num_key_value_heads": a.n_kv_heads,
        "rms_norm_eps": model.norm_eps,
        "rope_parameters": {"rope_theta": a.rope_theta, "rope_type": "default"},
        "rope_theta": a.rope_theta,
        "router_aux_loss_coef": router.lb_loss,
        "tie_word_embeddings": model.tie_embeddings,
        "use_cache": True,
        "vocab_size": model.vocab_size,
    }
    normalised = router.normalize is not None
    if kind in ("olmoe", "flex_olmo"):
        return config | {"intermediate_size": moe.hidden, "num_experts": moe.num_experts, "norm_topk_prob": normalised}
    if kind == "mixtral":
        return config | {
            "head_dim": a.head_dim,
            "intermediate_size": moe.hidden,
            "num_local_experts": moe.num_experts,
            "sliding_window": window,
        }
    if kind in ("qwen3_moe", "qwen2_moe"):
        config |= {
            "decoder_sparse_step": 1,
            "intermediate_size": model.dense_width,
            "mlp_only_layers": dense,
            "moe_intermediate_size": moe.hidden,
            "norm_topk_prob": normalised,
            "num_experts": moe.num_experts,
            "sliding_window": window,
            "use_sliding_window": window is not None,
        }
        if kind == "qwen3_moe":
            return config | {"head_dim": a.head_dim}
        return config | {
            "layer_types": types,
            "qkv_bias": a.qkv_bias,
            "shared_expert_intermediate_size": moe.shared_hidden,
        }
    original = moe.top_k * router.weight_scale**2
    return config | {
        "attention_hidden_size": a.n_heads * a.head_dim,
        "dense_layers_indices": dense,
        "dense_mlp_intermediate_size": model.dense_width,
        "embed_norm": model.embed_norm,
        "embed_scale": math.sqrt(model.d_model) if model.embed_scale is None else model.embed_scale,
        "gating_function": router.gating.value,
        "head_dim": a.head_dim,
        "layer_types": types,
        "moe_intermediate_size": moe.hidden,
        "n_routed_experts": moe.num_experts,
        "normalize_expert_weights": router.normalize,
        "original_num_experts_per_tok": None if router.weight_scale == 1.0 else round(original),
        "restore_weight_scale": router.restore_scale,
        "shared_expert_intermediate_size": moe.shared_hidden or None,
        "sliding_window": window,
        "use_head_qk_norm": a.qk_norm == c.QKNorm.head,
        "use_peri_ln": model.norm_placement == c.NormPlacement.peri,
    }
