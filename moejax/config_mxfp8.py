"""The part of the configuration that is about MXFP8: what is kept, sent and multiplied in 8 bits (docs/mxfp8.md).

`config.py` holds the tree and re-exports these names; the rules stand in its docstring.
"""

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moejax.config_fields import option, require

if TYPE_CHECKING:
    from moejax.config import Config

BLOCK = 32  # numbers that share a scale; pallas_kernels.mxfp8.BLOCK, which importing here would start JAX


class Format(enum.StrEnum):
    off = "off"  # in precision.compute
    mxfp8 = "mxfp8"


class ScaleRule(enum.StrEnum):
    rceil = "rceil"  # the smallest scale at which nothing saturates
    floor = "floor"  # the power of two of the largest number: up to an eighth of it may saturate


class SavedHidden(enum.StrEnum):
    """How the experts' first product waits for the backward."""

    mxfp8 = "mxfp8"
    compute = "compute"  # in precision.compute


class Hardware(enum.StrEnum):
    auto = "auto"  # tensor cores that take MXFP8 where the GPU has them (B200, B300), else the same numbers emulated
    emulate = "emulate"  # emulated everywhere
    required = "required"  # an error where the devices have none


@dataclass(frozen=True)
class MXFP8Config:
    experts: Format = option(
        Format.off, "Routed experts: their exchanges, and their products forward and for data gradients: off or mxfp8."
    )
    shared_experts: Format = option(Format.off, "Shared expert and dense MLPs, the same products: off or mxfp8.")
    attention: Format = option(Format.off, "Projections to queries, keys, values, and out: off or mxfp8.")
    exclude_layers: tuple[int, ...] = option(
        (), "Layers (by index, 0 the first) that stay in precision.compute; needs keep_bf16=true."
    )
    saved_hidden: SavedHidden = option(
        SavedHidden.mxfp8, "How the experts' first product waits for the backward: mxfp8 or compute."
    )
    keep_bf16: bool = option(
        False, "Keep the weights in precision.params too, beside the MXFP8 copies that replace them."
    )
    scale: ScaleRule = option(ScaleRule.rceil, "Rule of the scales: rceil or floor.")
    hardware: Hardware = option(
        Hardware.auto, "auto (tensor cores that take MXFP8, else emulated), emulate, or required (else an error)."
    )

    @property
    def on(self) -> bool:
        return Format.mxfp8 in (self.experts, self.shared_experts, self.attention)


def multiplied_widths(config: "Config") -> dict[str, int]:
    """Every width of a product in MXFP8, by the field that it comes from."""
    mx, model = config.precision.mxfp8, config.model
    attention, moe = model.attention, model.moe
    widths = {"model.d_model": model.d_model}
    if mx.experts == Format.mxfp8:
        widths["model.moe.hidden"] = moe.hidden
    if mx.shared_experts == Format.mxfp8:
        if moe.shared_hidden and model.n_moe_layers:
            widths["model.moe.shared_hidden"] = moe.shared_hidden
        if model.n_dense_layers:
            widths["the dense MLPs' width"] = model.dense_width
    if mx.attention == Format.mxfp8:
        widths["model.attention.n_heads * head_dim"] = attention.n_heads * attention.head_dim
        packed = (attention.n_heads + 2 * attention.n_kv_heads) * attention.head_dim
        widths["model.attention.(n_heads + 2 n_kv_heads) * head_dim"] = packed
    return widths


def validate_mxfp8(config: "Config") -> None:
    """Refuse impossible combinations, one sentence each; what depends on the devices is checked by `parallel.mxfp8`."""
    mx, model = config.precision.mxfp8, config.model
    if not mx.on:
        require(
            mx.hardware != Hardware.required and not mx.exclude_layers,
            "precision.mxfp8.hardware=required and exclude_layers are about MXFP8, and none of experts, shared_experts "
            "and attention is mxfp8; set precision.mxfp8.experts=mxfp8.",
        )
        return
    require(
        config.parallel.strategy.value != "fsdp",
        "precision.mxfp8 keeps its copies of a weight whole, and parallel.strategy=fsdp cuts every weight; set "
        "strategy=resident, or leave MXFP8 off.",
    )
    require(
        mx.experts == Format.off or model.n_moe_layers > 0,
        "precision.mxfp8.experts=mxfp8 has no experts to be about, since every layer is dense; set it to off.",
    )
    shared = model.moe.shared_experts
    require(
        mx.shared_experts == Format.off or shared == 1,
        f"precision.mxfp8.shared_experts=mxfp8 is for one shared expert, and model.moe.shared_experts={shared} are "
        "mixed in one product; set it to off.",
    )
    for name, width in multiplied_widths(config).items():
        require(
            width % BLOCK == 0,
            f"{name}={width} is not a multiple of {BLOCK}, the block of MXFP8; change it, or do without MXFP8.",
        )
    require(
        all(0 <= layer < model.n_layers for layer in mx.exclude_layers),
        f"precision.mxfp8.exclude_layers={list(mx.exclude_layers)} must be indices of the model.n_layers="
        f"{model.n_layers} layers, 0 the first.",
    )
    require(
        not mx.exclude_layers or mx.keep_bf16,
        "precision.mxfp8.exclude_layers needs the plain weights of these layers; set precision.mxfp8.keep_bf16=true.",
    )
