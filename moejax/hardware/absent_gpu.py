"""Compiling for GPUs that are not there: XLA's CUDA compiler, a description of the device, and a topology of many.

    absent_mesh("b300", "dp=8,ep=8,pp=8") --TrainProgram(config, mesh).lower().compile()--> memory, collectives

Nothing runs: what comes out is what the compiler would hand to a GPU of this kind, with its memory per device. It needs
JAX's CUDA plugin (`uv pip install moejax[aot]`), no driver and no CUDA libraries. Two things differ from a compilation
on the device: no kernels are tuned, and a program that exceeds the memory is no error; compare the peak yourself.
One kind of GPU a process: JAX keeps what it has lowered for the first.
"""

import importlib.util
import os
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

from moejax.errors import UserError
from moejax.hardware.gpus import read_gpu
from moejax.mesh import AXES, MeshShape, parse_mesh
from pallas_kernels.compile_only import target_config


def missing() -> str | None:
    """Why nothing can be compiled for absent GPUs here, None if it can."""
    plugin = any(importlib.util.find_spec(name) for name in ("jax_cuda13_plugin", "jax_cuda12_plugin"))
    if not plugin:
        return "JAX's CUDA plugin is not installed; uv pip install 'moejax[aot]'"
    if os.environ.get("JAX_PLATFORMS", "") != "cpu":
        return "JAX_PLATFORMS is not cpu, and without it JAX looks for a driver; set JAX_PLATFORMS=cpu"
    return None


def absent_devices(gpu: str, count: int) -> list[Any]:
    """Devices to compile for, as many to a host as share its links, as far as they go.

    Raises UserError when the compiler is not there, or when the GPU's file (`hardware.gpus`) does not say what to
    compile for.
    """
    figures, reason = read_gpu(gpu), missing()
    if figures.chip is None:
        raise UserError(f"The file of GPU {gpu!r} has no section `compile`; plan --quick needs none.")
    if reason is not None:
        raise UserError(f"Cannot compile for absent GPUs: {reason}.")
    from jax.experimental import topologies

    per_host = next(n for n in range(min(figures.gpus_per_node, count), 0, -1) if count % n == 0)
    shape = f"1x{count // per_host}x{per_host}"  # slices x hosts x GPUs of a host
    target = target_config(figures.chip, figures.vendor_name)
    return list(topologies.get_topology_desc(platform="cuda", target_config=target, topology=shape).devices)


def absent_mesh(gpu: str, mesh: str | MeshShape) -> Mesh:
    """As `mesh.make_mesh`, on GPUs that are not there."""
    shape = parse_mesh(mesh) if isinstance(mesh, str) else mesh
    grid = np.array(absent_devices(gpu, shape.devices)).reshape(shape.pp, shape.dp, shape.ep)
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
