"""What a plan says: one tree of plain values, made by formulas (`quick`) or from the compiled step (`compiled`).

    config, mesh, GPU --quick.plan / compiled.plan--> Plan --to_json--> --json FILE, and the data of the --html page
                                                        `--show.render--> the terminal

Units are in the names or here: bytes are per device unless said, seconds are per optimizer step, FLOPs are of the model
(recompute is not model work). Keys are stable; a change of meaning changes `VERSION`.
"""

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any

VERSION = 1


class Source(enum.StrEnum):
    quick = "quick"  # formulas
    compiled = "compiled"  # the program that XLA made for the absent GPU


@dataclass(frozen=True)
class Verdict:
    """fits: whether the peak is within what the card leaves to a program. spare_bytes: what is left, negative if it
    does not fit. largest: name of the largest memory category. smallest_gpus: fewest GPUs of this kind that would
    hold the model (None: not looked for). advice: what to change, most effective first."""

    fits: bool
    sentence: str
    spare_bytes: int
    largest: str
    advice: list[str]
    smallest_gpus: int | None = None


@dataclass(frozen=True)
class ModelFacts:
    """parameters, flops_per_token: by part, as in `moejax.accounting`."""

    name: str
    config_file: str
    d_model: int
    n_layers: int
    n_dense_layers: int
    dense_hidden: int
    vocab_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    hidden: int
    shared_hidden: int
    shared_experts: int
    sequence_length: int
    parameters_total: int
    parameters_active: int
    parameters: dict[str, int]
    flops_per_token_total: float
    flops_per_token: dict[str, float]


@dataclass(frozen=True)
class Machine:
    """A GPU of `moejax/hardware/*.yaml`, and how many of them. usable_bytes: of memory_bytes, what a program gets."""

    gpu: str
    gpus: int
    gpus_per_node: int
    memory_bytes: int
    usable_bytes: int
    peak_tflops: dict[str, float]  # dense, by dtype: bfloat16, float8, float32 (through TF32)
    hbm_bytes_per_second: float
    nvlink_bytes_per_second: float  # each direction, per GPU
    network_bytes_per_second: float  # each direction, per GPU
    source: str


@dataclass(frozen=True)
class Settings:
    """What is run. tokens: of one microbatch on one device. capacity_rows: of each expert receive buffer."""

    pp: int
    dp: int
    ep: int
    microbatches: int
    sequences: int
    tokens: int
    batch_tokens: int
    schedule: str
    chunks: int
    stash: str
    recompute: str
    regions_kept: list[str]
    ends: str
    transport: str
    capacity_factor: float
    capacity_rows: int
    params_dtype: str
    compute_dtype: str
    mxfp8: bool
    attention: str
    grouped_gemm: str


@dataclass(frozen=True)
class Stage:
    """What pipeline stage `index` holds: by chunk the layers, as [first, last] of the model, dense ones first."""

    index: int
    chunks: list[list[int]]
    dense_layers: int
    moe_layers: int
    embedding: bool
    head: bool


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest device. categories: name -> bytes, in order of `CATEGORIES`; they add up to total_bytes.

    compiler: arguments, outputs, aliased, temporaries, total (arguments + outputs - aliased + temporaries) and peak
    of the compiled program; None in a quick plan. scopes: of the temporaries alive at the peak, bytes by named scope.
    """

    peak_bytes: int
    total_bytes: int
    categories: dict[str, int]
    compiler: dict[str, int] | None = None
    scopes: dict[str, int] | None = None


CATEGORIES = {
    "weights": "working weights",
    "master": "fp32 master copy, this device's part",
    "moments": "two fp32 moments of Adam, this device's part",
    "gradients": "fp32 gradient accumulators of the stage",
    "stash": "rings of the pipeline: inputs, cotangents and residuals of microbatches under way",
    "saved": "what one microbatch's forward keeps for its backward, all layers of a stage",
    "dispatch": "rows on their way to and from experts, and in front of them",
    "temporaries": "everything else that lives for a moment: one block's backward, logits, the optimizer",
}


@dataclass(frozen=True)
class Collective:
    """kind: as XLA names it. axis: mesh axes it runs over ("ep", "dp+ep", "pp"). purpose: which part of the step.

    count: how many of them a device takes part in, in one step. bytes: that leave one device in one step, all of them
    together. link: nvlink or network, the slowest it crosses.
    """

    kind: str
    axis: str
    purpose: str
    count: float
    bytes: float
    link: str


@dataclass(frozen=True)
class TimeTerm:
    """resource: compute, hbm, nvlink or network. hidden: whether the roofline counts it as under other work."""

    name: str
    resource: str
    seconds: float
    hidden: bool


@dataclass(frozen=True)
class Time:
    """step_seconds: busy time of the fullest stage, divided by 1 - bubble, plus what follows the pipeline.

    mfu: model FLOPs over the peak of the compute dtype. assumptions: what the estimate takes for granted.
    """

    step_seconds: float
    tokens_per_second: float
    tokens_per_second_per_gpu: float
    model_tflops_per_gpu: float
    mfu: float
    bubble: float
    terms: list[TimeTerm]
    assumptions: list[str]


@dataclass(frozen=True)
class Measured:
    """What a throughput measured elsewhere means for this model (`--tokens-per-second`, per GPU)."""

    tokens_per_second_per_gpu: float
    model_tflops_per_gpu: float
    mfu: float


@dataclass(frozen=True)
class Plan:
    """The whole answer. notes: what is not as it would be on the real machine. seconds: the plan itself took."""

    source: Source
    verdict: Verdict
    model: ModelFacts
    machine: Machine
    settings: Settings
    stages: list[Stage]
    memory: Memory
    collectives: list[Collective]
    time: Time
    measured: list[Measured]
    notes: list[str]
    seconds: float
    version: int = VERSION


def to_json(plan: Plan) -> dict[str, Any]:
    """Plain dicts, lists, numbers and strings, ready for `json.dumps`."""
    return dataclasses.asdict(plan)


def from_json(data: dict[str, Any]) -> Plan:
    """The inverse of `to_json`. Raises ValueError for another version."""
    if data.get("version") != VERSION:
        raise ValueError(f"The plan has version {data.get('version')}, and this program reads version {VERSION}.")
    known: dict[str, Any] = data | {
        "source": Source(data["source"]),
        "verdict": Verdict(**data["verdict"]),
        "model": ModelFacts(**data["model"]),
        "machine": Machine(**data["machine"]),
        "settings": Settings(**data["settings"]),
        "stages": [Stage(**stage) for stage in data["stages"]],
        "memory": Memory(**data["memory"]),
        "collectives": [Collective(**collective) for collective in data["collectives"]],
        "time": Time(**data["time"] | {"terms": [TimeTerm(**term) for term in data["time"]["terms"]]}),
        "measured": [Measured(**one) for one in data["measured"]],
    }
    return Plan(**known)
