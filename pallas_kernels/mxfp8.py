"""MXFP8: blocks of 32 numbers that share a power of two. The format, and its one rounding rule.

    x --largest |x| of each block--> scale 2^s, a byte s + 127 (E8M0)
    x / 2^s --round to nearest even, saturate at 448--> a byte each (E4M3)                  x is about  data * 2^s

With a the largest magnitude of a block, a = m 2^e and 1 <= m < 2:

    rceil   s = ceil(log2(a / 448)) = e - 8, and one more if m > 1.75       nothing saturates
    floor   s = e - 8                                                       from 448 to 512 (times 2^s) becomes 448

s is at least -127. A block of zeros has s = -127. Numbers below 2^-126 count as zero, in and out: CPUs and GPUs that
flush them give the same bits as those that do not. A block that holds NaN or infinity is NaN as a whole (byte 255, the
NaN of E8M0): a tensor core says the same, and nothing that went wrong looks like a number afterwards.

Source: OCP Microscaling Formats 1.0; the two rules as in Olmo-core 3 (`OLMO_MXFP8_SCALE_MODE`), rceil its default.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

BLOCK = 32
LARGEST = 448.0  # of E4M3
RULES = ("rceil", "floor")
_NAN_SCALE = 255
_EXPONENT, _MANTISSA = 0x7F800000, 0x007FFFFF  # of float32
_THREE_QUARTERS = 0x00600000


@functools.partial(jax.tree_util.register_dataclass, data_fields=("data", "scales"), meta_fields=("axis",))
class MXArray:
    """Numbers in MXFP8; a pytree, so that it travels, is stacked and is sliced along its leading axes as one.

    data: float8_e4m3fn[..., N, ...]. scales: uint8[..., N / 32, ...], E8M0: the factor of a block is 2^(scale - 127).
    axis: the axis of the blocks, counted from the end (negative), so that leading axes may come and go.
    """

    def __init__(self, data: Any, scales: Any, axis: int = -1):
        self.data, self.scales, self.axis = data, scales, axis

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def ndim(self) -> int:
        return len(self.data.shape)

    def transposed(self) -> "MXArray":
        """The last two axes exchanged; only views change, no number does."""
        other = {-1: -2, -2: -1}.get(self.axis, self.axis)
        return MXArray(jnp.swapaxes(self.data, -1, -2), jnp.swapaxes(self.scales, -1, -2), other)

    def __repr__(self) -> str:
        return f"MXArray(data={self.data!r}, scales={self.scales!r}, axis={self.axis})"


def quantize(x: Array, axis: int = -1, *, rule: str = "rceil") -> MXArray:
    """x in MXFP8, blocks along `axis`, whose length is a multiple of 32. x: float32 or bfloat16, any shape.

    Raises ValueError for a length that is no multiple, or for an unknown rule; TypeError for another type.
    """
    axis = _check(x, axis, rule)
    return _in_blocks(x.astype(jnp.float32), axis, rule)


def quantize_two_ways(x: Array, *, rule: str = "rceil") -> tuple[MXArray, MXArray]:
    """x[..., M, N] with blocks along rows (axis -1) and with blocks along columns (axis -2), from one read of x.

    A matrix meets two products that contract over different axes: x @ w and, backward, dy @ w^T.
    """
    return quantize(x, -1, rule=rule), quantize(x, -2, rule=rule)


def dequantize(array: MXArray, dtype: Any = jnp.float32) -> Array:
    """data * 2^(scale - 127) in `dtype`; exact in bfloat16 and float32, but for what falls below 2^-126 (zero)."""
    numbers = from_e4m3(array.data)
    blocks = _split(numbers, array.axis)
    scales = jnp.expand_dims(array.scales.astype(jnp.int32), array.axis)
    # two factors, since 2^-127 alone is no normal float32
    half = scales >> 1
    blocks = blocks * _power(half - 63) * _power(scales - half - 64)
    blocks = jnp.where(scales == _NAN_SCALE, jnp.nan, blocks)
    return blocks.reshape(numbers.shape).astype(dtype)


def from_e4m3(data: Array) -> Array:
    """float8_e4m3fn to float32, exact; by integer arithmetic, 11 times as fast as XLA:CPU's own cast (2026-11)."""
    byte = lax.bitcast_convert_type(data, jnp.uint8).astype(jnp.uint32)
    magnitude, sign = byte & 0x7F, (byte & 0x80) << 24
    normal = lax.bitcast_convert_type((magnitude << 20) + (120 << 23), jnp.float32)
    value = jnp.where(magnitude < 8, magnitude.astype(jnp.float32) * 2.0**-9, normal)
    value = jnp.where(magnitude == 0x7F, jnp.nan, value)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(value, jnp.uint32) | sign, jnp.float32)


def scale_bytes(largest: Array, rule: str = "rceil") -> Array:
    """int32; the E8M0 byte of blocks whose largest magnitude is `largest` (float32, not negative)."""
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    exponent = (bits & _EXPONENT) >> 23
    up = ((bits & _MANTISSA) > _THREE_QUARTERS).astype(jnp.int32) if rule == "rceil" else 0
    return jnp.where(exponent == 255, _NAN_SCALE, jnp.maximum(exponent - 8 + up, 0))


def to_e4m3(x: Array, scales: Array) -> Array:
    """x / 2^(scales - 127) in float8_e4m3fn, to nearest even, saturated; the scales broadcast against x (float32)."""
    x = jnp.where(jnp.abs(x) < 2.0**-126, jnp.copysign(0.0, x), x)  # where subnormals are not flushed anyway
    scaled = jnp.clip(x * _power(127 - scales), -LARGEST, LARGEST)
    return jnp.where(scales == _NAN_SCALE, jnp.nan, scaled).astype(jnp.float8_e4m3fn)


def _in_blocks(x: Array, axis: int, rule: str) -> MXArray:
    blocks = _split(x, axis)
    # as whole numbers magnitudes keep their order, infinity and then NaN are the largest, and nothing is flushed
    bits = lax.bitcast_convert_type(jnp.abs(blocks), jnp.int32)
    largest = lax.bitcast_convert_type(jnp.max(bits, axis=axis, keepdims=True), jnp.float32)
    scales = scale_bytes(largest, rule)
    data = to_e4m3(blocks, scales).reshape(x.shape)
    return MXArray(data, jnp.squeeze(scales, axis).astype(jnp.uint8), axis)


def _split(x: Array, axis: int) -> Array:
    """[..., N, ...] to [..., N / 32, 32, ...]; `axis`, negative, then names the 32."""
    at = x.ndim + axis
    return x.reshape(*x.shape[:at], x.shape[at] // BLOCK, BLOCK, *x.shape[at + 1 :])


def _power(exponent: Array) -> Array:
    """2^exponent as float32, for int32 in [-126, 127]."""
    return lax.bitcast_convert_type((jnp.maximum(exponent, -126) + 127) << 23, jnp.float32)


def _check(x: Array, axis: int, rule: str) -> int:
    if rule not in RULES:
        raise ValueError(f"MXFP8 has no rule {rule!r} for scales: use one of {', '.join(map(repr, RULES))}.")
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise TypeError(f"MXFP8 is made of float32 or bfloat16 numbers (cast with .astype), not of {x.dtype}.")
    axis = axis - x.ndim if axis >= 0 else axis
    if not -x.ndim <= axis < 0 or x.shape[axis] % BLOCK:
        raise ValueError(
            f"MXFP8 has blocks of {BLOCK} numbers, and axis {axis} of {x.dtype}{list(x.shape)} does not cut into them."
        )
    return axis


# --- how tensor cores want to find the scales -------------------------------------------------------------------------


def pack_scales(scales: ArrayLike) -> Array:
    """[..., M, N] to [..., M / 128, N / 4, 32, 16]: tiles of 128 rows and 4 scales, each 512 consecutive bytes.

    Within a tile, row 32 i + j and scale k stand at [j, 4 i + k]: PTX's "scale vector" layout for 1X scales, which
    `tcgen05.cp` takes as it is. M a multiple of 128, N of 4 (K of 128 numbers); pad with byte 0 before.
    """
    scales = jnp.asarray(scales)
    *lead, rows, columns = scales.shape
    if rows % 128 or columns % 4:
        raise ValueError(f"Scales are packed in tiles of 128 x 4, and [{rows}, {columns}] does not cut into them.")
    tiles = scales.reshape(*lead, rows // 128, 4, 32, columns // 4, 4)
    n = len(lead)
    order = (*range(n), n, n + 3, n + 2, n + 1, n + 4)
    return tiles.transpose(order).reshape(*lead, rows // 128, columns // 4, 32, 16)


def unpack_scales(packed: ArrayLike) -> Array:
    """The inverse of `pack_scales`."""
    packed = jnp.asarray(packed)
    *lead, row_tiles, column_tiles, _, _ = packed.shape
    tiles = packed.reshape(*lead, row_tiles, column_tiles, 32, 4, 4)
    n = len(lead)
    order = (*range(n), n, n + 3, n + 2, n + 1, n + 4)
    return tiles.transpose(order).reshape(*lead, row_tiles * 128, column_tiles * 4)
