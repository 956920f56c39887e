"""A plan is data: it survives JSON, its keys are those that readers rely on, and another version is refused."""

import json

import pytest
from rich.console import Console

from moejax.planning import report, show
from moejax.planning.quick import quick_plan
from tests.planning.setups import published, small_setup


def test_a_plan_survives_json():
    plan = quick_plan(published("ultra_128e"), tokens_per_second=(52_000,))
    data = json.loads(json.dumps(report.to_json(plan)))
    assert report.from_json(data) == plan
    assert list(data["memory"]["categories"]) == list(report.CATEGORIES)
    with pytest.raises(ValueError, match="version 0"):
        report.from_json(data | {"version": 0})


def test_stages_hold_every_layer_once():
    plan = quick_plan(published("ultra_128e"))
    layers = [n for stage in plan.stages for first, last in stage.chunks for n in range(first, last + 1)]
    assert sorted(layers) == list(range(plan.model.n_layers))
    assert [s.embedding for s in plan.stages] == [True] + [False] * 7
    assert [s.head for s in plan.stages] == [False] * 7 + [True]
    assert sum(s.dense_layers for s in plan.stages) == plan.model.n_dense_layers


@pytest.mark.parametrize("mesh", ["dp=1", "dp=2,ep=2,pp=2"])
def test_the_first_line_is_the_verdict(mesh, capsys):
    plan = quick_plan(small_setup(mesh))
    show.render(plan, Console(width=160))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Fits: the peak is") and "Largest:" in lines[0]
    for words in ("Memory of the fullest device", "Collectives of one device", "Model FLOPs", "bubble", "MFU"):
        assert any(words in line for line in lines), words
