"""Work beside a collective is what the schedule puts between its start and its end, and nothing that only names values.

text of scheduled programs --spans, summary--> bytes with and without work beside
"""

from moejax.hardware.overlap import spans, summary

MESH = {"pp": 1, "dp": 1, "ep": 2}
PROGRAM = """HloModule jit_f, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (p: f32[256]) -> f32[256] {
  %p = f32[256]{0} parameter(0)
  %alone = ((f32[256]{0}), f32[256]{0}) all-to-all-start(%p), replica_groups={{0,1}}, dimensions={0}
  %view = f32[16,16]{1,0} bitcast(%p)
  %alone-end = f32[256]{0} all-to-all-done(%alone)
  %beside = (f32[256]{0}, f32[512]{0}) all-gather-start(%p), replica_groups={{0,1}}, dimensions={0}
  %other = f32[256]{0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%add
  %product = f32[64]{0} fusion(%view), kind=kLoop, calls=%add
  %beside-end = f32[512]{0} all-gather-done(%beside)
  %sync = ((f32[256]{0}), f32[256]{0}) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}, \
backend_config={"collective_backend_config":{"is_sync":true}}
  %late = f32[64]{0} fusion(%view), kind=kLoop, calls=%add
  %sync-end = f32[256]{0} collective-permute-done(%sync)
  ROOT %result = f32[256]{0} fusion(%other, %product, %late), kind=kLoop, calls=%add
}
"""


def test_work_between_start_and_end_counts_and_naming_does_not():
    alone, beside, reduced, sync = spans(PROGRAM, MESH)
    assert (alone.kind, alone.sent, alone.work) == ("all-to-all", 512, ())
    assert (beside.kind, beside.sent, beside.work, beside.work_bytes) == ("all-gather", 1024, ("product",), 256)
    assert reduced.work == () and reduced.sent == 1024
    assert sync.work == () and sync.sent == 1024, "a synchronous pair is waited for, whatever stands in it"


def test_a_summary_adds_bytes():
    total = summary(spans(PROGRAM, MESH))
    assert total["collectives"] == 4 and total["with_work_beside"] == 1
    assert total["bytes"] == 3584 and total["overlapped_share"] == 1024 / 3584
    assert summary([])["overlapped_share"] == 0
