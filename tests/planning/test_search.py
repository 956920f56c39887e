"""The search ranks what fits by time, says why each other lost, and finds how many GPUs would do."""

import dataclasses
import re

import pytest

from moejax import config_io
from moejax.errors import UserError
from moejax.hardware.gpus import read_gpu
from moejax.mesh import check_fit, parse_mesh
from moejax.planning import search
from tests.planning.setups import CONFIGS

H200 = read_gpu("h200")


def config(name, *overrides):
    return config_io.load(str(CONFIGS / f"{name}.yaml"), list(overrides))


@pytest.fixture
def found(searched):
    """The layouts of a small search, to be changed at will."""
    return [dataclasses.replace(one) for one in searched]


@pytest.fixture(scope="module")
def searched():
    return search.search(config("tiny_64e", "train.batch_tokens=1048576"), H200, 8)


def test_the_winner_is_the_fastest_that_fits_and_every_loser_has_a_reason(found):
    assert len(found) >= 5
    fitting = [one for one in found if one.time is not None]
    times = [one.time.step_seconds for one in fitting]
    assert times == sorted(times) and found[: len(fitting)] == fitting
    assert not found[0].reason and all(one.reason for one in found[1:])
    for one in found:
        assert one.shape.devices == 8
        assert (one.time is None) == (one.memory.peak_bytes > H200.usable_bytes)
        check_fit(one.config, one.shape)
    plan = search.settle(found, "h200", None, 3)
    assert plan.verdict.fits and plan.settings.ep == found[0].shape.ep


def test_what_the_compiler_finds_too_large_is_not_taken(found):
    first, second = found[0], found[1]
    asked = []

    def compile_plan(setup, gpu, *_):
        asked.append(setup)
        plan = search.quick.quick_plan(setup)
        if setup is first.setup:
            object.__setattr__(plan.memory, "peak_bytes", H200.memory_bytes)
        return plan

    plan = search.settle(found, "h200", compile_plan, 2)
    assert asked == [first.setup, second.setup]
    assert found[0] is second and plan is second.compiled
    assert "compiled, does not fit" in first.reason


def test_a_model_that_fits_nowhere_is_told_what_is_missing_and_what_would_do():
    with pytest.raises(UserError, match="GB too much on each GPU; the smallest number") as error:
        search.search(config("medium_64e"), H200, 4)
    count = int(re.search(r"that would do is (\d+)", str(error.value))[1])
    assert count > 4
    # so many do, and half of them do not
    sizes = {
        n: any(search._holds(config("medium_64e"), H200, s) for s in search.meshes(config("medium_64e"), n))
        for n in (count // 2, count)
    }
    assert sizes == {count // 2: False, count: True}


def test_the_layout_to_train_with_is_a_command_line(found):
    for one in found[:3]:
        flag, mesh, *overrides = search.overrides(one).split()
        assert flag == "--mesh" and parse_mesh(mesh) == one.shape
        again = config("tiny_64e", "train.batch_tokens=1048576", f"parallel.mesh='{mesh}'", *overrides)
        assert again.parallel.pipeline.microbatches == one.pipeline.microbatches
