"""AdamW by hand: the schedule at its corners, the decay mask, the clip, and one update against the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.config import LRSchedule, LRScheduleConfig, OptimizerConfig
from moejax.errors import UserError
from moejax.models.transformer import abstract_params
from moejax.parallel.optimizer import decay_mask, learning_rate, make_optimizer
from tests.small import small_config


def rates(steps: int, **schedule) -> list[float]:
    config = OptimizerConfig(learning_rate=1.0, schedule=LRScheduleConfig(**schedule))
    rate = learning_rate(config, steps)
    return [float(rate(step)) for step in range(steps)]


def test_wsd_warms_up_stays_and_falls_to_its_fraction():
    found = rates(20, kind=LRSchedule.wsd, warmup_steps=4, decay_steps=8, final_fraction=0.2)
    assert found[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert found[4:13] == pytest.approx([1.0] * 9)
    assert found[13:] == pytest.approx([1 - 0.1 * i for i in range(1, 8)], abs=1e-6)


def test_cosine_is_half_way_down_in_the_middle():
    found = rates(105, kind=LRSchedule.cosine, warmup_steps=5, final_fraction=0.1)
    assert found[4] == found[5] == pytest.approx(1.0)
    assert found[55] == pytest.approx(0.55)
    expected = [0.1 + 0.9 * (1 + np.cos(np.pi * i / 100)) / 2 for i in range(100)]
    np.testing.assert_allclose(found[5:], expected, rtol=1e-5)


def test_constant_is_constant_after_the_warm_up():
    assert rates(6, kind=LRSchedule.constant, warmup_steps=2) == pytest.approx([0.5, 1, 1, 1, 1, 1])
    assert rates(3, kind=LRSchedule.constant, warmup_steps=0) == [1, 1, 1]


@given(
    kind=st.sampled_from(list(LRSchedule)),
    steps=st.integers(1, 60),
    warmup=st.integers(0, 40),
    decay=st.integers(0, 60),
)
def test_a_run_of_any_length_rises_once_then_falls_and_no_step_is_lost(kind, steps, warmup, decay):
    try:
        found = rates(steps, kind=kind, warmup_steps=warmup, decay_steps=decay, final_fraction=0.1)
    except UserError as refused:
        assert kind == LRSchedule.wsd and min(warmup, steps // 2) + decay > steps, refused
        return
    assert all(0 < rate <= 1 + 1e-6 for rate in found)
    top = int(np.argmax(found))
    assert found[top] == pytest.approx(1.0)
    assert all(a <= b + 1e-6 for a, b in zip(found[:top], found[1 : top + 1], strict=True))
    assert all(a >= b - 1e-6 for a, b in zip(found[top:-1], found[top + 1 :], strict=True))
    assert top <= max(0, min(warmup, steps // 2) - 1) + 0  # a short run warms up for half of it at most


@pytest.mark.parametrize("embeddings", [False, True])
def test_all_but_gains_and_by_default_the_embedding_decay(embeddings):
    params = abstract_params(small_config().model)
    mask = jax.tree_util.tree_leaves_with_path(decay_mask(params, embeddings))
    names = {jax.tree_util.keystr(path, simple=True, separator="."): decays for path, decays in mask}
    assert names["embedding.table"] is embeddings
    assert names["head.w"] and names["moe_blocks.attention.w_qkv"]
    for name, decays in names.items():
        assert decays is not name.endswith("gain") or name == "embedding.table", name
    experts = [name for name in names if "moe" in name.split(".") and not name.endswith("gain")]
    assert len(experts) >= 5 and all(names[name] for name in experts)  # router, experts, shared expert


@pytest.mark.parametrize("clip", [0.0, 1e-3])
def test_updates_follow_the_formula(clip):
    config = OptimizerConfig(
        learning_rate=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.5, clip=clip,
        schedule=LRScheduleConfig(kind=LRSchedule.constant, warmup_steps=2),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    params = {"mlp": {"w": rng.normal(size=(3, 4))}, "norm": {"gain": rng.normal(size=4)}}
    optimizer = make_optimizer(config, 10)
    ours = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    state = optimizer.init(ours)
    m, v = (jax.tree.map(np.zeros_like, params) for _ in range(2))
    for step in range(3):
        gradient = jax.tree.map(lambda x: rng.normal(size=x.shape), params)
        updates, state = optimizer.update(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), gradient), state, ours)
        ours = jax.tree.map(jnp.add, ours, updates)
        norm = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(gradient)))
        scale = min(1.0, clip / norm) if clip else 1.0
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * scale * g, m, gradient)  # noqa: B023
        v = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * (scale * g) ** 2, v, gradient)  # noqa: B023
        rate = 0.1 * [0.5, 1.0, 1.0][step]
        for part, name, decay in (("mlp", "w", 0.5), ("norm", "gain", 0.0)):
            m_hat, v_hat = m[part][name] / (1 - 0.9 ** (step + 1)), v[part][name] / (1 - 0.95 ** (step + 1))
            p = params[part][name]
            params[part][name] = p - rate * (m_hat / (np.sqrt(v_hat) + 1e-8) + decay * p)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), ours, params)
