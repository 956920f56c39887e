"""The MXFP8 step compiled for absent B200s: what its exchanges carry, read from the compiled program, and its kernels.

Needs XLA's CUDA plugin (the `aot` extra). In a process of its own, since JAX keeps one target.
"""

import json

import pytest

from tests.absent import needs_compiler, own_process

COMPILE = """
import json, re, sys
from moejax import config_io
from moejax.hardware.absent_gpu import absent_mesh
from moejax.parallel import mxfp8
from moejax.parallel.step import TrainProgram

mesh, *overrides = sys.argv[1:]
config = config_io.load(None, [f"parallel.mesh='{mesh}'", *overrides])
program = TrainProgram(config, absent_mesh("b200", mesh))
text = program.lower().compile().as_text()
exchanges = [line for line in text.splitlines() if re.search(r" ragged-all-to-all(-start)?\\(", line)]
print(json.dumps({
    "types": [re.search(r"= \\(*(\\w+)\\[", line)[1] for line in exchanges],
    "kernels": {name: text.count(name) for name in
                ("mx_grouped_gemm_blackwell", "mxfp8_swiglu_quantize", "mxfp8_quantize", "grouped_gemm_weight_grad")},
    "sentence": mxfp8.sentence(config, program.mesh),
}))
"""
MODEL = (
    "model.d_model=256",
    "model.n_layers=2",
    "model.moe.num_experts=8",
    "model.moe.hidden=256",
    "parallel.pipeline.microbatches=1",
    "parallel.experts.transport=rowwise",
    "data.sequence_length=128",
    "train.batch_tokens=2048",
    "model.attention.implementation=xla",
)


def compiled(*overrides: str) -> dict:
    return json.loads(own_process("-c", COMPILE, "ep=4", *MODEL, *overrides).splitlines()[-1])


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_exchange_of_rows_carries_bytes():
    """All four, data and scales apart, for tensor cores that take them; without MXFP8 the same carry bfloat16."""
    step = compiled("precision.mxfp8.experts=mxfp8", "precision.mxfp8.hardware=required")
    assert len(step["types"]) >= 8 and set(step["types"]) == {"u8"}
    assert step["kernels"]["mx_grouped_gemm_blackwell"] and step["kernels"]["grouped_gemm_weight_grad"]
    assert step["kernels"]["mxfp8_swiglu_quantize"] and step["kernels"]["mxfp8_quantize"]
    assert "tensor cores of NVIDIA B200" in step["sentence"]
    assert set(compiled()["types"]) == {"bf16"}
