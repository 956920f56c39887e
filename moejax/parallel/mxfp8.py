"""Which weights are kept in MXFP8, where their copies live, and what of it the devices do themselves.

    master (fp32, its part on each device) --quantise--> copies, cut as the master --all-gather of bytes--> copies, as
    weights are

Quantised before they are gathered: a byte a number goes over the wire instead of four. A block of 32 is cut nowhere,
unless a device's part is shorter, and XLA then moves what it must.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from moejax.config import Config, Dtype, Format, Hardware, SavedHidden
from moejax.config_mxfp8 import multiplied_widths
from moejax.errors import UserError
from moejax.models.quantised import MXRecipe, QuantisedWeight, quantise_weight
from moejax.models.transformer import Params
from pallas_kernels import MXArray
from pallas_kernels.grouped_gemm_mosaic import architecture_of

# Path in a block's parameters: the switch, and how many of the axes after layers and experts are contracted forward.
WEIGHTS = {
    ("moe", "experts", "w_up_gate"): ("experts", 1),
    ("moe", "experts", "w_down"): ("experts", 1),
    ("moe", "shared", "w_up_gate"): ("shared_experts", 1),
    ("moe", "shared", "w_down"): ("shared_experts", 1),
    ("mlp", "w_up_gate"): ("shared_experts", 1),
    ("mlp", "w_down"): ("shared_experts", 1),
    ("attention", "w_qkv"): ("attention", 1),
    ("attention", "w_out"): ("attention", 2),
}
LEADING = ("layers", "experts")
KERNEL_WIDTH = 128  # what the widths of a product on tensor cores are multiples of


def recipe(config: Config) -> MXRecipe | None:
    """How products in MXFP8 are computed; None where there are none."""
    mx = config.precision.mxfp8
    if not mx.on:
        return None
    implementation = "emulated" if mx.hardware == Hardware.emulate else "auto"
    return MXRecipe(mx.scale.value, mx.saved_hidden == SavedHidden.mxfp8, implementation)


def excluded(config: Config) -> Array | None:
    """bool[layers]; None where no layer is excluded."""
    layers = config.precision.mxfp8.exclude_layers
    return jnp.zeros(config.model.n_layers, bool).at[jnp.array(layers)].set(True) if layers else None


def has_hardware(mesh: Mesh) -> bool:
    """Whether the tensor cores of these devices take MXFP8 as it is."""
    return all(architecture_of(device) == "blackwell" for device in mesh.devices.flat)


def reason_to_emulate(config: Config, mesh: Mesh) -> str | None:
    """Why products are not on tensor cores, in one clause; None if they are."""
    if config.precision.mxfp8.hardware == Hardware.emulate:
        return "precision.mxfp8.hardware=emulate"
    if not has_hardware(mesh):
        return f"{mesh.devices.flat[0].device_kind} has no tensor cores for MXFP8 (B200 and B300 have)"
    if config.precision.compute != Dtype.bfloat16:
        return f"the kernel makes bfloat16, and precision.compute={config.precision.compute.value}"
    for name, width in multiplied_widths(config).items():
        if width % KERNEL_WIDTH:
            return f"the kernel takes widths that are multiples of {KERNEL_WIDTH}, and {name}={width}"
    return None


def check_hardware(config: Config, mesh: Mesh) -> None:
    """Raises UserError if the config insists on hardware that is not there, or that cannot be used."""
    reason = reason_to_emulate(config, mesh)
    if config.precision.mxfp8.hardware == Hardware.required and reason is not None:
        raise UserError(
            f"precision.mxfp8.hardware=required, but {reason}; change that, or set it to auto, and the same numbers "
            "are emulated."
        )


def sentence(config: Config, mesh: Mesh) -> str | None:
    """What is in MXFP8 and what computes it, for the start of a run; None without any."""
    mx = config.precision.mxfp8
    if not mx.on:
        return None
    names = {"experts": "experts and their exchanges", "shared_experts": "shared experts", "attention": "attention"}
    what = ", ".join(words for name, words in names.items() if getattr(mx, name) == Format.mxfp8)
    left_out = f", but for layers {', '.join(map(str, mx.exclude_layers))}" if mx.exclude_layers else ""
    reason = reason_to_emulate(config, mesh)
    how = f"products on the tensor cores of {mesh.devices.flat[0].device_kind}"
    if reason is not None:
        how = f"products emulated exactly ({reason}): bytes are saved, time is not"
    beside = "beside" if mx.keep_bf16 else "instead of"
    weights = f"weights {beside} those in {config.precision.params.value}"
    return f"MXFP8 ({mx.scale.value}): {what}{left_out}; {how}; {weights}."


def _chosen(config: Config, params: Params, axes: Params) -> Iterator[tuple[str, tuple[str, ...], int, int]]:
    """(stack, path, leading axes, contracted axes) of every weight that is kept in MXFP8."""
    mx = config.precision.mxfp8
    for stack in ("dense_blocks", "moe_blocks"):
        for path, (switch, contracted) in WEIGHTS.items():
            if getattr(mx, switch) == Format.mxfp8 and _at(params.get(stack), path) is not None:
                names = _at(axes[stack], path)
                yield stack, path, sum(name in LEADING for name in names), contracted


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def _with(tree: Any, path: tuple[str, ...], value: Any) -> Any:
    return {**tree, path[0]: _with(tree[path[0]], path[1:], value)} if path else value


def specs(config: Config, abstract: Params, axes: Params, plain: PyTree[PartitionSpec]) -> PyTree[PartitionSpec]:
    """Of the working weights, from those of plain ones."""
    for stack, path, lead, _ in _chosen(config, abstract, axes):
        spec = _at(plain[stack], path)
        cut: Any = PartitionSpec(*tuple(spec)[:lead], None, None)
        kept = spec if config.precision.mxfp8.keep_bf16 else None
        copies = QuantisedWeight(MXArray(cut, cut), MXArray(cut, cut), kept, _at(abstract[stack], path).shape[lead:])
        plain = _with(plain, (stack, *path), copies)
    return plain


def quantise(
    config: Config, mesh: Mesh, master: Params, axes: Params, plain: Params, placed: PyTree[PartitionSpec]
) -> Params:
    """The working weights: `plain` ones with MXFP8 copies, made from the fp32 master, in the place of some.

    placed: `specs`. Inside jit.
    """
    mx = config.precision.mxfp8
    for stack, path, lead, contracted in _chosen(config, master, axes):
        kept = _at(plain[stack], path) if mx.keep_bf16 else None
        copies = quantise_weight(_at(master[stack], path), lead, contracted, kept, mx.scale.value)
        plain = _with(plain, (stack, *path), _place(copies, _at(placed[stack], path), mesh))
    return plain


def _place(copies: QuantisedWeight, spec: QuantisedWeight, mesh: Mesh) -> QuantisedWeight:
    def one(array: MXArray, where: MXArray) -> MXArray:
        put = lambda x, s: lax.with_sharding_constraint(x, NamedSharding(mesh, s))  # noqa: E731
        return MXArray(put(array.data, where.data), put(array.scales, where.scales), array.axis)

    return QuantisedWeight(
        one(copies.forward, spec.forward), one(copies.backward, spec.backward), copies.plain, copies.tail
    )


def bytes_on_device(params: Params, placed: PyTree[PartitionSpec], mesh: Mesh) -> int:
    """Of working weights with these specs; params: arrays or their shapes."""
    sizes = dict(mesh.shape)

    def local(x: Array, spec: PartitionSpec) -> int:
        cut = 1
        for axes in (axes for axes in spec if axes is not None):
            cut *= math.prod(sizes[axis] for axis in ((axes,) if isinstance(axes, str) else axes))
        return x.size * x.dtype.itemsize // cut

    is_spec = lambda s: isinstance(s, PartitionSpec)  # noqa: E731
    placed_leaves = jax.tree.leaves(placed, is_leaf=is_spec)
    return sum(local(x, spec) for x, spec in zip(jax.tree.leaves(params), placed_leaves, strict=True))
