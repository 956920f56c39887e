"""Compiles the GPU kernels for GPUs that are not there, and reads from the compiler what became of them.

    kernels x chip --a process of its own--> XLA for the absent chip --> Mosaic's PTX, ptxas's report --> one row

    python -m pallas_kernels.compile_only                          # every kernel for h200, b200 and b300
    python -m pallas_kernels.compile_only forward h200             # one

What it proves: that the kernel fits the chip (registers, shared memory, no spills) and that it consists of the
instructions it was written for. What it does not: numbers and speed. It needs XLA's CUDA plugin and ptxas (the `aot`
extra) but no GPU and no driver. Each chip is compiled for in a process of its own: lowering that depends on the chip is
cached for the process, and a kernel for the wrong chip can abort it.
"""

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pallas_kernels.mx_compile_only import MX_KERNELS, described

# swiglu: gate and up in one pass, SwiGLU at the end; swiglu_kept: up and gate come out as well, for training.
GROUPED_GEMM = ("forward", "data_gradient", "weight_gradient", "swiglu", "swiglu_kept")
KERNELS = (*GROUPED_GEMM, "top_k", *MX_KERNELS)


@dataclasses.dataclass(frozen=True)
class Chip:
    """What XLA is told about a GPU. Sizes in bytes, rates in bytes a second; public data sheets."""

    architecture: str  # whose kernels it runs
    capability: tuple[int, int]
    num_sms: int
    memory: int
    memory_rate: int
    l2_cache: int
    clock_ghz: float


CHIPS = {
    "h100": Chip("hopper", (9, 0), 132, 85_014_413_312, 3_352_320_000_000, 52_428_800, 1.98),
    "h200": Chip("hopper", (9, 0), 132, 151_397_597_184, 4_800_000_000_000, 52_428_800, 1.98),
    "b200": Chip("blackwell", (10, 0), 148, 191_780_487_168, 8_000_000_000_000, 132_644_864, 1.965),
    "b300": Chip("blackwell", (10, 3), 160, 288_000_000_000, 8_000_000_000_000, 132_644_864, 1.92),
}

# PTX instructions counted in a row: the tensor core's, and the copies between global and shared memory by TMA.
INSTRUCTIONS = {
    "wgmma": r"\bwgmma\.mma_async",
    "tcgen05_mma": r"\btcgen05\.mma\.",
    "block_scaled_mma": r"\btcgen05\.mma\.\S*block_scale",
    "tma_loads": r"\bcp\.async\.bulk\.tensor\.\dd\.shared::\w+\.global",
    "tma_stores": r"\bcp\.async\.bulk\.tensor\.\dd\.global\.shared",
}


class CannotCompile(RuntimeError):
    """The compiler for absent GPUs is missing, or it refused the kernel; the message says which and why."""


def kernels_of(chip: str) -> tuple[str, ...]:
    """All that a chip can run: Hopper has no tensor cores for the MXFP8 product."""
    return tuple(k for k in KERNELS if k != "mx_forward" or CHIPS[chip].architecture == "blackwell")


def compile_row(
    kernel: str,
    chip: str,
    *,
    rows: int = 8192,
    width: int = 2048,
    hidden: int = 1024,
    groups: int = 64,
    architecture: str | None = None,
    stages: int | None = None,
) -> dict[str, Any]:
    """Compile one kernel for one chip: [rows, width] x [groups, width, hidden], one of its two gradients, SwiGLU of
    [rows, width] x [groups, width, 2 hidden], or the top 4 of logits [rows, groups].

    architecture, stages: another chip's kernel, another depth of its ring; for tests of what the compiler refuses.

    Keys of the row: kernel, chip, target (of the PTX, e.g. "sm_90a"), registers (a thread), spill_bytes, smem_bytes,
    tmem_columns, the counts of INSTRUCTIONS in the PTX, compile_seconds. Raises CannotCompile, ValueError for a name.
    """
    options = dict(rows=rows, width=width, hidden=hidden, groups=groups, architecture=architecture, stages=stages)
    return compile_rows((kernel,), chip, **options)[0]


def compile_rows(kernels: Sequence[str], chip: str, **options: Any) -> list[dict[str, Any]]:
    """`compile_row` of several kernels in one process: half of the time of one is the start of its process."""
    unknown = [kernel for kernel in kernels if kernel not in KERNELS]
    if unknown or chip not in CHIPS:
        raise ValueError(
            f"There is no kernel {(unknown or list(kernels))[0]!r} for {chip!r}: "
            f"{', '.join(KERNELS)} for {', '.join(CHIPS)}."
        )
    with tempfile.TemporaryDirectory() as folder:
        printed = _in_a_process_of_its_own("_compile_kernels", list(kernels), chip, options, dump=folder)
        seconds = json.loads(printed.splitlines()[-1])
        reports = {
            kernel: [
                "".join(path.read_text() for path in Path(folder, kernel).glob(f"*{suffix}"))
                for suffix in (".ptx", ".ptxas", ".resources.txt")
            ]
            for kernel in kernels
        }
    return [
        {"kernel": kernel, "chip": chip, **read_report(*reports[kernel]), "compile_seconds": seconds[kernel]}
        for kernel in kernels
    ]


def compile_layer_row(
    chip: str,
    experts: int,
    *,
    devices: int = 8,
    rows: int = 8192,
    width: int = 1024,
    hidden: int = 512,
    implementation: str = "auto",
) -> dict[str, Any]:
    """Compile a layer of SwiGLU experts, value and all gradients, sharded over `devices` absent GPUs; its memory.

    rows: the expert-major rows that stand on each device. Keys of the row: chip, devices, experts, rows,
    implementation, argument_bytes and temp_bytes (per device), mosaic_calls (kernels in the program), compile_seconds.
    Raises CannotCompile, ValueError for a chip that does not exist.
    """
    if chip not in CHIPS or experts % devices:
        raise ValueError(
            f"{experts} experts on {devices} of {chip!r}: use one of {', '.join(CHIPS)}, a whole share each."
        )
    options = dict(devices=devices, rows=rows, width=width, hidden=hidden, implementation=implementation)
    begin = time.perf_counter()
    report = json.loads(_in_a_process_of_its_own("_compile_layer", chip, experts, options).splitlines()[-1])
    common = {"chip": chip, "devices": devices, "experts": experts, "rows": rows, "implementation": implementation}
    return common | report | {"compile_seconds": round(time.perf_counter() - begin, 1)}


def read_report(ptx: str, ptxas: str, resources: str) -> dict[str, Any]:
    """The figures of a row from the PTX, from what `ptxas -v` said of it, and from Mosaic's list of resources."""
    return {
        "target": re.search(r"^\.target\s+(\w+)", ptx, re.M)[1],  # type: ignore[index]
        "registers": max(int(n) for n in re.findall(r"Used (\d+) registers", ptxas)),
        "spill_bytes": sum(int(n) for n in re.findall(r"(\d+) bytes spill", ptxas)),
        "smem_bytes": sum(int(n) for n in re.findall(r"smem_scratch_bytes=(\d+)", resources)),
        "tmem_columns": sum(int(n) for n in re.findall(r"tmem_scratch_cols=(\d+)", resources)),
        **{name: len(re.findall(pattern, ptx)) for name, pattern in INSTRUCTIONS.items()},
    }


def require_compiler() -> None:
    """Raises CannotCompile, with the way out, where XLA's CUDA plugin is not installed."""
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        raise CannotCompile(
            "Compiling for an absent GPU needs XLA's CUDA plugin, which is not installed: install the `aot` extra."
        )


def absent_devices(chip: str, count: int) -> list[Any]:
    """`count` devices of a chip to compile for, all of one host. Enter a mesh of them and make one the default device:

    `with jax.set_mesh(mesh), jax.default_device(devices[0]): jax.jit(f).lower(*shapes).compile()`
    """
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target_config(CHIPS[chip], f"NVIDIA {chip.upper()}"), topology=f"1x1x{count}"
    )
    return topology.devices


def target_config(own: Chip, name: str) -> str:
    """XLA's GpuTargetConfigProto, as text. The device's name, e.g. "NVIDIA H200", decides what Pallas compiles for."""
    major, minor = own.capability
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  core_count: {own.num_sms} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {own.memory_rate} l2_cache_size: {own.l2_cache} clock_rate_ghz: {own.clock_ghz}
  device_memory_size: {own.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: ACCELERATED_FEATURES }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""


def _in_a_process_of_its_own(function: str, *arguments: Any, dump: str = "") -> str:
    """What `function` of this module printed. Its last argument is its keyword arguments."""
    require_compiler()
    # CPU as the platform: without it jax asks the plugin for a driver. No cache: a hit would leave no dump to read.
    own = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"} | (
        {"MOSAIC_GPU_DUMP_TO": dump} if dump else {}
    )
    *positional, options = arguments
    call = f"from pallas_kernels import compile_only; compile_only.{function}(*{positional!r}, **{options!r})"
    child = subprocess.run(
        [sys.executable, "-c", call], env=os.environ | own, capture_output=True, text=True, check=False
    )
    if child.returncode:
        raise CannotCompile(f"{function[1:]}{tuple(positional)} fails:\n{child.stderr[-4000:]}")
    return child.stdout


def _compile_kernels(kernels: list[str], chip: str, **options: Any) -> None:
    seconds, folder = {}, os.environ["MOSAIC_GPU_DUMP_TO"]
    for kernel in kernels:
        os.environ["MOSAIC_GPU_DUMP_TO"] = os.path.join(folder, kernel)
        os.mkdir(os.environ["MOSAIC_GPU_DUMP_TO"])
        begin = time.perf_counter()
        _compile_kernel(kernel, chip, **options)
        seconds[kernel] = round(time.perf_counter() - begin, 1)
    print(json.dumps(seconds))


def _compile_kernel(
    kernel: str,
    chip: str,
    *,
    rows: int = 8192,
    width: int = 2048,
    hidden: int = 1024,
    groups: int = 64,
    architecture: str | None = None,
    stages: int | None = None,
) -> None:
    if kernel == "top_k":
        from pallas_kernels.routing_mosaic import top_k_mosaic

        _compile(lambda logits, _: top_k_mosaic(logits, 4), chip, 1, [((rows, groups), "float32")], groups)
        return
    if kernel in MX_KERNELS:
        function, operands = described(
            kernel, CHIPS[chip].num_sms, rows=rows, width=width, hidden=hidden, groups=groups
        )
        _compile(function, chip, 1, operands, groups)
        return
    architecture = architecture or CHIPS[chip].architecture
    module = importlib.import_module(f"pallas_kernels.grouped_gemm_{architecture}")
    tiles = module.WEIGHT_GRAD_TILES if kernel == "weight_gradient" else module.GEMM_TILES
    options: dict[str, Any] = {"num_sms": CHIPS[chip].num_sms}
    if stages:
        options["tiles"] = dataclasses.replace(tiles, stages=stages)
    if kernel == "weight_gradient":
        function, shapes = getattr(module, f"grouped_gemm_weight_grad_{architecture}"), [(rows, width), (rows, hidden)]
    elif kernel.startswith("swiglu"):
        function = getattr(module, f"grouped_swiglu_{architecture}")
        shapes = [(rows, width), (groups, width, 2 * hidden)]
        options["keep"] = kernel == "swiglu_kept"
    else:
        transpose = kernel == "data_gradient"
        function = getattr(module, f"grouped_gemm_{architecture}")
        shapes = [(rows, hidden if transpose else width), (groups, width, hidden)]
        options["transpose_rhs"] = transpose
    _compile(functools.partial(function, **options), chip, 1, shapes, groups)


def _compile_layer(
    chip: str, experts: int, *, devices: int, rows: int, width: int, hidden: int, implementation: str
) -> None:
    import jax
    import jax.numpy as jnp

    from pallas_kernels.grouped_swiglu import grouped_mlp

    def loss(x, up_gate, down, sizes):
        y = grouped_mlp(x, up_gate, down, sizes, implementation=implementation)
        return jnp.sum(y.astype(jnp.float32) ** 2)[None]

    def layer(x, up_gate, down, sizes):
        value, pullback = jax.vjp(lambda x, up_gate, down: loss(x, up_gate, down, sizes), x, up_gate, down)
        return value, pullback(jnp.ones_like(value))

    into, out_of = (experts, width, 2 * hidden), (experts, hidden, width)
    compiled = _compile(layer, chip, devices, [(devices * rows, width), into, out_of], experts)
    memory = compiled.memory_analysis()
    calls = re.findall(r'custom_call_target="mosaic_gpu', compiled.as_text())
    report = {"argument_bytes": memory.argument_size_in_bytes, "temp_bytes": memory.temp_size_in_bytes}
    print(json.dumps(report | {"mosaic_calls": len(calls)}))


def _compile(function: Callable[..., Any], chip: str, devices: int, shapes: list[Any], groups: int) -> Any:
    """`function(*bfloat16 of these shapes, int32[groups])`, all sharded over `devices` along their first axis.

    shapes: or (shape, dtype) where it is another than bfloat16.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(absent_devices(chip, devices), ("ep",))
    sharded = PartitionSpec("ep")
    typed = [shape if isinstance(shape[0], tuple) else (shape, jnp.bfloat16) for shape in shapes]
    typed.append(((groups,), jnp.int32))
    own = NamedSharding(mesh, sharded)
    operands = [jax.ShapeDtypeStruct(shape, dtype, sharding=own) for shape, dtype in typed]
    program = jax.shard_map(function, mesh=mesh, in_specs=sharded, out_specs=sharded, check_vma=False)
    with jax.set_mesh(mesh), jax.default_device(mesh.devices.flat[0]):
        return jax.jit(program).lower(*operands).compile()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.compile_only", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("kernel", nargs="?", choices=KERNELS, help="one kernel (all)")
    parser.add_argument("chip", nargs="?", choices=tuple(CHIPS), help="one chip (h200, b200, b300)")
    arguments = parser.parse_args(argv)
    try:
        for chip in [arguments.chip] if arguments.chip else ["h200", "b200", "b300"]:
            for row in compile_rows([arguments.kernel] if arguments.kernel else kernels_of(chip), chip):
                print(json.dumps(row), flush=True)
    except CannotCompile as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
