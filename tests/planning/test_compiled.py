"""A plan from the compiled step: its parts add up to the compiler's total, and the formulas come close to it."""

import json

import pytest

from moejax.planning.compiled import purpose
from tests.absent import needs_compiler, own_process


def plan(tmp_path, *arguments: str) -> dict:
    file = tmp_path / "plan.json"
    own_process("-m", "moejax.plan", *arguments, "--json", str(file))
    return json.loads(file.read_text())


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_parts_are_the_compiler_s_total_and_the_formulas_come_within_a_tenth(tmp_path):
    arguments = ["--config", "configs/tiny_64e.yaml", "--mesh", "ep=8", "--gpu", "h200"]
    arguments += ["model.n_layers=3", "train.batch_tokens=131072", "parallel.pipeline.microbatches=2"]
    compiled, quick = plan(tmp_path, *arguments), plan(tmp_path, *arguments, "--quick")
    total = compiled["memory"]["compiler"]["total"]
    assert compiled["source"] == "compiled" and compiled["memory"]["peak_bytes"] >= total
    assert sum(compiled["memory"]["categories"].values()) == pytest.approx(total, rel=0.05)
    assert quick["memory"]["total_bytes"] == pytest.approx(total, rel=0.10)
    exchanges = [row for row in compiled["collectives"] if row["kind"] == "ragged-all-to-all"]
    assert exchanges and {row["axis"] for row in exchanges} == {"ep"}
    assert {row["purpose"] for row in exchanges} == {f"dispatch and combine, {w}" for w in ("forward", "backward")}


@pytest.mark.parametrize(
    ("kind", "scope", "axes", "what"),
    [
        ("ragged-all-to-all", "jit(step)/transpose(jvp(moe/combine))", "ep", "dispatch and combine, backward"),
        ("all-gather", "jit(step)/optimizer/add", "dp", "weights"),
        ("all-reduce", "jit(step)/optimizer/sum", "dp", "gradient norm"),
        ("reduce-scatter", "jit(step)/shard_map/reduce_gradients/reduce_scatter", "dp+ep", "gradients"),
        ("collective-permute", "jit(step)/shard_map/while/body/ppermute", "pp", "between stages"),
        ("all-reduce", "jit(step)/shard_map/psum", "pp+dp+ep", "statistics and counts"),
    ],
)
def test_a_collective_s_purpose_is_read_from_its_scope(kind, scope, axes, what):
    assert purpose(kind, scope, axes) == what
