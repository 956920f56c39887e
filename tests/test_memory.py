"""Memory: flat in the number of microbatches under 1F1B, and no weight copied among what a backward keeps.

the compiled step of four stages --memory_analysis--> bytes of temporaries, at 8 and at 64 microbatches
"""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from moejax.context import single_device_context
from moejax.models.transformer import abstract_params
from moejax.parallel.stage import Microbatch
from moejax.parallel.step import BATCH_SPEC, TrainProgram
from tests.small import small_program

MICROBATCH_TOKENS = 256  # so that a stage input is large beside the books that are kept


def temporaries(schedule: str, microbatches: int) -> int:
    """Bytes of temporaries of the train step on a device, from shapes alone."""
    program = small_program(
        "pp=4",
        [
            "model.n_dense_layers=0",
            "model.n_layers=4",
            f"parallel.pipeline.schedule={schedule}",
            f"parallel.pipeline.microbatches={microbatches}",
            f"train.batch_tokens={microbatches * MICROBATCH_TOKENS}",
        ],
    )
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(program._fresh, jax.random.key(0)),
        program.state_shardings(),
    )
    length = program.config.data.sequence_length
    ids = jax.ShapeDtypeStruct(
        (microbatches, MICROBATCH_TOKENS // length, length),
        jnp.int32,
        sharding=NamedSharding(program.mesh, BATCH_SPEC),
    )
    # machine code is of no interest here, only what XLA keeps: LLVM may be quick
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    compiled = program.step.lower(state, Microbatch(ids, ids, ids, ids)).compile(options)
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.timeout(900)
def test_1f1b_needs_no_more_memory_for_64_microbatches_than_for_8_and_gpipe_does():
    few, many = (temporaries("1f1b", microbatches) for microbatches in (8, 64))
    assert abs(many / few - 1) < 0.05, (few, many)
    more = temporaries("gpipe", 64)
    # GPipe keeps the inputs of all 64 where 1F1B keeps those of at most 4
    stage_input = 4 * MICROBATCH_TOKENS * 32
    assert more - many > 50 * stage_input, (many, more)


def kept_shapes(program: TrainProgram, name: str) -> list[tuple[int, ...]]:
    """Shapes, by layer, of what the backward of a stack of blocks keeps from its forward."""
    stages, kept = program.stages, []
    model = program.config.model

    def run(params, x, segment_ids):
        blocks = stages.blocks(params, x, single_device_context(segment_ids))
        kept.extend(shape for shape, _ in blocks[name].kept)

    params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, program.params_dtype), abstract_params(model))
    x = jax.ShapeDtypeStruct((3, 16, model.d_model), stages.compute)
    jax.eval_shape(run, params, x, jax.ShapeDtypeStruct((3, 16), jnp.int32))
    return kept


# no dimension is like another, so that a weight is known by its shape
ODD_SHAPES = (
    "model.d_model=24",
    "model.attention.n_heads=6",
    "model.attention.n_kv_heads=2",
    "model.attention.head_dim=20",
    "model.moe.hidden=28",
    "model.moe.shared_hidden=36",
    "model.moe.num_experts=10",
)


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("params", ["float32", "bfloat16"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("stack", ["dense_blocks", "moe_blocks"])
def test_no_matrix_is_kept_among_the_residuals(stack, params, compute, recompute):
    settings = [f"precision.params={params}", f"precision.compute={compute}", f"parallel.recompute={recompute}"]
    program = small_program("dp=1", [*ODD_SHAPES, *settings])
    weights = {w.shape[1:] for w in jax.tree.leaves(abstract_params(program.config.model)[stack]) if w.ndim > 2}
    kept = kept_shapes(program, stack)
    assert kept and not weights & set(kept)
    if recompute == "block":
        # the input of a block, and the experts that top-k chose (with the runner-up): they are never chosen again
        chosen = [(48, 3)] if stack == "moe_blocks" else []
        assert kept == [(3, 16, 24), *chosen]


TAKE_AND_FREE = """
import ctypes, resource
from moejax.mesh import prepare_devices

prepare_devices(1)
libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(5 << 29)
    ctypes.memset(block, 1, 1 << 26)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(step(), step(), step())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_memory_freed_by_a_step_is_there_for_the_next():
    """More than 2 GB, where glibc's own limit ends; a page of 4 KiB taken anew is a fault."""
    done = subprocess.run([sys.executable, "-c", TAKE_AND_FREE], capture_output=True, text=True, check=True)
    first, *later = map(int, done.stdout.split())
    assert first > 1000 and max(later) < 100
