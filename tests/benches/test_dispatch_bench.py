"""The dispatch bench on a small layer: every transport, equal answers, and bytes that can be counted by hand."""

import argparse

import pytest

from moejax.benches import dispatch
from moejax.errors import UserError


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    dispatch.add_arguments(parser)
    return parser.parse_args(["--ep", "4", "--tokens", "16", "--experts", "8", "--top-k", "2", "--width", "8", *words])


@pytest.mark.slow
def test_rows():
    rows = dispatch.run(parse("--hidden", "8", "--repeat", "1", "--routing", "balanced", "one-hot"))
    assert {(row["transport"], row["routing"]) for row in rows} == {
        (transport, routing)
        for transport in ("rowwise", "hierarchical", "all_to_all", "all_gather")
        for routing in ("balanced", "one-hot")
    }
    for row in rows:
        assert row["max_abs_error"] < 1e-4 and row["seconds"] > 0 and row["temp_bytes"] > 0, row
    by_name = {(row["transport"], row["routing"]): row for row in rows}
    row_bytes, tokens, k = 8 * 4, 16, 2
    # balanced: three quarters of the routes go to other devices and come back, forward and backward
    assert by_name["rowwise", "balanced"]["bytes_sent_per_device"] == 4 * tokens * k * 3 // 4 * row_bytes
    assert by_name["rowwise", "balanced"]["buffer_rows"] == 40  # 1.25 * 16 * 2
    # one-hot: both experts are on the first device, which returns what the three others sent
    assert by_name["rowwise", "one-hot"]["bytes_sent_per_device"] == 2 * 3 * tokens * k * row_bytes
    assert by_name["rowwise", "one-hot"]["rounds"] == 4  # 4 * 16 * 2 = 128 rows through 40


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (["--ep", "3"], "divide"),
        (["--routing", "learned"], "--run"),
        (["--routing", "learned", "--run", "/nonexistent"], "cannot be read"),
        (["--top-k", "9"], "top_k=9"),
        (["--capacity-factor", "0"], "capacity_factor"),
    ],
)
def test_bad_input(words: list[str], word: str):
    with pytest.raises(UserError, match=word):
        arguments = parse(*words)
        dispatch.as_config(arguments)
        dispatch.expert_load(arguments, arguments.routing[0])
