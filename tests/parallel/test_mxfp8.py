"""MXFP8 in the training step: schedules and meshes, copies that follow the master, what devices are asked for."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from moejax.errors import UserError
from moejax.mesh import make_mesh, parse_mesh
from moejax.models.quantised import QuantisedWeight, is_quantised
from moejax.parallel import mxfp8
from pallas_kernels import dequantize
from tests.pallas_kernels.integer_rule import rounded
from tests.small import small_batch, small_config, small_program

ALL = tuple(f"precision.mxfp8.{name}=mxfp8" for name in ("experts", "shared_experts", "attention"))
TWO = ("model.n_layers=2", "parallel.pipeline.microbatches=2")  # layers: a dense one and one with experts


@functools.cache
def gradients(mesh: str, *overrides: str) -> tuple[float, Any]:
    """(loss, gradients in model order) of one step."""
    program = small_program(mesh, (*TWO, *overrides))
    state, batch = program.init(), program.place_batch(small_batch(program.config))
    step = jax.jit(program.gradients)
    found, totals, tokens = step(state.params, batch, jax.random.key(7))
    return float(totals.cross_entropy / tokens), jax.device_get(program._to_logical(found))


def distance(ours: Any, theirs: Any) -> float:
    """The largest relative L2 distance of a tensor."""
    apart = jax.tree.map(lambda a, b: float(np.linalg.norm(a - b) / np.linalg.norm(b)), ours, theirs)
    return max(jax.tree.leaves(apart))


@pytest.mark.slow
def test_the_step_is_near_what_it_stands_for():
    """Loss and gradients beside those of fp32: apart by what rounding does everywhere, and not by more."""
    (loss, here), (exact_loss, exact) = gradients("dp=1", *ALL), gradients("dp=1")
    assert loss == pytest.approx(exact_loss, rel=1e-2)
    assert 2e-2 < distance(here, exact) < 0.5


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("mesh", "overrides"),
    [
        ("pp=2", ("parallel.pipeline.schedule=zero_bubble", "parallel.pipeline.stash=residuals")),
        ("dp=2,ep=2,pp=2", ("parallel.experts.transport=rowwise", "parallel.recompute=block")),
    ],
)
def test_schedules_and_meshes_agree(mesh, overrides):
    """To what a number on the edge of two roundings does."""
    loss, here = gradients("dp=1", *ALL)
    other_loss, there = gradients(mesh, *ALL, *overrides)
    assert other_loss == pytest.approx(loss, rel=1e-4)
    assert distance(there, here) < 1e-2


@pytest.mark.slow
def test_layers_are_left_out_by_index():
    """All of them left out: the numbers of a run without MXFP8."""
    loss, here = gradients("dp=1", *ALL, "precision.mxfp8.keep_bf16=true", "precision.mxfp8.exclude_layers=[0,1]")
    exact_loss, exact = gradients("dp=1")
    assert loss == pytest.approx(exact_loss, rel=1e-6) and distance(here, exact) < 1e-5


@pytest.mark.slow
def test_copies_follow_the_master_onto_another_mesh():
    """What is saved is the master alone; the copies are made from it again, bit for bit, on every mesh."""
    one, many = small_program("dp=1", (*TWO, *ALL)), small_program("dp=2,ep=2,pp=2", (*TWO, *ALL))
    state = one.init()
    portable = jax.device_get(one.portable(state))
    moved = many.from_portable(portable)
    here, there = (jax.device_get(p._to_logical(s.params)) for p, s in ((one, state), (many, moved)))
    jax.tree.map(np.testing.assert_array_equal, here, there)
    experts = here["moe_blocks"]["moe"]["experts"]
    master = portable.master["moe_blocks"]["moe"]["experts"]
    for name, weight in experts.items():
        assert isinstance(weight, QuantisedWeight) and weight.plain is None
        np.testing.assert_array_equal(dequantize(weight.backward), rounded(master[name], -1))
        np.testing.assert_array_equal(np.swapaxes(dequantize(weight.forward), -1, -2), rounded(master[name], -2))
    heads = here["moe_blocks"]["attention"]["w_out"]  # two axes contracted
    w_out = np.asarray(portable.master["moe_blocks"]["attention"]["w_out"])
    flat = w_out.reshape(len(w_out), -1, w_out.shape[-1])
    np.testing.assert_array_equal(np.swapaxes(dequantize(heads.forward), -1, -2), rounded(flat, -2))


def test_plain_weights_stay_only_on_request():
    specs = small_program("dp=1", (*TWO, ALL[0], "precision.mxfp8.keep_bf16=true")).working_specs
    kept = [leaf for leaf in jax.tree.leaves(specs, is_leaf=is_quantised) if is_quantised(leaf)]
    assert len(kept) == 2 and all(weight.plain is not None for weight in kept)
    plain, mx, both = (
        small_program("dp=1", (*TWO, *more)).parameter_bytes_per_device()
        for more in ((), (ALL[0],), (ALL[0], "precision.mxfp8.keep_bf16=true"))
    )
    experts = 8 * (32 * 64 + 32 * 32)  # weights of one
    assert plain - mx == experts * 4 - experts * 2 * 33 // 32
    assert both - plain == experts * 2 * 33 // 32


def test_what_runs_where_is_said_in_one_line():
    mesh = make_mesh(parse_mesh("dp=1"))
    assert mxfp8.sentence(small_config(), mesh) is None
    said = mxfp8.sentence(small_config(*ALL[:2]), mesh)
    assert said and "emulated exactly" in said and "experts and their exchanges, shared experts" in said
    assert "\n" not in said and "attention" not in said


def test_required_hardware_that_is_not_there_is_an_error():
    with pytest.raises(UserError, match=r"hardware=required.*B200.*set it to auto"):
        small_program("dp=1", (ALL[0], "precision.mxfp8.hardware=required"))


def test_blackwell_has_the_hardware():
    @dataclasses.dataclass
    class Device:
        compute_capability: str
        device_kind: str = "NVIDIA"

    class Mesh:
        def __init__(self, *capabilities: str):
            self.devices = np.array([Device(c) for c in capabilities])

    blackwell: Any = Mesh("10.0")
    config = functools.partial(small_config, ALL[0], "precision.compute=bfloat16", "model.d_model=128")
    assert "model.moe.hidden=32" in str(mxfp8.reason_to_emulate(config(), blackwell))
    assert mxfp8.reason_to_emulate(config("model.moe.hidden=128"), blackwell) is None
    assert "bfloat16" in str(mxfp8.reason_to_emulate(config("precision.compute=float32"), blackwell))
    assert mxfp8.has_hardware(Mesh("10.0", "10.3"))  # type: ignore[arg-type]
    assert not mxfp8.has_hardware(Mesh("9.0"))  # type: ignore[arg-type]
    assert not mxfp8.has_hardware(Mesh("10.0", "9.0"))  # type: ignore[arg-type]
