"""The compiler's report of live ranges is read as it is written, and every buffer finds its part of the step."""

import pytest

from moejax.planning.allocation import ELSEWHERE, part_of, peak_buffers, peak_by_scope

REPORT = """HloLiveRange (max 14):
  InstructionSequence:
    0:x.1
  BufferLiveRange:
    x.1{}:0-14
  Live ranges at 4 (peak):
    gemm_fusion_dot.2{}: 8388608 bytes (cumulative: 8388608 bytes)
    while.3{2,0}: 4194304 bytes (cumulative: 12582912 bytes)
    x.1{}: 100 bytes (cumulative: 12583012 bytes)
  Stack trace breakdown for peak usage: 12 583 012 bytes
    main.5 (100.0%, total: 12 583 012 bytes, current: 0 bytes, remaining: 12 583 012 bytes)
"""
PROGRAM = """ENTRY %main.5 (x.1: f32[5,5]) -> f32[] {
  %x.1 = f32[5,5]{1,0} parameter(0), metadata={op_name="state.params"}
  %gemm_fusion_dot.2 = f32[5,5]{1,0} fusion(%x.1), calls=%f, metadata={op_name="jit(s)/transpose(jvp(moe/experts))/dot"}
  ROOT %while.3 = (s32[], s32[], (f32[5,5])) while(%t), metadata={op_name="jit(_step)/shard_map/while"}
}
"""


def test_the_peak_is_read_and_nothing_else():
    assert peak_buffers(REPORT) == [("gemm_fusion_dot.2", 8388608), ("while.3", 4194304), ("x.1", 100)]
    assert peak_buffers("") == []


def test_buffers_are_summed_by_part():
    assert peak_by_scope(REPORT, PROGRAM) == {"experts": 8388608, ELSEWHERE: 4194304 + 100}


@pytest.mark.parametrize(
    ("scope", "part"),
    [
        ("jit(step)/shard_map/while/body/backward/transpose(jvp(moe/dispatch))/gather", "dispatch"),
        ("jit(step)/moe/shared_expert/dot_general", "shared expert"),
        ("jit(step)/attention/moe", "rest of the MoE block"),
        ("jit(step)/optimizer/add", "optimizer"),
        ("", ELSEWHERE),
    ],
)
def test_the_innermost_named_scope_decides(scope, part):
    assert part_of(scope) == part
