"""The MXFP8 bench on a small model: what is counted by hand, and that memory is lower where it is said to be."""

import argparse

import pytest

from moejax.benches import mxfp8


@pytest.mark.slow
def test_rows():
    parser = argparse.ArgumentParser()
    mxfp8.add_arguments(parser)
    small = [f"model.{name}=64" for name in ("d_model", "moe.hidden", "moe.shared_hidden")]
    small += ["model.n_layers=2", "model.moe.num_experts=8", "model.attention.n_heads=2", "model.vocab_size=288"]
    rows = mxfp8.run(parser.parse_args(["--ep", "2", "--tokens", "1024", "--turns", "1", *small]))
    assert all(set(row) == {"quantity", "bf16", "mxfp8", "ratio"} for row in rows)
    by_name = {row["quantity"]: row for row in rows}
    wire = by_name["bytes on the wire, a step"]
    tokens, top_k, microbatches = 1024 // 2 // 2, 4, 2
    rows_sent = tokens * top_k + int(1.25 * tokens * top_k)  # what leaves for experts, and the buffer that comes back
    # one MoE layer; forward and backward; the forward runs again in nothing, since there is one stage
    assert wire["bf16"] == microbatches * 2 * rows_sent * 64 * 2
    assert wire["ratio"] == (1 + 1 / 32) / 2 <= 0.53
    weights = by_name["bytes of resident expert weights"]
    assert weights["bf16"] == 8 // 2 * 3 * 64 * 64 * 2 and weights["ratio"] == 1 + 1 / 32  # two copies of a byte
    assert by_name["bytes an MoE block keeps of a microbatch"]["ratio"] < 0.9
    assert all(row["mxfp8"] > 0 and row["bf16"] > 0 for row in rows)
