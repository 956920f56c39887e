"""The MXFP8 rule in whole numbers, written from its definition: what the quantiser is compared with, bit for bit."""

import ml_dtypes
import numpy as np


def integer_rule(x: np.ndarray, rule: str) -> tuple[np.ndarray, np.ndarray]:
    """(data bytes [..., 32], scale bytes [...]) of float32 blocks, in whole numbers: no float is added or multiplied.

    A finite number is n 2^(p - 150), n below 2^24. The scale is the smallest s with a <= 448 2^s (rceil), or the one
    with 2^(s+8) <= a < 2^(s+9) (floor). Rounding is division with remainder in units of the E4M3 numbers around.
    """
    bits = x.view(np.uint32).astype(np.int64)
    sign, field, fraction = bits >> 31, (bits >> 23) & 255, bits & 0x7FFFFF
    n = np.where(field == 0, 0, fraction + (1 << 23))  # subnormals are zero
    special = (field == 255).any(-1)
    top = np.where(field == 255, 0, field).max(-1)
    largest = np.where((field == top[..., None]) & (field != 255), n, 0).max(-1)
    # a = largest 2^(top - 150); 448 2^s = 7 2^(s + 6): with s = top - 127 - 8 compare largest 2^-23 with 7/4
    s = top - 127 - 8
    if rule == "rceil":
        s = s + (4 * largest > 7 * (1 << 23))
    scale = np.maximum(s + 127, 0)
    # x / 2^s = n 2^(field - 150 - s); the unit of E4M3 at exponent g >= -6 is 2^(g - 3)
    g = np.maximum(field - 127 - (scale[..., None] - 127), -6)
    shift = (g - 3) - (field - 150 - (scale[..., None] - 127))  # x / 2^s in units of 2^(g-3) is n / 2^shift
    shift = np.clip(shift, 0, 40)
    whole, rest = n >> shift, n & ((1 << shift) - 1)
    half = (1 << shift) >> 1
    units = whole + ((rest > half) | ((rest == half) & (shift > 0) & (whole & 1 == 1)))
    g, units = np.where(units == 16, g + 1, g), np.where(units == 16, 8, units)
    byte = np.where(units < 8, units, ((g + 7) << 3) + units - 8)
    byte = np.minimum(byte, 0x7E)  # saturated at 448
    byte = np.where(special[..., None], 0x7F, byte | (sign << 7))
    return byte.astype(np.uint8), np.where(special, 255, scale).astype(np.uint8)


def rounded(x: np.ndarray, axis: int = -1) -> np.ndarray:
    """float64; what is left of numbers that were put into MXFP8 along `axis` and read back (rceil, finite numbers)."""
    x = np.moveaxis(np.asarray(x, np.float32), axis, -1)
    data, scales = integer_rule(x.reshape(*x.shape[:-1], -1, 32), "rceil")
    values = data.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * 2.0 ** (scales[..., None].astype(np.float64) - 127)
    return np.moveaxis(values.reshape(x.shape), -1, axis)
