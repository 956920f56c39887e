"""Collectives are read from compiled programs as they were written: kind, axes, times, bytes, in every form of groups.

shard_map on eight simulated devices --compile--> text --read--> what was asked for; lines of GPU programs as text
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from moejax.errors import UserError
from moejax.hardware import hlo
from moejax.hardware.collectives import axes_of, by_kind, bytes_per_step, device_groups, read
from moejax.mesh import make_mesh, parse_mesh

MESH = {"pp": 2, "dp": 2, "ep": 2}
ROWS, WIDTH = 8, 128  # of the operand on each device, fp32: 4096 bytes
SPEC = PartitionSpec(("pp", "dp", "ep"))


@functools.cache
def compiled(function) -> str:
    mesh = make_mesh(parse_mesh("dp=2,ep=2,pp=2"))
    mapped = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=SPEC, out_specs=SPEC, check_vma=False))
    x = jax.ShapeDtypeStruct((8 * ROWS, WIDTH), jnp.float32, sharding=NamedSharding(mesh, SPEC))
    return mapped.lower(x).compile().as_text()


def rows(function, **options) -> dict[tuple[str, str], tuple[float, float]]:
    found = by_kind(read(compiled(function), MESH, **options))
    return {(row["kind"], row["axes"]): (row["calls"], row["bytes"]) for row in found}


def there_and_back(x):
    gathered = lax.all_gather(x, ("dp", "ep"), tiled=True)
    x = lax.psum_scatter(jnp.sin(gathered), ("dp", "ep"), tiled=True)
    return lax.ppermute(x, "pp", [(0, 1), (1, 0)])


def five_times(x):
    return lax.scan(lambda x, _: (there_and_back(x), None), x, None, length=5)[0]


def exchange(x):
    x = lax.all_to_all(x, "ep", 0, 0, tiled=True)
    return lax.psum(x, ("pp", "ep")) + lax.psum(x, "dp", axis_index_groups=[[0], [1]])


def until_large(x):
    return lax.while_loop(lambda x: jnp.max(x) < 3, lambda x: lax.pmax(x, "ep") + 1, x)


def either(x):
    return lax.cond(lax.axis_index("pp") == 0, lambda x: lax.psum(x, "ep"), lambda x: lax.psum(x, "dp") * 2, x)


def test_bytes_and_axes_of_each_kind():
    assert rows(there_and_back) == {
        ("all-gather", "dp,ep"): (1, 3 * 4096),
        ("reduce-scatter", "dp,ep"): (1, 3 * 4096),
        ("collective-permute", "pp"): (1, 4096),
    }
    found = rows(exchange)
    assert found["all-to-all", "ep"] == (1, 2048)
    assert found["all-reduce", "pp,ep"] == (1, 2 * 3 / 4 * 4096)


def test_loops_count_as_often_as_they_turn():
    once, often = rows(there_and_back), rows(five_times)
    assert often == {key: (5 * calls, 5 * size) for key, (calls, size) in once.items()}


def test_what_the_data_decides_is_the_callers_to_say():
    assert rows(until_large).get(("all-reduce", "ep"), (0, 0))[1] == 0
    assert rows(until_large, unknown_trips=3)["all-reduce", "ep"] == (3, 3 * 4096)
    assert rows(either) == {("all-reduce", "ep"): (1, 4096), ("all-reduce", "dp"): (1, 4096)}
    quarter = rows(either, shares=lambda conditional: [0.25, 0.75])
    assert sorted(calls for calls, _ in quarter.values()) == [0.25, 0.75]


@pytest.mark.parametrize(
    ("attributes", "groups", "axes"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", [(0, 1), (2, 3), (4, 5), (6, 7)], ("ep",)),
        ("replica_groups=[4,2]<=[8]", [(0, 1), (2, 3), (4, 5), (6, 7)], ("ep",)),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", [(0, 2), (1, 3), (4, 6), (5, 7)], ("dp",)),
        ("replica_groups=[2,4]<=[4,2]T(1,0)", [(0, 2, 4, 6), (1, 3, 5, 7)], ("pp", "dp")),
        ("replica_groups=mesh['pp'=2,'dp'=2,'ep'=2] {'dp'}", [(0, 2), (1, 3), (4, 6), (5, 7)], ("dp",)),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", [(0, 2), (1, 3), (4, 6), (5, 7)], ("dp",)),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", [(0, 4), (1, 5), (2, 6), (3, 7)], ("pp",)),
        ("replica_groups={}", [tuple(range(8))], ("pp", "dp", "ep")),
        ("source_target_pairs={{0,4},{4,0},{1,1}}", [(0, 4), (4, 0)], ("pp",)),
    ],
)
def test_every_form_of_groups(attributes, groups, axes):
    instruction = hlo.Instruction("x", "all-reduce", (), (), f", channel_id=1, {attributes}, to_apply=%add")
    found = device_groups(instruction, MESH)
    assert sorted(found) == groups and axes_of(found, MESH) == axes


GPU = """HloModule jit_f, is_scheduled=true

ENTRY %main (param.8: bf16[8,128]) -> bf16[8,128] {
  %param.8 = bf16[8,128]{1,0} parameter(0)
  %out = bf16[16,128]{1,0} fusion(), kind=kLoop
  %offsets = s32[2]{0} constant({0, 4})
  %ragged-all-to-all-start = ((bf16[8,128]{1,0}, bf16[16,128]{1,0}), bf16[16,128]{1,0}) ragged-all-to-all-start(\
%param.8, %out, %offsets, %offsets, %offsets, /*index=5*/%offsets), channel_id=1, \
replica_groups={{0,1},{2,3},{4,5},{6,7}}, metadata={op_name="jit(f)/moe/dispatch"}, \
backend_config={"collective_backend_config":{"is_sync":false}}
  %done = bf16[16,128]{1,0} ragged-all-to-all-done(%ragged-all-to-all-start)
  ROOT %permute = bf16[8,128]{1,0} collective-permute(%param.8), channel_id=2, source_target_pairs={{0,4},{4,0}}
}
"""


def test_a_gpu_program_with_starts_and_ends():
    ragged, permute = read(GPU, MESH)
    assert (ragged.kind, ragged.axes, ragged.payload, ragged.sent) == ("ragged-all-to-all", ("ep",), 2048, 1024)
    assert ragged.scope == "jit(f)/moe/dispatch" and not ragged.synchronous
    assert permute.synchronous and permute.bytes_per_step == 2048
    assert bytes_per_step([ragged, permute]) == 3072


def test_shapes_in_bytes():
    assert hlo.array_bytes("(f32[2,3]{1,0:T(8,128)}, (s4[3]{0}, pred[]), f8e4m3fn[5]{0})") == (24, 2, 1, 5)
    assert hlo.array_bytes("bf16[]") == (2,)


def test_other_text_is_refused():
    with pytest.raises(UserError, match="ENTRY"):
        hlo.parse("module @jit_f {}")
    assert np.isclose(bytes_per_step([]), 0)
