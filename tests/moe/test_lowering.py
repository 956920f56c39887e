"""What the rowwise layer becomes on GPUs, read from the program lowered and compiled for them where there are none."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from moejax.config import Overflow
from moejax.hardware.absent_gpu import absent_mesh
from moejax.moe.dispatch import Transport
from moejax.moe.exchange import through_experts
from moejax.moe.hierarchical import Hierarchical
from moejax.moe.rowwise import Rowwise
from tests.absent import needs_compiler, own_process

DEVICES, T, D, E, K = 8, 64, 16, 32, 4
CAPACITY = 1.25


def traced(transport: Transport, mesh: Mesh, *, backward: bool):
    """A layer whose experts scale every row, so that all else is the road's."""

    def region(x, ids, weights, scale):
        def y(x, weights, scale):
            return through_experts(transport, lambda s, rows, sizes: rows * s, scale, x, ids, weights, E)[0]

        if not backward:
            return y(x, weights, scale)
        return jax.grad(lambda *inputs: jnp.sum(y(*inputs)), (0, 1, 2))(x, weights, scale)

    spec = PartitionSpec("ep")
    out = (spec, spec, PartitionSpec()) if backward else spec
    fn = jax.shard_map(region, mesh=mesh, in_specs=(spec, spec, spec, PartitionSpec()), out_specs=out, check_vma=False)
    shape = lambda *s, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(s, dtype)  # noqa: E731
    n = DEVICES * T
    return jax.jit(fn).trace(shape(n, D), shape(n, K, dtype=jnp.int32), shape(n, K, dtype=jnp.float32), shape())


def lowered(transport: Transport, *, backward: bool) -> str:
    """StableHLO of the layer for CUDA."""
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("ep",), axis_types=(AxisType.Auto,))
    return traced(transport, mesh, backward=backward).lower(lowering_platforms=("cuda",)).as_text()


def compiled(chip: str) -> str:
    """Optimised HLO of the rowwise layer, value and gradients, for eight absent GPUs. For a process of its own."""
    transport = Rowwise("ep", DEVICES, CAPACITY, Overflow.drop)
    return traced(transport, absent_mesh(chip, f"ep={DEVICES}"), backward=True).lower().compile().as_text()


def count(text: str, operation: str) -> int:
    return len(re.findall(rf"(?:stablehlo\.|custom_call @){operation}\b", text))


@pytest.mark.parametrize("backward", [False, True])
def test_one_counts_all_gather_and_ragged_exchanges(backward: bool):
    """Forward there and back; backward the same two again, mirrored. The only all-gather is of E counts."""
    text = lowered(Rowwise("ep", DEVICES, CAPACITY, Overflow.drop), backward=backward)
    assert count(text, "ragged_all_to_all") == (4 if backward else 2)
    (gather,) = (line for line in text.splitlines() if "stablehlo.all_gather" in line)
    assert f"(tensor<1x{E}xi32>) -> tensor<{DEVICES}x{E}xi32>" in gather
    assert count(text, "all_to_all") == 0


def test_nothing_reorders_the_received_rows():
    """No sort, gather or scatter has an operand or a result of the receive buffer's rows."""
    transport = Rowwise("ep", DEVICES, CAPACITY)
    rows = transport.buffer_rows(T, K, E)
    text = lowered(transport, backward=True)
    assert f"tensor<{rows}x{D}xbf16>" in text
    moving = re.compile(r"stablehlo\.(sort|gather|scatter|dynamic_gather|dynamic_slice|all_gather)\b")
    for line in text.splitlines():
        if moving.search(line):
            assert f"tensor<{rows}x" not in line, line


def test_hierarchical_talks_within_and_across_nodes_only():
    text = lowered(Hierarchical("ep", DEVICES, 4, CAPACITY, Overflow.drop), backward=False)
    assert count(text, "ragged_all_to_all") == 4
    groups = re.findall(r"@ragged_all_to_all.*?replica_groups = dense<(\[\[.*?\]\])>", text)
    assert sorted(set(groups)) == ["[[0, 1, 2, 3], [4, 5, 6, 7]]", "[[0, 4], [1, 5], [2, 6], [3, 7]]"]


@pytest.mark.slow
@needs_compiler
def test_compiled_for_absent_h200s_it_is_still_so():
    """After all of XLA's passes: one all-gather, of counts, ragged exchanges, and nothing that reorders the buffer."""
    text = own_process("-c", "from tests.moe.test_lowering import compiled; print(compiled('h200'))")
    calls = [line for line in text.splitlines() if " = " in line]

    def of(*operations: str) -> list[str]:
        return [x for x in calls if re.search(rf" (?:{'|'.join(operations)})(?:-start)?\(", x)]

    (gather,) = of("all-gather")
    assert f"s32[{DEVICES},{E}]" in gather
    assert len(of("ragged-all-to-all")) == 4 and not of("all-to-all")
    rows = Rowwise("ep", DEVICES, CAPACITY).buffer_rows(T, K, E)
    assert any(f"bf16[{rows},{D}]" in x for x in calls)
    for line in of("sort", "gather", "scatter", "dynamic-slice"):
        assert f"[{rows}," not in line and f"[{rows}]" not in line, line
