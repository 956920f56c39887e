"""Both ends of the model: the loss in runs of tokens is the plain one, gradients too; a tied head is the table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.models import head
from moejax.models.head import IGNORED, chunk_tokens, linear_cross_entropy
from moejax.models.transformer import Transformer, parts
from tests.models.weights import fresh
from tests.small import small_config

T, D, V = 24, 8, 11


def inputs(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, V, T)
    labels[[3, 4, 17]] = IGNORED
    return jnp.asarray(rng.normal(size=(T, D)), dtype), jnp.asarray(rng.normal(size=(D, V)), dtype), jnp.asarray(labels)


def plain(x, w, labels, z_weight):
    logits = x.astype(jnp.float32) @ w.astype(jnp.float32)
    log_sum = jnp.log(jnp.sum(jnp.exp(logits), axis=-1))
    one_hot = jax.nn.one_hot(labels, V)  # an ignored label has no one
    counted = jnp.sum(one_hot, -1)
    ce, z = jnp.sum(log_sum * counted - jnp.sum(logits * one_hot, -1)), jnp.sum(counted * log_sum**2)
    return ce + z_weight * z, (ce, z)


@pytest.mark.parametrize("chunks", [1, 2, 8, 24])
@pytest.mark.parametrize("z_weight", [0.0, 0.1])
def test_the_loss_and_its_gradients_are_the_plain_ones_in_any_number_of_chunks(monkeypatch, chunks, z_weight):
    monkeypatch.setattr(head, "LOGIT_BYTES", 4 * V * T // chunks)
    assert T // chunk_tokens(T, V) == chunks
    x, w, labels = inputs()

    def scaled(loss):
        return lambda x, w: (3.0 * (result := loss(x, w, labels, z_weight))[0], result)

    ours, d_ours = jax.value_and_grad(scaled(linear_cross_entropy), (0, 1), has_aux=True)(x, w)
    theirs, d_theirs = jax.value_and_grad(scaled(plain), (0, 1), has_aux=True)(x, w)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6)
    np.testing.assert_allclose(ours[1][1], theirs[1][1], rtol=1e-6)
    for a, b in zip(d_ours, d_theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    # without a gradient asked for it is another program
    np.testing.assert_allclose(linear_cross_entropy(x, w, labels, z_weight)[0], theirs[1][0], rtol=1e-6)


def test_ignored_tokens_add_nothing_whatever_they_hold():
    x, w, labels = inputs()
    poisoned = x.at[3].set(1e4)
    grads = [jax.grad(lambda x: linear_cross_entropy(x, w, labels, 0.1)[0])(y) for y in (x, poisoned)]
    np.testing.assert_array_equal(grads[1][3], np.zeros(D))
    np.testing.assert_array_equal(grads[0], grads[1])


def test_in_bf16_the_loss_is_fp32_and_the_gradients_are_in_bf16():
    x, w, labels = inputs(jnp.bfloat16)
    (loss, _), grads = jax.value_and_grad(linear_cross_entropy, (0, 1), has_aux=True)(x, w, labels, 0.1)
    assert loss.dtype == jnp.float32 and {g.dtype for g in grads} == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_allclose(loss, plain(x, w, labels, 0.1)[0], rtol=1e-5)


@pytest.mark.parametrize(("tokens", "vocab"), [(1, 10), (24, 10**9), (8192, 288), (4095, 100_352)])
def test_chunks_are_equal_and_within_the_bound(tokens, vocab):
    run = chunk_tokens(tokens, vocab)
    assert tokens % run == 0 and (run == 1 or 4 * run * vocab <= head.LOGIT_BYTES)


def test_a_tied_head_is_the_embedding_table():
    c = small_config("model.tie_embeddings=true").model
    params = fresh(c)
    assert set(params["head"]) == {"norm"}
    p = parts(c)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, c.d_model)), jnp.float32)
    logits = p.head(params["head"]).logits(x, p.embedding(params["embedding"]))
    normed = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + c.norm_eps)
    np.testing.assert_allclose(logits, normed @ params["embedding"]["table"].T, rtol=1e-4, atol=1e-5)

    def loss(table):
        embedding = p.embedding({**params["embedding"], "table": table})
        return p.head(params["head"]).loss(x, jnp.ones((2, 3), int), embedding)[0]

    gradient = jax.grad(loss)(params["embedding"]["table"])
    assert float(jnp.abs(gradient).sum()) > 0


def test_the_embedding_is_scaled_by_the_root_of_the_width_unless_told():
    ids = jnp.array([[1, 5, 1]])
    for scale, factor in (("null", np.sqrt(32)), ("2.5", 2.5)):
        c = small_config(f"model.embed_scale={scale}", "model.embed_norm=false").model
        params = fresh(c)["embedding"]
        np.testing.assert_allclose(
            parts(c).embedding(params)(ids), factor * np.asarray(params["table"])[np.asarray(ids)], rtol=1e-6
        )


def test_a_token_sees_nothing_of_what_follows_or_of_other_documents():
    c = small_config("model.n_layers=2", "model.n_dense_layers=1").model
    model = Transformer(c, fresh(c))
    ids = np.random.default_rng(0).integers(0, 256, (1, 12))
    segments = np.array([[0] * 6 + [1] * 6])
    logits = np.asarray(model(ids, segments))
    changed = ids.copy()
    changed[0, [3, 9]] += 1
    after = np.asarray(model(changed, segments))
    same = np.all(np.abs(after - logits) < 1e-5, axis=-1)[0]
    assert same[:3].all() and not same[3:6].any() and same[6:9].all() and not same[9:].any()
