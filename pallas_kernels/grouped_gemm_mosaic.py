"""The "mosaic" implementation of the grouped GEMM: which operands and GPUs have a kernel, and a call of the right one.

    operands --reason against?--> the device that is compiled for --> Hopper or Blackwell kernel, for its number of SMs

The device is asked for when a program is traced: the mesh in context says it, also for a GPU that is not there
(`jax.set_mesh` of a compile-only topology), else the default device does.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend import backend

from pallas_kernels import grouped_gemm_blackwell, grouped_gemm_hopper, tile_table
from pallas_kernels.grouped_gemm_epilogue import SWIZZLE
from pallas_kernels.grouped_gemm_tiles import OCTET, Tiles

# Of what is sold; real devices state their compute capability, devices of an abstract mesh only their name.
_KINDS = {
    "hopper": ("H100", "H200", "H800", "H20", "GH200"),
    "blackwell": ("B200", "B300", "GB200", "GB300"),
}
_MODULES = {"hopper": grouped_gemm_hopper, "blackwell": grouped_gemm_blackwell}


class Target(NamedTuple):
    architecture: str  # "hopper" or "blackwell"
    num_sms: int
    kind: str = ""  # as the device names itself


def target() -> Target | None:
    """The GPU that a program traced now is meant for, if there are kernels for it."""
    abstract, default = jax.sharding.get_abstract_mesh().abstract_device, backend.get_default_device()
    device = default if abstract is None or abstract.device_kind == default.device_kind else abstract
    architecture = architecture_of(device)
    return Target(architecture, _num_sms(device), device.device_kind) if architecture else None


def reason_against(dtype: jnp.dtype, *widths: int) -> str | None:
    """Why operands of this type, with these numbers of columns (D and F), have no kernel on any GPU; None if they have.

    float32 has none: wgmma and tcgen05 would round its products to TF32, 10 bits of mantissa.
    """
    if dtype != jnp.bfloat16:
        return f"takes bfloat16 operands, got {dtype}"
    if any(width % SWIZZLE for width in widths):
        return f"takes D and F that are multiples of {SWIZZLE}, got {' and '.join(map(str, widths))}"
    return None


def grouped_gemm_mosaic(lhs_RD: Array, rhs: Array, group_sizes_E: Array, *, transpose_rhs: bool) -> Array:
    """`grouped_gemm` by the kernel of the target; rhs is [E, D, F], or [E, F, D] if `transpose_rhs`.

    Rows are added up to a multiple of 8, which copies lhs: a buffer of such a length costs nothing.
    """
    chip = _require(lhs_RD.dtype, *rhs.shape[1:])
    rows, padded = lhs_RD.shape[0], _whole_octets(lhs_RD)
    depth, width = rhs.shape[1:][:: -1 if transpose_rhs else 1]
    product = "gemm_transposed" if transpose_rhs else "gemm"
    out_RF = kernel(product, chip, depth, width)(padded, rhs, group_sizes_E)
    return lax.slice_in_dim(out_RF, 0, rows)


def grouped_gemm_weight_grad_mosaic(lhs_RD: Array, grad_RF: Array, group_sizes_E: Array) -> Array:
    """`grouped_gemm_weight_grad` by the kernel of the target; rows as in `grouped_gemm_mosaic`."""
    chip = _require(lhs_RD.dtype, lhs_RD.shape[1], grad_RF.shape[1])
    operands = _whole_octets(lhs_RD), _whole_octets(grad_RF)
    return kernel("weight_grad", chip, lhs_RD.shape[1], grad_RF.shape[1])(*operands, group_sizes_E)


def grouped_swiglu_mosaic(lhs_RD: Array, rhs: Array, group_sizes_E: Array, *, keep: bool) -> tuple[Array, ...]:
    """(hidden [R, F],), or (hidden, up_gate [R, 2F]) if `keep`; rhs is [E, D, 2F], up before gate.

    F must be a multiple of 64, as the width of any operand. Rows as in `grouped_gemm_mosaic`.
    """
    chip = _require(lhs_RD.dtype, lhs_RD.shape[1], rhs.shape[2] // 2)
    rows, padded = lhs_RD.shape[0], _whole_octets(lhs_RD)
    outs = kernel("swiglu", chip, *rhs.shape[1:])(padded, rhs, group_sizes_E, keep=keep)
    return tuple(lax.slice_in_dim(out, 0, rows) for out in outs)


def kernel(product: str, chip: Target | None = None, depth: int = 0, width: int = 0) -> Callable[..., Any]:
    """The kernel of one of `tile_table.PRODUCTS` for the target, with the tiles of its table for [depth, width] if
    given."""
    chip = chip or target()
    if chip is None:
        raise ValueError("There is no GPU here that has kernels.")
    module = _MODULES[chip.architecture]
    name, default, options = {
        "gemm": ("grouped_gemm", "GEMM_TILES", {"transpose_rhs": False}),
        "gemm_transposed": ("grouped_gemm", "GEMM_TILES", {"transpose_rhs": True}),
        "swiglu": ("grouped_swiglu", "GEMM_TILES", {}),
        "weight_grad": ("grouped_gemm_weight_grad", "WEIGHT_GRAD_TILES", {}),
    }[product]
    tiles: Tiles = getattr(module, default)
    if depth:
        tiles = tile_table.tiles_for(tile_table.chip_of(chip.kind), product, depth, width, tiles)
    function = getattr(module, f"{name}_{chip.architecture}")
    return functools.partial(_lowered_once(function), num_sms=chip.num_sms, tiles=tiles, **options)


@functools.cache
def _lowered_once(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Jitted, so that a program lowers each kernel once for each shape, not at each of its calls: a lowering takes
    2.5 s of processor time, and a step without stages has 14 calls (2026-11)."""
    settings = [name for name, p in inspect.signature(kernel).parameters.items() if p.kind == p.KEYWORD_ONLY]
    return jax.jit(kernel, static_argnames=settings)


def _require(dtype: jnp.dtype, *widths: int) -> Target:
    against, chip = reason_against(dtype, *widths), target()
    if against:
        raise ValueError(f"Grouped GEMM implementation 'mosaic' {against}: use 'auto' or 'xla' for these operands.")
    if chip is None:
        kind = backend.get_default_device().device_kind
        raise ValueError(
            "Grouped GEMM implementation 'mosaic' needs an NVIDIA GPU of compute capability 9.0 or 10.x, and this "
            f"program is traced for {kind!r}: use 'auto'."
        )
    return chip


def _whole_octets(rows_RD: Array) -> Array:
    missing = -rows_RD.shape[0] % OCTET
    return jnp.pad(rows_RD, ((0, missing), (0, 0))) if missing else rows_RD


def architecture_of(device: Any) -> str | None:
    """Whose kernels a device runs, "hopper" or "blackwell"; None if nobody's."""
    capability = str(getattr(device, "compute_capability", ""))
    if capability:
        return {"9.0": "hopper", "10.0": "blackwell", "10.3": "blackwell"}.get(capability)
    words = device.device_kind.split()
    if words[:1] != ["NVIDIA"]:
        return None
    return next((name for name, kinds in _KINDS.items() if set(kinds) & set(words)), None)


def _num_sms(device: Any) -> int:
    return device.num_cores if isinstance(device, jax.sharding.AbstractDevice) else device.core_count
