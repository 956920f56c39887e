"""Kernels that make MXFP8 on NVIDIA GPUs (sm_90a, sm_100a, sm_103a), in Pallas Mosaic GPU; alone, and behind SwiGLU.

    GMEM --TMA--> SMEM [128, 32], a block of MX in each row --largest magnitude of each row--> scales
         --* 2^-s, to E4M3--> SMEM --TMA--> GMEM: bytes, and a byte for each row

One warpgroup a tile. The rows of the tile are blocks: x[R, K] is the same memory as [R K / 32, 32]. Behind SwiGLU,
where up and gate stand apart, a tile is 128 rows of one column of blocks, and the scales leave column by column
([F / 32, R]). The rule is that of mxfp8.py, step by step: magnitudes are compared as whole numbers, powers of two are
bits. Compiled for GPUs that are absent, and run in the interpreter; not measured on a GPU.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mxfp8 import BLOCK, LARGEST, MXArray, scale_bytes

TILE = 128  # blocks of MX
_E4M3 = jnp.float8_e4m3fn


def reason_against(rows: int, width: int) -> str | None:
    """Why [rows, width] has no kernel; None if it has."""
    if width % BLOCK or rows * width // BLOCK % TILE:
        return f"takes whole tiles of {TILE} blocks of {BLOCK}, and [{rows}, {width}] does not cut into them"
    return None


def swiglu_reason_against(rows: int, width: int) -> str | None:
    """The same for SwiGLU of [rows, width], up and gate side by side."""
    if width % (2 * BLOCK) or rows % TILE:
        return f"takes a multiple of {TILE} rows and of {2 * BLOCK} columns, got [{rows}, {width}]"
    return None


def quantize_mosaic(x_RK: Array, *, rule: str, interpret: Any = None) -> MXArray:
    """`quantize` along the last axis; x: [R, K], float32 or bfloat16, shapes as `reason_against` says."""
    blocks = x_RK.reshape(-1, BLOCK)

    def kernel(x, data, scales, x_smem, data_smem, scales_smem, loaded):
        own = pl.ds(lax.axis_index("tile") * TILE, TILE)
        plgpu.copy_gmem_to_smem(x.at[own], x_smem, loaded)
        plgpu.barrier_wait(loaded)
        numbers = plgpu.load(x_smem, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
        _quantise(numbers, rule, data_smem, scales_smem)
        plgpu.copy_smem_to_gmem(data_smem, data.at[own])
        plgpu.copy_smem_to_gmem(scales_smem, scales.at[own])
        plgpu.wait_smem_to_gmem(0)

    count = blocks.shape[0]
    data, scales = plgpu.kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct(blocks.shape, _E4M3), jax.ShapeDtypeStruct((count,), jnp.uint8)),
        scratch_types=[plgpu.SMEM((TILE, BLOCK), x_RK.dtype), *_results(), plgpu.Barrier()],
        kernel_name="mxfp8_quantize",
        grid=(count // TILE,),
        grid_names=("tile",),
        interpret=interpret,
        **_SEMANTICS,
    )(blocks)
    return MXArray(data.reshape(x_RK.shape), scales.reshape(x_RK.shape[0], -1))


def swiglu_quantize_mosaic(up_gate_RF: Array, *, rule: str, interpret: Any = None) -> MXArray:
    """`quantize(up * silu(gate))`, computed in float32 and rounded to the operand's dtype before; [R, 2F] to [R, F]."""
    rows, width = up_gate_RF.shape[0], up_gate_RF.shape[1] // 2
    dtype = up_gate_RF.dtype

    def kernel(both, data, scales, up_smem, gate_smem, data_smem, scales_smem, loaded):
        row, block = lax.axis_index("rows") * TILE, lax.axis_index("block")
        own = pl.ds(row, TILE)
        plgpu.copy_gmem_to_smem(both.at[own, pl.ds(block * BLOCK, BLOCK)], up_smem, loaded)
        plgpu.copy_gmem_to_smem(both.at[own, pl.ds(width + block * BLOCK, BLOCK)], gate_smem, loaded)
        plgpu.barrier_wait(loaded)
        up, gate = (plgpu.load(smem, layout=plgpu.Layout.WGMMA).astype(jnp.float32) for smem in (up_smem, gate_smem))
        hidden = (up * (gate / (1.0 + jnp.exp(-gate)))).astype(dtype).astype(jnp.float32)
        _quantise(hidden, rule, data_smem, scales_smem)
        plgpu.copy_smem_to_gmem(data_smem, data.at[own, pl.ds(block * BLOCK, BLOCK)])
        plgpu.copy_smem_to_gmem(scales_smem, scales.at[block, own])
        plgpu.wait_smem_to_gmem(0)

    columns = width // BLOCK
    data, scales = plgpu.kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((rows, width), _E4M3), jax.ShapeDtypeStruct((columns, rows), jnp.uint8)),
        scratch_types=[
            plgpu.SMEM((TILE, BLOCK), dtype),
            plgpu.SMEM((TILE, BLOCK), dtype),
            *_results(),
            plgpu.Barrier(num_arrivals=2),
        ],
        kernel_name="mxfp8_swiglu_quantize",
        grid=(rows // TILE, columns),
        grid_names=("rows", "block"),
        interpret=interpret,
        **_SEMANTICS,
    )(up_gate_RF)
    return MXArray(data, scales.T)


_SEMANTICS: dict[str, Any] = dict(
    compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
)


def _results() -> list[Any]:
    return [plgpu.SMEM((TILE, BLOCK), _E4M3), plgpu.SMEM((TILE,), jnp.uint8)]


def _quantise(numbers: Array, rule: str, data_smem: Any, scales_smem: Any) -> None:
    """fp32 [TILE, BLOCK], a block in each row, to SMEM, ready to be copied out."""
    bits = lax.bitcast_convert_type(numbers, jnp.int32)
    magnitude = bits & jnp.int32(0x7FFFFFFF)
    largest = lax.bitcast_convert_type(jnp.max(magnitude, axis=1), jnp.float32)
    scales = scale_bytes(largest, rule)
    zero = bits & jnp.int32(-(2**31))  # with the sign that a subnormal number has
    numbers = lax.bitcast_convert_type(jnp.where(magnitude < jnp.int32(1 << 23), zero, bits), jnp.float32)
    power = lax.bitcast_convert_type(jnp.maximum(jnp.int32(254) - scales, jnp.int32(1)) << 23, jnp.float32)
    scaled = jnp.minimum(jnp.maximum(numbers * power[:, None], -LARGEST), LARGEST)
    scaled = jnp.where((scales == 255)[:, None], jnp.nan, scaled)
    data_smem[...] = scaled.astype(_E4M3)
    scales_smem[...] = plgpu.layout_cast(scales, plgpu.Layout.WGMMA.reduce(1)).astype(jnp.uint8)
    plgpu.commit_smem()
