"""The model of an Olmo-core 3 training run, out of the `config.json` that its trainer writes beside each checkpoint.

    {"model": {"block": {...}, "block_overrides": {"0": {...}}, ...}, "train_module": {...}, ...}
        --blocks resolved by layer: leading dense ones, then one kind of MoE block--> ModelConfig

Every field of `OLMoDDPModelConfig` and of what it holds (Olmo-core 3.0.0) is taken, known to change no number, or
refused by its name in the file, such as `model.block.sequence_mixer.gate`. Fields that are None are left out of the
file, so one that is absent has Olmo-core's default.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from moejax import config as c
from moejax.checkpoint.olmo_core import router_config
from moejax.config_moe import validate_moe
from moejax.errors import UserError

LAST_RESORT_EPS = 1e-5  # of Olmo-core's norms
NOTES = ("_CLASS_", "type")  # how Olmo-core finds its classes again
# Fields that change memory, speed or the initial weights, and no number computed from given ones
INERT = {
    "model": (
        "dtype init_method init_seed embedding_init_std two_batch_overlap recompute_all_blocks_by_chunk "
        "recompute_each_block recompute_block_keys"
    ),
    "block": "checkpoint_attn checkpoint_permute_moe_unpermute checkpoint_second_unpermute ep rowwise_fp8",
    "attention": (
        "use_flash backend dtype use_recompute_qkv_prep mxfp8_projections mxfp8_qkv_projection mxfp8_out_projection "
        "mxfp8_save_qkv_for_backward"
    ),
    "rope": "full_precision",
    "norm": "full_precision dtype",
    "experts": "dtype rowwise_fp8 activation_alpha",
    "router": "dtype record_routing_batch_size use_recompute_fp32_cast",
    "head": "dtype loss_implementation",
}
# What Olmo-core's MoERouterConfigV2 has where the file says nothing, unlike the builder of `olmo_core.DEFAULTS`
ROUTER_DEFAULTS = {
    "normalize_expert_weights": None,
    "restore_weight_scale": False,
    "lb_loss_weight": None,
    "z_loss_weight": None,
}
RMS_NORMS = ("rms", "fused_rms", "cute_rms")  # one formula in three kernels


class _Section:
    """A JSON object of the file and the name it has there; what nobody asks for is refused at the end."""

    def __init__(self, fields: Any, where: str):
        if not isinstance(fields, Mapping):
            raise UserError(f"The Olmo-core config must have a JSON object in {where}.")
        self.fields, self.where, self._asked = fields, where, set(NOTES)

    def take(self, name: str, default: Any = None) -> Any:
        self._asked.add(name)
        return self.fields.get(name, default)

    def need(self, name: str) -> Any:
        if self.fields.get(name) is None:
            raise UserError(f"The Olmo-core config lacks {self.where}.{name}.")
        return self.take(name)

    def section(self, name: str) -> "_Section":
        return _Section(self.need(name), f"{self.where}.{name}")

    def only(self, name: str, values: tuple[Any, ...], default: Any = None) -> Any:
        value = self.take(name, default)
        if value not in values:
            raise self.refusal(name, value)
        return value

    def refusal(self, name: str, value: Any) -> UserError:
        return UserError(
            f"The Olmo-core option {self.where}.{name}={value!r} has no counterpart in moejax; it cannot be imported."
        )

    def finish(self, kind: str) -> None:
        """Raises UserError naming a field that nobody asked for, is set, and is not inert."""
        for name, value in self.fields.items():
            if name not in self._asked and name not in INERT[kind].split() and value not in (None, False, [], {}):
                raise self.refusal(name, value)


def is_trainer_config(settings: Mapping[str, Any]) -> bool:
    """Whether this is the config.json of a training run, and not the arguments of a builder."""
    return isinstance(settings.get("model"), Mapping)


def import_trainer_config(config: Mapping[str, Any]) -> c.ModelConfig:
    """The model that a training run's config describes. Raises UserError naming the option that cannot be expressed."""
    model = _Section(config["model"], "model")
    model.only("name", ("moe_fused_v2",), "default")
    if model.take("freeze_params"):
        raise model.refusal("freeze_params", model.fields["freeze_params"])
    width, layers = model.need("d_model"), model.need("n_layers")
    blocks = _blocks(model, layers)
    kinds: dict[int, dict[str, Any]] = {}
    for block in {id(block.fields): block for block in blocks}.values():
        kinds[id(block.fields)] = _block(block, width)
    by_layer = [kinds[id(block.fields)] for block in blocks]
    n_dense = next((layer for layer, kind in enumerate(by_layer) if kind["moe"]), layers)
    for layer, kind in enumerate(by_layer):
        same = next(k for k in by_layer if (k["moe"] is None) == (kind["moe"] is None))
        shared = ("attention", "eps", "placement")
        if (kind["moe"] is None) != (layer < n_dense):
            raise UserError(
                f"The Olmo-core config has layer {layer} of {layers} dense behind one with experts; moejax has dense "
                "layers first."
            )
        if kind != same or any(kind[name] != by_layer[0][name] for name in shared):
            raise UserError(
                f"The Olmo-core config has in layer {layer} another block than in layer {by_layer.index(same)} "
                "(block_overrides or block_pattern); moejax has one kind of MoE layer, and one attention for all."
            )
    head = model.section("lm_head")
    head.only("name", ("default",), "default")
    head.only("bias", (False,), True)
    eps = {by_layer[0]["eps"], _norm(head.section("layer_norm"))}
    head.finish("head")
    embedding_norm = model.take("embedding_norm")
    if embedding_norm is not None:
        eps.add(_norm(model.section("embedding_norm")))
    if len(eps) > 1:
        raise UserError(f"The Olmo-core config has norms of different eps, {sorted(eps)}; moejax has one for all.")
    moe = next((kind["moe"] for kind in by_layer if kind["moe"]), c.MoEConfig())
    validate_moe(moe)
    dense = next((kind["dense_hidden"] for kind in by_layer if kind["moe"] is None), None)
    scale = model.take("embed_scale")
    imported = c.ModelConfig(
        d_model=width,
        n_layers=layers,
        n_dense_layers=n_dense,
        dense_hidden=dense,
        vocab_size=model.need("vocab_size"),
        norm_placement=by_layer[0]["placement"],
        norm_eps=eps.pop(),
        embed_scale=1.0 if scale is None else scale,
        embed_norm=embedding_norm is not None,
        tie_embeddings=bool(model.take("tie_word_embeddings", False)),
        z_loss=(config.get("train_module") or {}).get("z_loss_multiplier") or 0.0,
        init_std=model.take("init_std", 0.02),
        attention=by_layer[0]["attention"],
        moe=moe,
    )
    model.finish("model")
    return imported


def _blocks(model: _Section, layers: int) -> list[_Section]:
    """The block of each layer: one for all, with overrides by layer, or named ones in a pattern that is repeated."""
    block, pattern, overrides = model.need("block"), model.take("block_pattern"), model.take("block_overrides") or {}
    if pattern:
        unknown = [name for name in pattern if name not in block]
        if unknown:
            raise UserError(f"The Olmo-core config has no model.block.{unknown[0]}, which model.block_pattern names.")
        named = {name: _Section(block[name], f"model.block.{name}") for name in pattern}
        return [named[pattern[layer % len(pattern)]] for layer in range(layers)]
    one = _Section(block, "model.block")
    others = {int(layer): _Section(b, f"model.block_overrides.{layer}") for layer, b in overrides.items()}
    return [others.get(layer, one) for layer in range(layers)]


def _block(block: _Section, width: int) -> dict[str, Any]:
    """attention, eps, placement, moe (None for a dense block), dense_hidden."""
    block.only("name", ("moe_fused_v2",), "default")
    peri, pre = block.take("use_peri_norm", False), block.take("use_pre_norm", False)
    for name in ("attention_residual_alpha", "feed_forward_residual_alpha"):
        block.only(name, (None, 1.0))
    mixer = "sequence_mixer" if "sequence_mixer" in block.fields else "attention"
    attention, eps = _attention(block.section(mixer), width)
    if (of_block := _norm(block.section("layer_norm"))) != eps and eps is not None:
        raise UserError(
            f"The Olmo-core config has norms of different eps in {block.where}, {eps} and {of_block}; moejax has one."
        )
    shared = _experts(block.section("shared_experts"), width) if block.take("shared_experts") else None
    if shared is not None and shared.need("num_experts") != 1:
        raise shared.refusal("num_experts", shared.need("num_experts"))
    moe = None
    if block.take("routed_experts"):
        routed = _experts(block.section("routed_experts"), width)
        router = block.section("routed_experts_router")
        router.only("d_model", (width,), width)
        router.only("num_experts", (routed.need("num_experts"),))
        moe = c.MoEConfig(
            num_experts=routed.need("num_experts"),
            top_k=router.need("top_k"),
            hidden=routed.need("hidden_size"),
            shared_hidden=shared.need("hidden_size") if shared else 0,
            router=_router(router),
        )
    elif shared is None:
        raise UserError(f"The Olmo-core config has neither routed_experts nor shared_experts in {block.where}.")
    block.finish("block")
    placement = c.NormPlacement.peri if peri else c.NormPlacement.pre if pre else c.NormPlacement.reordered
    hidden = shared.need("hidden_size") if shared else None
    return {"attention": attention, "eps": of_block, "placement": placement, "moe": moe, "dense_hidden": hidden}


def _experts(experts: _Section, width: int) -> _Section:
    experts.only("d_model", (width,))
    experts.only("bias", (False, None))
    experts.only("activation", ("swiglu",), "swiglu")
    for name in ("hidden_size", "num_experts"):
        experts.need(name)
    experts.finish("experts")
    return experts


def _router(router: _Section) -> c.RouterConfig:
    emo = router.take("emo")
    known = {**ROUTER_DEFAULTS, **{k: v for k, v in router.fields.items() if k not in NOTES}}
    for name in ("emo", "d_model", "num_experts", "top_k", *INERT["router"].split()):
        known.pop(name, None)
    config = router_config(known, f"{router.where}.")
    if not emo:
        return config
    pools = router.section("emo")
    pools.take("eos_token_id")  # where documents end is said by segments here
    pool = c.PoolConfig(
        smallest=pools.need("min_document_expert_pool"),
        largest=pools.need("max_document_expert_pool"),
        evaluation=pools.take("eval_document_expert_pool") or 0,
    )
    pools.finish("router")
    return dataclasses.replace(config, pool=pool)


def _attention(attention: _Section, width: int) -> tuple[c.AttentionConfig, float | None]:
    """The attention, and the eps of its norms (None without any)."""
    attention.only("name", ("default", "fused_v2"), "default")
    attention.only("bias", (False,), True)
    attention.only("dropout", (None, 0.0))
    heads = attention.take("n_heads", 16)
    qk_norm, eps = c.QKNorm.none, None
    if attention.take("qk_norm"):
        eps = _norm(attention.section("qk_norm"))
        qk_norm = c.QKNorm.head if attention.take("use_head_qk_norm") else c.QKNorm.full
    rope = attention.section("rope")
    rope.only("name", ("default",), "default")
    rope.only("partial_rotary_factor", (1.0,), 1.0)
    theta = rope.take("theta", 500_000)
    rope.finish("rope")
    windows: dict[str, Any] = {}
    if attention.take("sliding_window"):
        window = attention.section("sliding_window")
        windows["window_pattern"] = tuple(window.need("pattern"))
        windows["full_first"] = window.take("force_full_attention_on_first_layer", True)
        windows["full_last"] = window.take("force_full_attention_on_last_layer", True)
    config = c.AttentionConfig(
        n_heads=heads,
        n_kv_heads=attention.take("n_kv_heads") or heads,
        head_dim=attention.take("head_dim") or width // heads,
        qk_norm=qk_norm,
        rope_theta=float(theta),
        **windows,
    )
    attention.finish("attention")
    return config, eps


def _norm(norm: _Section) -> float:
    """eps of an RMSNorm with a gain and no bias."""
    norm.only("name", RMS_NORMS, "default")
    norm.only("bias", (False,), True)
    norm.only("elementwise_affine", (True, None))
    eps = norm.take("eps", LAST_RESORT_EPS)
    norm.finish("norm")
    return eps
