"""The mesh never changes the mathematics: loss, statistics and every gradient agree with one device, in fp32."""

import functools

import jax
import numpy as np
import pytest

from moejax.parallel.layout import to_logical
from tests.small import small_batch, small_program

TOLERANCE = 2e-5  # relative L2, per tensor

STAGED = ["pp=2", "dp=2,ep=2,pp=2", "dp=1,ep=2,pp=4"]
# without stages the two schedules are one table
CASES = [
    ("dp=2,ep=4", "1f1b"),
    *((mesh, "1f1b") for mesh in STAGED),
    *(pytest.param(mesh, "gpipe", marks=[] if mesh == STAGED[0] else pytest.mark.slow) for mesh in STAGED),
]


class Computed:
    """Gradients, totals and evaluation of one step, on the host, in model order."""

    def __init__(self, mesh: str, overrides: tuple[str, ...]):
        program = small_program(mesh, overrides)
        state, batch = program.init(), program.place_batch(small_batch(program.config))
        step = jax.jit(program.gradients)
        gradients, totals, tokens = step(state.params, batch, jax.random.key(7))
        self.gradients = jax.device_get(program._to_logical(gradients))
        self.tokens = float(tokens)
        self.loss = float(totals.cross_entropy) / self.tokens
        self.z = float(totals.z)
        self.auxiliary = float(totals.auxiliary)
        self.statistics = jax.device_get(to_logical(totals.statistics, program.layout.stacks["moe_blocks"]))
        evaluated, counted = jax.jit(program._evaluate)(state.params, batch)
        self.evaluated = float(evaluated) / float(counted)
        self.params = jax.device_get(program._to_logical(state.params))


@functools.cache
def on_one_device(overrides: tuple[str, ...]) -> Computed:
    return Computed("dp=1", overrides)


def check_agrees(mesh: str, overrides: tuple[str, ...], schedule: str, *of_many: str) -> None:
    one = on_one_device(overrides)
    many = Computed(mesh, (*overrides, f"parallel.pipeline.schedule={schedule}", *of_many))
    jax.tree.map(np.testing.assert_array_equal, many.params, one.params)
    assert many.tokens == one.tokens
    np.testing.assert_allclose([many.loss, many.z, many.auxiliary], [one.loss, one.z, one.auxiliary], rtol=TOLERANCE)
    np.testing.assert_allclose(many.evaluated, one.evaluated, rtol=TOLERANCE)
    np.testing.assert_array_equal(many.statistics.counts, one.statistics.counts)

    def close(path, ours, theirs):
        error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
        assert error <= TOLERANCE, f"{jax.tree_util.keystr(path)}: relative error {error:.1e} on {mesh}"

    jax.tree_util.tree_map_with_path(close, many.gradients, one.gradients)


@pytest.mark.parametrize(("mesh", "schedule"), CASES)
def test_loss_and_gradients(mesh: str, schedule: str):
    check_agrees(mesh, (), schedule)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("model.moe.router.lb_granularity=instance", "model.moe.router.gating=sigmoid", "model.tie_embeddings=true"),
        ("model.moe.router.assignment=random", "model.norm_placement=pre", "model.attention.qk_norm=full"),
        ("model.n_dense_layers=2", "model.norm_placement=reordered", "parallel.recompute=block"),
        ("model.moe.router.assignment=uniform", "model.moe.shared_hidden=0", "model.attention.window_pattern=4,-1"),
    ],
    ids=["instance-sigmoid-tied", "random-pre-fullnorm", "two-dense-recompute", "uniform-windows"],
)
def test_with_other_models(overrides: tuple[str, ...]):
    check_agrees("dp=2,ep=2,pp=2", overrides, "1f1b")


@pytest.mark.slow
def test_fully_sharded_weights_are_the_same_model():
    """`parallel.strategy=fsdp`: every weight cut over all devices and gathered by layer, no token sent anywhere."""
    tied = ("model.moe.router.lb_granularity=instance", "model.moe.router.gating=sigmoid", "model.tie_embeddings=true")
    check_agrees("dp=2,ep=2", tied, "1f1b", "parallel.strategy=fsdp", "parallel.recompute=block")
