"""Routers of the released Olmo-core 3.0.0 beyond its recipe: their settings are imported, and the logits are the same.

The fixtures are the inputs, weights and logits of its `OLMoDDPModel` in fp32, on CPU: two layers, d=32.
"""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from moejax import config as c
from moejax.checkpoint.olmo_core import import_model_config, import_params, import_score_bias
from moejax.errors import UserError
from moejax.models.transformer import Transformer

FIXTURES = sorted((Path(__file__).parents[1] / "fixtures" / "golden_routers").glob("*.npz"))
SIZES = dict(d=32, heads=2, kv=1, head_dim=16, layers=2, experts=16, top_k=4, hidden=16, vocab=64)


def named(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_logits(path: Path):
    arrays = dict(np.load(path))
    model = import_model_config(json.loads(str(arrays["config"])))
    params = import_params(model, named(arrays, "param/"))
    score_bias = import_score_bias(model, named(arrays, "buffer/"))
    logits = Transformer(model, params, score_bias=score_bias)(jnp.asarray(arrays["ids"], jnp.int32))
    np.testing.assert_allclose(logits, arrays["logits"], rtol=0, atol=2e-5)


def test_there_are_fixtures():
    assert len(FIXTURES) == 3


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (dict(bias_gamma=1e-4), dict(score_bias=c.ScoreBias.sign, score_bias_rate=1e-4)),
        (dict(score_correction_bias=True), dict(score_bias=c.ScoreBias.fixed)),
        (dict(n_group=4, topk_group=2), dict(groups=4, top_groups=2)),
        (dict(jitter_eps=0.1, bias=True), dict(jitter=0.1, bias=True)),
        (dict(original_top_k=8, expert_weight_scale=2.5), dict(original_top_k=8, weight_scale=2.5)),
        (dict(global_load_balancing=True), dict(lb_granularity=c.BalanceGranularity.batch)),
    ],
)
def test_settings(settings: dict, expected: dict):
    router = import_model_config({**SIZES, **settings}).moe.router
    assert {name: getattr(router, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (dict(n_group=4), "topk_group"),
        (dict(n_group=3, topk_group=2), "groups=3"),
        (dict(gating_function="topk_softmax", n_group=4, topk_group=2), "topk_softmax"),
        (dict(gating_function="topk_softmax", random_expert_assignment=True), "topk_softmax"),
        (dict(gating_function="sigmoid", sigmoid_stability_epsilon=0.0), "sigmoid_stability_epsilon"),
        (dict(global_load_balancing=True, lb_loss_granularity="instance"), "global_load_balancing"),
        (dict(orth_loss_weight=0.1), "orth_loss_weight"),
        (dict(emo={"eos_token_id": 0}), "emo"),
    ],
)
def test_what_cannot_be_imported_is_refused_by_name(settings: dict, word: str):
    with pytest.raises(UserError, match=word):
        import_model_config({**SIZES, **settings})


def test_a_score_bias_must_be_there_and_fit():
    model = import_model_config({**SIZES, "score_correction_bias": True})
    name = "blocks.1.routed_experts_router.score_bias"
    with pytest.raises(UserError, match=name):
        import_score_bias(model, {})
    with pytest.raises(UserError, match="16 experts"):
        import_score_bias(model, {name: np.zeros(8)})
    with pytest.raises(UserError, match="no place for"):
        import_score_bias(import_model_config(SIZES), {name: np.zeros(16)})
