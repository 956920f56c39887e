"""Where each tensor of a Hugging Face checkpoint lies in our weights, for six architectures.

    (model_type, ModelConfig) --pieces--> [Piece("model.layers.0.mlp.gate.weight", ..., "moe_blocks/moe/router/w", ...)]

Linear weights are stored [out, in] there and [in, out] here. Gate and up are tensors of their own there; here they
are one, up first. Names as transformers 5.12 writes them; olmo3moe as Ai2's `modeling_olmo3moe.py` (Olmo-core 3.0.0).
"""

from collections.abc import Iterator

from moejax.checkpoint.mapping import Index, Piece, whole
from moejax.config import ModelConfig, NormPlacement, QKNorm

TRANSPOSED = (1, 0)
# Buffers that old releases of transformers saved and that follow from the config
COMPUTED = (".self_attn.rotary_emb.inv_freq",)


def norm_names(kind: str, placement: NormPlacement) -> dict[str, str]:
    """Our name of each block norm to theirs."""
    if placement == NormPlacement.pre:
        return {"attention_in_norm": "input_layernorm", "mlp_in_norm": "post_attention_layernorm"}
    outer = {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
    if placement == NormPlacement.peri:
        outer |= {"attention_in_norm": "pre_attention_layernorm", "mlp_in_norm": "pre_feedforward_layernorm"}
    return outer


def pieces(kind: str, model: ModelConfig) -> list[Piece]:
    """Every tensor of a checkpoint of this architecture, in the order of the layers."""
    d, v = model.d_model, model.vocab_size
    out = [Piece("model.embed_tokens.weight", (v, d), "embedding/table", whole((v, d)))]
    if model.embed_norm:
        out.append(Piece("model.embed_norm.weight", (d,), "embedding/norm/gain", whole((d,))))
    for layer in range(model.n_layers):
        out += _block(kind, model, layer)
    out.append(Piece("model.norm.weight", (d,), "head/norm/gain", whole((d,))))
    if not model.tie_embeddings:
        out.append(Piece("lm_head.weight", (v, d), "head/w", whole((d, v)), TRANSPOSED))
    return out


def _block(kind: str, model: ModelConfig, layer: int) -> Iterator[Piece]:
    dense = layer < model.n_dense_layers
    stack, row = ("dense_blocks", layer) if dense else ("moe_blocks", layer - model.n_dense_layers)
    theirs, d = f"model.layers.{layer}.", model.d_model

    def piece(name: str, shape: tuple[int, ...], leaf: str, *index: int | slice) -> Piece:
        """Matrices are transposed, vectors are not."""
        axes = TRANSPOSED if len(shape) == 2 else None
        return Piece(theirs + name, shape, f"{stack}/{leaf}", (row, *index), axes)

    yield from _attention(model, piece)
    for ours, name in norm_names(kind, model.norm_placement).items():
        yield piece(f"{name}.weight", (d,), f"{ours}/gain", *whole((d,)))
    if dense:
        yield from _swiglu(piece, "mlp.", "mlp", d, model.dense_width)
        return
    moe = model.moe
    inside = "block_sparse_moe." if kind == "mixtral" else "mlp."
    gate = "router.gate" if kind == "olmo3moe" else "gate"
    yield piece(f"{inside}{gate}.weight", (moe.num_experts, d), "moe/router/w", *whole((d, moe.num_experts)))
    names = ("w3", "w1", "w2") if kind == "mixtral" else ("up_proj", "gate_proj", "down_proj")
    for expert in range(moe.num_experts):
        yield from _swiglu(piece, f"{inside}experts.{expert}.", "moe/experts", d, moe.hidden, (expert,), names)
    if moe.shared_hidden:
        yield from _swiglu(piece, "mlp.shared_expert.", "moe/shared", d, moe.shared_hidden)
        if moe.shared_gate:
            yield piece("mlp.shared_expert_gate.weight", (1, d), "moe/shared/w_gate", *whole((d,)))


def _attention(model: ModelConfig, piece) -> Iterator[Piece]:
    a, d = model.attention, model.d_model
    first = 0
    for x, heads in (("q", a.n_heads), ("k", a.n_kv_heads), ("v", a.n_kv_heads)):
        here, width = slice(first, first + heads), heads * a.head_dim
        first += heads
        yield piece(
            f"self_attn.{x}_proj.weight", (width, d), "attention/w_qkv", slice(0, d), here, slice(0, a.head_dim)
        )
        if a.qkv_bias:
            yield piece(f"self_attn.{x}_proj.bias", (width,), "attention/b_qkv", here, slice(0, a.head_dim))
        if x != "v" and a.qk_norm != QKNorm.none:
            size = width if a.qk_norm == QKNorm.full else a.head_dim
            yield piece(f"self_attn.{x}_norm.weight", (size,), f"attention/{x}_norm/gain", *whole((size,)))
    shape = (a.n_heads, a.head_dim, d)
    yield piece("self_attn.o_proj.weight", (d, a.n_heads * a.head_dim), "attention/w_out", *whole(shape))


def _swiglu(
    piece,
    theirs: str,
    ours: str,
    d: int,
    hidden: int,
    index: Index = (),
    names: tuple[str, str, str] = ("up_proj", "gate_proj", "down_proj"),
) -> Iterator[Piece]:
    """Up, gate and down of one MLP or expert. names: theirs, in this order."""
    up, gate, down = names
    yield piece(f"{theirs}{up}.weight", (hidden, d), f"{ours}/w_up_gate", *index, slice(0, d), slice(0, hidden))
    yield piece(
        f"{theirs}{gate}.weight", (hidden, d), f"{ours}/w_up_gate", *index, slice(0, d), slice(hidden, 2 * hidden)
    )
    yield piece(f"{theirs}{down}.weight", (d, hidden), f"{ours}/w_down", *index, *whole((hidden, d)))
