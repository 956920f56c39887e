"""Compiling for GPUs that are not there: XLA's CUDA compiler, a description of the device, and a topology of many.

    absent_mesh("b300", "dp=8,ep=8,pp=8") --TrainProgram(config, mesh).lower().compile()--> memory, collectives

Nothing runs: what comes out is what the compiler would hand to a GPU of this kind, with its memory per device. It needs
JAX's CUDA plugin (`uv pip install moejax[aot]`), no driver and no CUDA libraries. Two things differ from a compilation
on the device: no kernels are tuned, and a program that exceeds the memory is no error; compare the peak yourself.
One kind of GPU a process: JAX keeps what it has lowered for the first.

Figures: NVIDIA's data sheets (SMs, bandwidth, memory) and the CUDA programming guide (limits by compute capability).
"""

import importlib.util
import os
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import AxisType, Mesh

from moejax.errors import UserError
from moejax.mesh import AXES, MeshShape, parse_mesh

GPUS_PER_HOST = 8


class Chip(NamedTuple):
    """compute_capability: (major, minor). memory_bandwidth: bytes/s. l2, memory: bytes. clock: GHz."""

    compute_capability: tuple[int, int]
    multiprocessors: int
    memory_bandwidth: int
    l2: int
    clock: float
    memory: int


CHIPS = {
    "h100": Chip((9, 0), 132, 3_352_320_000_000, 52_428_800, 1.98, 85_014_413_312),
    "h200": Chip((9, 0), 132, 4_800_000_000_000, 52_428_800, 1.98, 151_397_597_184),
    "b200": Chip((10, 0), 148, 8_000_000_000_000, 132_644_864, 1.965, 191_780_487_168),
    "b300": Chip((10, 3), 160, 8_000_000_000_000, 132_644_864, 1.92, 288_000_000_000),
}


def missing() -> str | None:
    """Why nothing can be compiled for absent GPUs here, None if it can."""
    plugin = any(importlib.util.find_spec(name) for name in ("jax_cuda13_plugin", "jax_cuda12_plugin"))
    if not plugin:
        return "JAX's CUDA plugin is not installed; uv pip install 'moejax[aot]'"
    if os.environ.get("JAX_PLATFORMS", "") != "cpu":
        return "JAX_PLATFORMS is not cpu, and without it JAX looks for a driver; set JAX_PLATFORMS=cpu"
    return None


def target_config(chip: str) -> str:
    """XLA's `GpuTargetConfigProto` as text."""
    if chip not in CHIPS:
        raise UserError(f"There is no GPU named {chip!r}; the ones known are {', '.join(CHIPS)}.")
    c = CHIPS[chip]
    major, minor = c.compute_capability
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472  core_count: {c.multiprocessors}  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: {c.memory_bandwidth}  l2_cache_size: {c.l2}  clock_rate_ghz: {c.clock}
  device_memory_size: {c.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: ACCELERATED_FEATURES }}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "NVIDIA {chip.upper()}"
"""  # the description becomes `device_kind`, which Pallas looks at


def absent_devices(chip: str, count: int) -> list[Any]:
    """Devices to compile for, eight to a host as far as they go. Raises UserError when the compiler is not there."""
    reason = missing()
    if reason is not None:
        raise UserError(f"Cannot compile for absent GPUs: {reason}.")
    from jax.experimental import topologies

    per_host = next(n for n in range(min(GPUS_PER_HOST, count), 0, -1) if count % n == 0)
    shape = f"1x{count // per_host}x{per_host}"  # slices x hosts x GPUs of a host
    return list(
        topologies.get_topology_desc(platform="cuda", target_config=target_config(chip), topology=shape).devices
    )


def absent_mesh(chip: str, mesh: str | MeshShape) -> Mesh:
    """As `mesh.make_mesh`, on GPUs that are not there."""
    shape = parse_mesh(mesh) if isinstance(mesh, str) else mesh
    grid = np.array(absent_devices(chip, shape.devices)).reshape(shape.pp, shape.dp, shape.ep)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)


def bytes_per_device(compiled: Any) -> dict[str, int]:
    """arguments, outputs, aliased (donated arguments that are outputs too), temporaries and peak of a compiled
    program."""
    memory = compiled.memory_analysis()
    names = {
        "arguments": "argument_size",
        "outputs": "output_size",
        "aliased": "alias_size",
        "temporaries": "temp_size",
    }
    sizes = {name: int(getattr(memory, f"{field}_in_bytes")) for name, field in names.items()}
    return sizes | {"peak": int(getattr(memory, "peak_memory_in_bytes", 0))}
