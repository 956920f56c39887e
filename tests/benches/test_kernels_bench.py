"""`python -m moejax.bench kernels --compile-only`: a row per kernel and chip, and sentences where there can be none."""

import argparse

import pytest

from moejax.benches import kernels
from moejax.errors import UserError
from pallas_kernels import compile_only


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    kernels.add_arguments(parser)
    return parser.parse_args(words)


def test_every_kernel_is_compiled_for_every_chip(monkeypatch):
    compiled = lambda kernels, chip: [{"kernel": kernel, "chip": chip} for kernel in kernels]  # noqa: E731
    monkeypatch.setattr(compile_only, "compile_rows", compiled)
    rows = kernels.run(parsed("--compile-only"))
    assert {(row["kernel"], row["chip"]) for row in rows} == {
        (kernel, chip) for chip in ("h200", "b200", "b300") for kernel in compile_only.kernels_of(chip)
    }
    assert kernels.run(parsed("--compile-only", "--chips", "b300", "--kernels", "forward")) == [
        {"kernel": "forward", "chip": "b300"}
    ]


def test_layer_is_compiled_for_few_and_many_experts(monkeypatch):
    monkeypatch.setattr(compile_only, "compile_layer_row", lambda chip, experts: {"chip": chip, "experts": experts})
    rows = kernels.run(parsed("--compile-only", "--layer", "--chips", "h200"))
    assert rows == [{"chip": "h200", "experts": 8}, {"chip": "h200", "experts": 128}]


def test_without_a_compiler_or_the_flag_a_sentence_says_what_to_do(monkeypatch):
    with pytest.raises(UserError, match="add --compile-only"):
        kernels.run(parsed())
    monkeypatch.setattr(compile_only.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="install the `aot` extra"):
        kernels.run(parsed("--compile-only"))
