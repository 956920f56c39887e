"""The figures of GPUs: one small YAML file each, in this folder or a path of your own.

    "b300"  or  path/to/own.yaml  --read_gpu--> Gpu: peaks by dtype, memory, links, and what a compiler must be told

A file of your own has the keys of `h200.yaml`; `compile` may be left out, and then a plan is made by formulas alone.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from moejax.errors import UserError
from pallas_kernels.compile_only import Chip

FOLDER = Path(__file__).parent
# Of a card's memory: what the CUDA context, NCCL's buffers, loaded kernels and gaps between allocations are reckoned to
# take. A reckoning, not a measurement: none of this program has run on these cards.
SET_ASIDE = 0.06
DTYPES = ("bfloat16", "float8", "float32")


@dataclass(frozen=True)
class Gpu:
    """peak_tflops: dense matrix products, by dtype of the operands (float32: as TF32). Bandwidths in bytes/s, per GPU;
    nvlink and network in each direction. gpus_per_node: GPUs that reach each other over nvlink. chip: of the compiler,
    None if the file does not say."""

    name: str
    vendor_name: str
    source: str
    peak_tflops: dict[str, float]
    memory_bytes: int
    hbm_bytes_per_second: float
    nvlink_bytes_per_second: float
    gpus_per_node: int
    network_bytes_per_second: float
    chip: Chip | None

    @property
    def usable_bytes(self) -> int:
        """What is left to a program."""
        return int(self.memory_bytes * (1 - SET_ASIDE))


def known_gpus() -> list[str]:
    """Names that need no path."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_gpu(name_or_path: str) -> Gpu:
    """The GPU of that name, or of that YAML file. Raises UserError, naming what there is or what the file lacks."""
    path = FOLDER / f"{name_or_path.lower()}.yaml"
    if name_or_path.endswith((".yaml", ".yml")) or "/" in name_or_path:
        path = Path(name_or_path)
    if not path.is_file():
        raise UserError(
            f"There is no file for a GPU {name_or_path!r}; the ones known are {', '.join(known_gpus())}, and "
            f"--gpu path/to/own.yaml takes another, with the keys of {FOLDER / 'h200.yaml'}."
        )
    try:
        data = OmegaConf.to_container(OmegaConf.load(path))
    except (OmegaConfBaseException, OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}.") from None
    except Exception as error:  # the YAML library has errors of its own, without a common base that we depend on
        raise UserError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(data, Mapping):
        raise UserError(f"{path} is not a GPU file: it must have the keys of {FOLDER / 'h200.yaml'}.")
    return _gpu(data, path)


def _gpu(data: Mapping[Any, Any], path: Path) -> Gpu:
    def text(key: str) -> str:
        return str(_find(data, key, path))

    def number(key: str) -> float:
        value = _find(data, key, path)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (0 < value < math.inf):
            raise UserError(f"{path}: {key}={value!r} must be a number greater than 0.")
        return value

    return Gpu(
        name=text("name"),
        vendor_name=text("vendor_name"),
        source=f"{text('source')} ({text('date')})",
        peak_tflops={dtype: float(number(f"peak_tflops.{dtype}")) for dtype in DTYPES},
        memory_bytes=int(number("memory.bytes")),
        hbm_bytes_per_second=float(number("memory.bytes_per_second")),
        nvlink_bytes_per_second=float(number("nvlink.bytes_per_second")),
        gpus_per_node=int(number("nvlink.gpus")),
        network_bytes_per_second=float(number("network.bytes_per_second")),
        chip=_chip(data, number, text, path) if data.get("compile") else None,
    )


def _chip(data: Mapping[Any, Any], number: Any, text: Any, path: Path) -> Chip:
    capability = _find(data, "compile.compute_capability", path)
    if not isinstance(capability, list) or len(capability) != 2 or not all(isinstance(n, int) for n in capability):
        raise UserError(f"{path}: compile.compute_capability={capability!r} must be two whole numbers, such as [9, 0].")
    return Chip(
        architecture=text("compile.architecture"),
        capability=(capability[0], capability[1]),
        num_sms=int(number("compile.multiprocessors")),
        memory=int(number("memory.bytes")),
        memory_rate=int(number("memory.bytes_per_second")),
        l2_cache=int(number("compile.l2_bytes")),
        clock_ghz=float(number("compile.clock_ghz")),
    )


def _find(data: Mapping[Any, Any], key: str, path: Path) -> Any:
    value: Any = data
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if value is None:
        raise UserError(f"{path} lacks {key}; {FOLDER / 'h200.yaml'} shows the keys of such a file.")
    return value
