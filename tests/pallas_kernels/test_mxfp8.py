"""The MXFP8 rule, bit for bit: against whole-number arithmetic written from its definition, over every block maximum.

x --quantize--> bytes == bytes of the integer rule        dequantize: exact, and quantising again changes no value
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pallas_kernels.mxfp8 import MXArray, dequantize, from_e4m3, pack_scales, quantize, quantize_two_ways, unpack_scales
from tests.pallas_kernels.integer_rule import integer_rule

E4M3 = ml_dtypes.float8_e4m3fn


@functools.partial(jax.jit, static_argnums=1)
def quantized(x: jax.Array, rule: str = "rceil") -> MXArray:
    return quantize(x, rule=rule)


@jax.jit
def there_and_back(x: jax.Array) -> jax.Array:
    return dequantize(quantize(x))


def as_bytes(array: MXArray) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(array.data).view(np.uint8), np.asarray(array.scales)


def assert_same_bits(x: np.ndarray, array: MXArray, rule: str) -> None:
    data, scales = as_bytes(array)
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, 32)
    expected, expected_scales = integer_rule(blocks, rule)
    np.testing.assert_array_equal(scales, expected_scales)
    is_nan = (expected & 0x7F) == 0x7F  # any of its two bit patterns
    data = data.reshape(expected.shape)
    np.testing.assert_array_equal((data & 0x7F) == 0x7F, is_nan)
    np.testing.assert_array_equal(data[~is_nan], expected[~is_nan])


@pytest.fixture(scope="module")
def every_maximum() -> np.ndarray:
    """bfloat16[65536, 32]: each bit pattern once as the largest of its block, the others drawn below it."""
    patterns = np.arange(65536, dtype=np.uint16)
    rng = np.random.default_rng(0)
    magnitude = (patterns & 0x7FFF).astype(np.int64)
    others = (rng.random((65536, 32)) * (magnitude[:, None] + 1)).astype(np.int64)
    near = np.maximum(magnitude[:, None] - rng.integers(0, 2000, (65536, 32)), 0)  # within 16 powers of two
    others = np.where(rng.random((65536, 32)) < 0.7, near, others)
    blocks = others.astype(np.uint16) | (rng.integers(0, 2, (65536, 32)).astype(np.uint16) << 15)
    blocks[patterns, rng.integers(0, 32, 65536)] = patterns
    return blocks.view(ml_dtypes.bfloat16)


@pytest.mark.parametrize("rule", ["rceil", "floor"])
def test_every_bfloat16_as_block_maximum(every_maximum, rule):
    assert_same_bits(every_maximum, quantized(every_maximum, rule), rule)


@settings(max_examples=60, deadline=None)
@given(
    bits=hnp.arrays(np.uint32, (4, 32), elements=st.integers(0, 2**32 - 1)),
    narrow=st.booleans(),
    rule=st.sampled_from(["rceil", "floor"]),
)
def test_any_float32_block(bits, narrow, rule):
    if narrow:  # one power of two or its neighbours, where rounding and saturation happen
        bits = (bits & 0x80FFFFFF) | 0x43000000
    x = bits.view(np.float32)
    assert_same_bits(x, quantized(x, rule), rule)


@pytest.mark.parametrize(("largest", "byte"), [(448.0, 127), (449.0, 128), (150.0, 126), (0.0, 0), (1.75, 119)])
def test_known_answers(largest, byte):
    block = np.zeros(32, np.float32)
    block[7] = -largest
    assert quantized(block).scales.tolist() == [byte]


def test_rceil_saturates_nothing_and_floor_does():
    block = jnp.asarray(np.linspace(-500, 500, 32), jnp.float32)
    ceiling, floor = (dequantize(quantize(block, rule=rule)) for rule in ("rceil", "floor"))
    assert float(ceiling.max()) == 512.0 and float(floor.max()) == 448.0


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_makes_its_block_nan_and_no_other(poison):
    x = np.ones((2, 96), np.float32)
    x[1, 40] = poison
    out = np.array(there_and_back(x))
    assert np.isnan(out[1, 32:64]).all()
    out[1, 32:64] = 1
    np.testing.assert_array_equal(out, 1)


def test_dequantize_is_exact_for_every_byte_and_scale():
    data, scale = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8))
    array = MXArray(jnp.asarray(data.reshape(256, 8, 32)).view(jnp.float8_e4m3fn), jnp.asarray(scale[:, :8, None]))
    expected = data.view(E4M3).astype(np.float64) * 2.0 ** (scale.astype(np.float64) - 127)
    expected = np.where(scale == 255, np.nan, expected)
    expected = np.where(np.abs(expected) >= 2.0**128, np.copysign(np.inf, expected), expected)
    expected = np.where(np.abs(expected) < 2.0**-126, 0, expected).astype(np.float32)
    for dtype in (jnp.float32, jnp.bfloat16):
        got = np.asarray(jax.jit(lambda a, t=dtype: dequantize(a, t))(array), np.float32).reshape(256, 256)
        np.testing.assert_array_equal(np.abs(got), np.abs(expected))
        np.testing.assert_array_equal(got[expected != 0], expected[expected != 0])


def test_every_e4m3_byte_is_read():
    data = np.arange(256, dtype=np.uint8).view(E4M3)
    np.testing.assert_array_equal(from_e4m3(jnp.asarray(data)), data.astype(np.float32))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), spread=st.integers(0, 30))
def test_quantising_again_changes_no_value(seed, spread):
    """So it does not matter on which side of an exchange, or how often, rows are put into MX along the same axis."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((8, 64)) * 2.0 ** rng.integers(-spread, spread + 1, (8, 64))
    once = np.asarray(there_and_back(x.astype(np.float32)))
    np.testing.assert_array_equal(there_and_back(once), once)
    # within 2^-4 of each number, or half of the smallest unit of its block
    unit = np.repeat(np.abs(x).reshape(8, 2, 32).max(-1), 32, axis=1) * 2.0**-17
    assert np.all(np.abs(once - x) <= np.maximum(np.abs(x) * 2.0**-4, unit) * (1 + 1e-6))


def test_two_ways_are_the_two_ways():
    x = np.random.default_rng(0).standard_normal((2, 64, 96)).astype(np.float32)
    rows, columns = jax.jit(quantize_two_ways)(x)
    assert rows.scales.shape == (2, 64, 3) and columns.scales.shape == (2, 2, 96)
    for ours, theirs in (
        (rows, quantized(x)),
        (columns.transposed(), quantized(jnp.swapaxes(x, 1, 2))),
    ):
        assert ours.axis == theirs.axis == -1
        np.testing.assert_array_equal(as_bytes(ours)[0], as_bytes(theirs)[0])
        np.testing.assert_array_equal(ours.scales, theirs.scales)
    np.testing.assert_array_equal(dequantize(columns.transposed()), jnp.swapaxes(dequantize(columns), 1, 2))


def test_packed_scales_stand_where_the_tensor_core_looks():
    scales = np.random.default_rng(0).integers(0, 255, (3, 256, 8)).astype(np.uint8)
    packed = np.asarray(pack_scales(scales))
    assert packed.shape == (3, 2, 2, 32, 16)
    for row, column in ((0, 0), (37, 3), (255, 6), (130, 5)):
        tile = packed[1, row // 128, column // 4]
        assert tile[row % 32, 4 * (row % 128 // 32) + column % 4] == scales[1, row, column]
    np.testing.assert_array_equal(unpack_scales(packed), scales)


def test_what_has_no_blocks_is_refused():
    with pytest.raises(ValueError, match=r"axis -1 of float32\[4, 40\]"):
        quantize(jnp.zeros((4, 40)))
    with pytest.raises(ValueError, match="'rceil', 'floor'"):
        quantize(jnp.zeros((4, 32)), rule="nearest")
    with pytest.raises(TypeError, match="int32"):
        quantize(jnp.zeros((4, 32), jnp.int32))
    with pytest.raises(ValueError, match="128 x 4"):
        pack_scales(np.zeros((64, 4), np.uint8))
