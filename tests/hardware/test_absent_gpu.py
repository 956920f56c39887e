"""Whole steps compile for GPUs that are not there: 512 of them, in a process of their own, since JAX keeps one
target."""

import json

import pytest

from moejax.errors import UserError
from moejax.hardware.absent_gpu import absent_mesh, missing
from tests.absent import needs_compiler, own_process

COMPILE = r"""
import json, re, sys, time
from collections import Counter
import jax
from moejax import config_io
from moejax.hardware.absent_gpu import absent_mesh, bytes_per_device
from moejax.parallel.step import TrainProgram

chip, mesh, file, *overrides = sys.argv[1:]
config = config_io.load(file or None, [f"parallel.mesh='{mesh}'", *overrides])
program = TrainProgram(config, absent_mesh(chip, mesh))
begin = time.process_time(), time.perf_counter()
compiled = program.lower().compile()
seconds = time.process_time() - begin[0], time.perf_counter() - begin[1]
text = compiled.as_text()
accumulators = {
    "f32[" + ",".join(map(str, [n // {"pp": program.shape.pp, "ep": program.shape.ep}.get(axis, 1)
                                for n, axis in zip(weight.shape, [*spec, *[None] * weight.ndim])])) + "]"
    for weight, spec in zip(jax.tree.leaves(program.abstract), jax.tree.leaves(
        program.param_specs, is_leaf=lambda s: isinstance(s, jax.sharding.PartitionSpec)))
    if weight.size > 1e8
}
copied = [shape for shape in accumulators for line in text.splitlines() if f"= {shape}" in line and " copy(" in line]
kernels = [re.search(r"/((?:grouped|routing)\w*)/", line) for line in text.splitlines() if '"mosaic_gpu' in line]
names = ("collective-permute", "ragged-all-to-all", "reduce-scatter", "conditional")
print(json.dumps({
    "kernels": Counter(found[1] for found in kernels if found), "mosaic_calls": len(kernels),
    "shapes": sorted(set(re.findall(r"\bbf16\[[\d,]+\]", text))),
    "accumulators": sorted(accumulators), "copied": copied,
    "devices": program.mesh.size, "cpu_seconds": seconds[0], "seconds": seconds[1], **bytes_per_device(compiled),
    **{name: text.count(f" {name}(") + text.count(f" {name}-start(") for name in names},
}))
"""


def compiled_step(chip: str, mesh: str, file: str = "", *overrides: str) -> dict:
    return json.loads(own_process("-c", COMPILE, chip, mesh, file, *overrides).splitlines()[-1])


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_largest_config_compiles_for_512_gpus():
    """Interleaved stages, the last one a layer short, two dense layers first; three minutes of one quiet core or
    less."""
    step = compiled_step("b300", "dp=8,ep=8,pp=8", "configs/ultra_128e.yaml")
    assert step["devices"] == 512
    assert step["cpu_seconds"] < 180
    assert step["collective-permute"] and step["conditional"] and step["ragged-all-to-all"]
    # the branches of the switch hand the gradients on where they are
    assert len(step["accumulators"]) >= 2 and not step["copied"]
    assert step["aliased"] >= 0.99 * step["outputs"], "a new state beside the old one: donation is lost"


ALIGNED = (
    "model.d_model=256", "model.n_layers=2", "model.n_dense_layers=1", "model.attention.n_heads=4",
    "model.attention.n_kv_heads=2", "model.attention.head_dim=64", "model.moe.num_experts=16", "model.moe.hidden=128",
    "model.moe.shared_hidden=128", "precision.params=bfloat16", "precision.compute=bfloat16",
    "data.sequence_length=128", "train.batch_tokens=8192", "parallel.experts.overflow=drop",
)  # fmt: skip


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("chip", "kind"), [("h200", "hopper"), ("b200", "blackwell")])
def test_experts_and_routing_of_a_whole_step_are_our_kernels(chip, kind):
    """The real train step for 8 absent GPUs by `implementation="auto"`: forward and backward of the experts are Mosaic
    calls, no buffer is padded for them, and nothing has rows times experts as `ragged_dot` on a GPU would."""
    step = compiled_step(chip, "dp=2,ep=4", "", *ALIGNED)
    products = {f"grouped_gemm{kind_}_{kind}" for kind_ in ("", "_transposed", "_weight_grad")}
    assert set(step["kernels"]) == {*products, f"grouped_swiglu_{kind}", "routing_top_k"}
    assert step["mosaic_calls"] == sum(step["kernels"].values())
    rows, here = 8192 // 4 // 8 * 4 * 5 // 4, 16 // 4  # capacity_factor 1.25 of T K; experts on a device
    assert f"bf16[{rows},256]" in step["shapes"]
    assert not [shape for shape in step["shapes"] if f"[{here},{rows}," in shape or f"[{rows},{here}," in shape]


@pytest.mark.skipif(missing() is None, reason="the compiler is there")
def test_without_the_compiler_the_way_out_is_said():
    with pytest.raises(UserError, match=r"moejax\[aot\]|JAX_PLATFORMS"):
        absent_mesh("h200", "dp=8")
