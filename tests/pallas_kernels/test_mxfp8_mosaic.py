"""The kernels that make MXFP8, run in the interpreter: the bits of the reference, races looked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mxfp8_mosaic
from pallas_kernels.mxfp8 import MXArray, dequantize, quantize
from pallas_kernels.mxfp8_quantize import quantize_rows, swiglu_quantize

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


def hard_rows(rows: int, width: int) -> np.ndarray:
    """Every exponent there is, NaN, infinities, zeros of both signs and subnormal numbers."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, width)) * 2.0 ** rng.integers(-4, 5, (rows, width))
    x *= 2.0 ** np.linspace(-140, 120, rows)[:, None]
    x[3, 5], x[7, 40], x[9, 0] = np.nan, np.inf, -np.inf
    x[11], x[12, ::2] = 0.0, -0.0
    return np.nan_to_num(x.astype(np.float32), nan=np.nan, posinf=np.inf, neginf=-np.inf)


def assert_same_bits(ours: MXArray, theirs: MXArray) -> None:
    np.testing.assert_array_equal(np.asarray(ours.data).view(np.uint8), np.asarray(theirs.data).view(np.uint8))
    np.testing.assert_array_equal(ours.scales, theirs.scales)


@pytest.mark.parametrize("rule", ["rceil", "floor"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bits_of_the_reference(dtype, rule):
    x = jnp.asarray(hard_rows(64, 64), dtype)
    assert_same_bits(mxfp8_mosaic.quantize_mosaic(x, rule=rule, interpret=INTERPRET), quantize(x, rule=rule))


def test_bits_behind_swiglu():
    x = jnp.asarray(np.clip(hard_rows(128, 128), -1e4, 1e4), jnp.bfloat16)
    ours = mxfp8_mosaic.swiglu_quantize_mosaic(x, rule="rceil", interpret=INTERPRET)
    theirs = jax.jit(swiglu_quantize)(x)
    same = np.asarray(ours.data).view(np.uint8) == np.asarray(theirs.data).view(np.uint8)
    assert same.mean() > 0.999, "but for the last bit of an exponential"
    up, gate = np.split(np.asarray(x, np.float64), 2, axis=1)
    exact = up * gate / (1 + np.exp(-gate))
    finite = np.isfinite(exact) & np.isfinite(np.asarray(dequantize(ours)))
    assert finite.mean() > 0.9
    error = np.abs(np.asarray(dequantize(ours)) - exact)[finite]
    largest = np.repeat(np.abs(np.nan_to_num(exact)).reshape(128, 2, 32).max(-1), 32, axis=1)[finite]
    assert np.all(error <= 0.07 * largest + 2.0**-118)


def test_shapes_without_a_kernel_are_told():
    assert mxfp8_mosaic.reason_against(64, 64) is None and mxfp8_mosaic.swiglu_reason_against(128, 64) is None
    with pytest.raises(ValueError, match=r"\[3, 64\] does not cut.*'auto' or 'xla'"):
        quantize_rows(jnp.zeros((3, 64)), implementation="mosaic")
    with pytest.raises(ValueError, match=r"got \[64, 64\]"):
        swiglu_quantize(jnp.zeros((64, 64)), implementation="mosaic")
    with pytest.raises(ValueError, match="'auto', 'xla', 'mosaic'"):
        quantize_rows(jnp.zeros((4, 64)), implementation="triton")
