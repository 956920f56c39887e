"""A block taken apart gives the gradients of the whole, and keeps neither weights nor what is cheap to have again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.parallel.block_program import BlockProgram

T, D, F = 6, 8, 16


def plain(params, x, known):
    """A gated product with a cast weight, a mask made from what is known, and a loss of its own."""
    mask = (known["ids"] >= 0)[:, None]
    h = jax.nn.silu(jnp.where(mask, x, 0) @ params["up"].astype(x.dtype)) * known["scale"]
    y = h @ params["down"] + x
    return (y, 0.1 * jnp.sum(h**2)), {"mean": jnp.mean(h)}


def recomputed(params, x, known):
    return jax.checkpoint(plain)(params, x, known)


def looped(params, x, known):
    """Two rounds in a loop with a gradient of its own, as exchanges that overflow have."""
    (y, loss), statistics = plain(params, x, known)
    return (rounds(y, params["down"]), loss), statistics


@jax.custom_vjp
def rounds(x, w):
    return jax.lax.fori_loop(0, 2, lambda _, y: y + x @ (w.T @ w), jnp.zeros_like(x))


def _rounds_backward(residuals, dy):
    x, w = residuals

    def one(_, carry):
        dx, dw = carry
        _, pull = jax.vjp(lambda x, w: x @ (w.T @ w), x, w)
        more_x, more_w = pull(dy)
        return dx + more_x, dw + more_w

    return jax.lax.fori_loop(0, 2, one, (jnp.zeros_like(x), jnp.zeros_like(w)))


rounds.defvjp(lambda x, w: (rounds(x, w), (x, w)), _rounds_backward)


def example():
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "up": jax.random.normal(keys[0], (D, F)).astype(jnp.bfloat16),
        "down": jax.random.normal(keys[1], (F, D)) / F,
    }
    known = {"ids": jnp.arange(T) - 1, "scale": jnp.float32(0.5), "key": jax.random.key(3)}
    return params, jax.random.normal(keys[2], (T, D)), known, jax.random.normal(keys[3], (T, D))


@pytest.mark.parametrize("block", [plain, recomputed, looped])
def test_both_ways_back_give_the_gradients_of_the_whole(block):
    params, x, known, dy = example()
    (_, _), pull, _ = jax.vjp(lambda p, x: block(p, x, known), params, x, has_aux=True)
    d_params, dx = pull((dy, jnp.ones(())))
    program = BlockProgram(block, params, x, known)
    ((y, _), statistics), kept = program.keep(params, x, known)
    (expected, _), aux = block(params, x, known)
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    assert jax.tree.structure(statistics) == jax.tree.structure(aux)
    whole = program.pull(params, known, kept, dy)
    half, between = program.pull_input(params, known, kept, dy)
    other_half = program.pull_weight(params, known, kept, between)
    for ours in (whole, (half, other_half)):
        near = lambda a, b: np.testing.assert_allclose(  # noqa: E731
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-5, atol=1e-5
        )
        jax.tree.map(near, ours, (dx, d_params))
    assert [(a.shape, a.dtype) for a in kept] == program.kept
    assert [(a.shape, a.dtype) for a in between] == program.split()


@pytest.mark.parametrize("block", [plain, recomputed, looped])
def test_weights_and_what_follows_from_them_are_not_kept(block):
    params, x, known, _ = example()
    program = BlockProgram(block, params, x, known)
    for shape, _ in [*program.kept, *program.split()]:
        assert shape not in ((D, F), (F, D), (D, D), (T,), (T, 1)), shape


def test_plain_keeps_its_input_and_one_product():
    params, x, known, _ = example()
    assert sorted(shape for shape, _ in BlockProgram(plain, params, x, known).kept) == [(T, D), (T, F)]


def test_a_recomputed_block_keeps_its_input():
    params, x, known, _ = example()
    assert [shape for shape, _ in BlockProgram(recomputed, params, x, known).kept] == [(T, D)]
