"""The device mesh: "dp=2,ep=8,pp=4" to a `jax.sharding.Mesh` over axes pp, dp, ep.

    text --parse_mesh--> MeshShape --check_fit(config)--> explained --make_mesh--> Mesh

pp is outermost and ep innermost, so that the devices that exchange tokens are neighbours. On CPU the devices are
simulated (`prepare_devices`, before JAX first touches a device). This module knows the config; models do not know it.
"""

import ctypes
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from moejax.config import Config, Strategy, Transport
from moejax.errors import UserError

AXES = ("pp", "dp", "ep")  # outermost first
DATA_AXES = ("dp", "ep")  # the axes over which tokens are split
# A busy machine with many simulated devices needs longer than XLA:CPU's 40 s before it gives a collective up.
COLLECTIVE_TIMEOUT_S = 1200


@dataclass(frozen=True)
class MeshShape:
    """Number of pipeline stages, data-parallel replicas, and devices that share out the experts."""

    pp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def devices(self) -> int:
        return self.pp * self.dp * self.ep

    @property
    def data_shards(self) -> int:
        """Parts into which each microbatch is split: tokens differ over dp and over ep."""
        return self.dp * self.ep

    def __str__(self) -> str:
        return f"dp={self.dp},ep={self.ep},pp={self.pp}"


def parse_mesh(text: str) -> MeshShape:
    """Axes in any order, absent ones are 1. Raises UserError on an unknown axis, a repeated one, or a size below 1."""
    sizes: dict[str, int] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        match = re.fullmatch(r"(\w+)\s*=\s*(-?\d+)", part)
        if not match:
            raise UserError(f"The mesh '{text}' has a part '{part}'; write axis=size parts such as dp=2,ep=8,pp=4.")
        axis, size = match[1], int(match[2])
        if axis not in AXES:
            raise UserError(f"The mesh '{text}' has an axis '{axis}'; the axes are dp, ep and pp.")
        if axis in sizes:
            raise UserError(f"The mesh '{text}' gives {axis} twice.")
        if size < 1:
            raise UserError(f"The mesh '{text}' has {axis}={size}; every axis is at least 1.")
        sizes[axis] = size
    return MeshShape(**sizes)


def problem(config: Config, shape: MeshShape) -> str | None:
    """Why the model and batch do not fit this mesh, in one clause; None if they do."""
    experts, layers = config.model.moe.num_experts, config.model.n_layers
    sequences = config.train.batch_tokens // config.data.sequence_length
    parts = config.parallel.pipeline.microbatches
    fsdp = config.parallel.strategy == Strategy.fsdp
    if fsdp and shape.pp > 1:
        return f"parallel.strategy=fsdp cuts every layer over dp and ep and needs pp=1, not pp={shape.pp}"
    if config.model.n_moe_layers and experts % shape.ep and not fsdp:
        return f"ep={shape.ep} does not divide model.moe.num_experts={experts}"
    if shape.pp > layers:
        return f"pp={shape.pp} is more stages than model.n_layers={layers}"
    if sequences % (parts * shape.data_shards):
        return (
            f"dp*ep={shape.data_shards} does not divide the {sequences // parts} sequences of a microbatch "
            f"(train.batch_tokens={config.train.batch_tokens} / data.sequence_length={config.data.sequence_length} "
            f"/ parallel.pipeline.microbatches={parts})"
        )
    return None


def _same_count(devices: int) -> Iterator[MeshShape]:
    for pp in (n for n in range(1, devices + 1) if devices % n == 0):
        for ep in (n for n in range(1, devices // pp + 1) if (devices // pp) % n == 0):
            yield MeshShape(pp=pp, dp=devices // pp // ep, ep=ep)


def nearest(config: Config, shape: MeshShape, most: int = 3) -> list[MeshShape]:
    """Meshes that fit, nearest first: the same number of devices if there are any, else the largest smaller numbers."""

    def distance(other: MeshShape) -> float:
        pairs = zip((shape.pp, shape.dp, shape.ep), (other.pp, other.dp, other.ep), strict=True)
        return sum(abs(math.log2(a / b)) for a, b in pairs)

    for devices in range(shape.devices, 0, -1):
        fitting = sorted((s for s in _same_count(devices) if problem(config, s) is None), key=distance)
        if fitting:
            return fitting[:most]
    return []


def check_fit(config: Config, shape: MeshShape) -> None:
    """Raise UserError with the reason and the nearest meshes that do fit."""
    reason = problem(config, shape)
    if reason is not None:
        others = nearest(config, shape)
        hint = f"; near it these fit: {' or '.join(map(str, others))}" if others else ""
        raise UserError(f"The mesh {shape} does not fit: {reason}{hint}.")
    resident = config.parallel.strategy == Strategy.resident
    if config.parallel.experts.transport == Transport.local and shape.ep > 1 and resident:
        raise UserError(
            f"parallel.experts.transport=local needs ep=1, and the mesh has ep={shape.ep}; use auto or rowwise."
        )


def prepare_devices(devices: int) -> None:
    """On CPU, simulate this many devices, an equal part of them in each process. Call before the first JAX computation.

    On other platforms it does nothing. Raises UserError if the processes cannot have equal parts.
    """
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and not platforms.startswith("cpu"):
        return
    processes = _processes()
    if devices % processes:
        raise UserError(f"{devices} devices cannot be shared out over {processes} processes; choose a mesh that can.")
    flags = os.environ.get("XLA_FLAGS", "")
    for name in ("warn_stuck", "terminate"):
        flag = f"--xla_cpu_collective_call_{name}_timeout_seconds"
        if flag not in flags:
            flags = f"{flags} {flag}={COLLECTIVE_TIMEOUT_S}"
    os.environ["XLA_FLAGS"] = flags.strip()
    _keep_freed_memory()
    try:
        jax.config.update("jax_num_cpu_devices", devices // processes)
    except RuntimeError:  # a notebook that has used JAX already: make_mesh says what is missing
        pass


def _keep_freed_memory() -> None:
    """Ask glibc to keep what XLA:CPU frees: each step takes its large buffers anew, and fresh pages are page faults.

    Measured on `tiny` (2026-11): 104,000 page faults a step become 10, 0.24 s of system time a step 0.02 s, of 2.1 s in
    all. Trimming is off, not only rare: where a step frees more than the threshold, all of it is faulted in again
    (2 GB and 3 s of the 7 s of a step with 128 experts, 2026-12). Elsewhere than on glibc it does nothing.
    """
    m_trim_threshold, m_mmap_max, m_arena_max = -1, -4, -8  # malloc.h
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    for parameter, value in ((m_mmap_max, 0), (m_trim_threshold, -1), (m_arena_max, 1)):
        mallopt(parameter, value)


def _by_hand() -> tuple[str, int, int] | None:
    """(coordinator, processes, index of this one) from MOEJAX_*, None where they are not set."""
    coordinator = os.environ.get("MOEJAX_COORDINATOR")
    if not coordinator:
        return None
    try:
        count, index = int(os.environ["MOEJAX_PROCESSES"]), int(os.environ["MOEJAX_PROCESS"])
    except (KeyError, ValueError):
        raise UserError("MOEJAX_COORDINATOR needs MOEJAX_PROCESSES=n and MOEJAX_PROCESS=i beside it.") from None
    if not 0 <= index < count:
        raise UserError(f"MOEJAX_PROCESS={index} must be one of 0 to MOEJAX_PROCESSES - 1 = {count - 1}.")
    return coordinator, count, index


def _processes() -> int:
    by_hand = _by_hand()
    if by_hand is not None:
        return by_hand[1]
    return max(int(os.environ.get(name, 1)) for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"))


def start_processes() -> None:
    """Join the other processes of a multi-process run, where one was started (Slurm, Open MPI, or MOEJAX_COORDINATOR).

    MOEJAX_COORDINATOR=host:port MOEJAX_PROCESSES=n MOEJAX_PROCESS=i name the processes by hand; under Slurm and
    Open MPI JAX finds them by itself.
    """
    by_hand = _by_hand()
    if by_hand is not None:
        jax.distributed.initialize(*by_hand)
    elif _processes() > 1:
        jax.distributed.initialize()


def make_mesh(shape: MeshShape, devices: Sequence[Any] | None = None) -> Mesh:
    """Mesh over axes ("pp", "dp", "ep") on the first devices. Raises UserError if there are too few."""
    devices = jax.devices() if devices is None else devices
    if len(devices) < shape.devices:
        kind = devices[0].platform.upper()
        hint = (
            "start again in a fresh process, since JAX had already fixed its number of simulated devices"
            if kind == "CPU"
            else "ask for a smaller mesh or more devices"
        )
        raise UserError(
            f"The mesh {shape} needs {shape.devices} devices and there are {len(devices)} ({kind}); {hint}."
        )
    grid = np.array(devices[: shape.devices]).reshape(shape.pp, shape.dp, shape.ep)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)
