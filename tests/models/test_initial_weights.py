"""Initial weights: a function of the seed and the layer, with the spread that was asked for, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np

from moejax.models.transformer import logical_axes
from tests.models.weights import fresh
from tests.small import small_config


def test_layers_added_at_the_end_leave_the_others_as_they_were():
    short, long = (small_config(f"model.n_layers={n}").model for n in (3, 5))
    a, b = (fresh(c, 1) for c in (short, long))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y[: len(x)]), a["moe_blocks"], b["moe_blocks"])
    for same in ("embedding", "head", "dense_blocks"):
        jax.tree.map(np.testing.assert_array_equal, a[same], b[same])


def test_no_two_weights_are_alike_and_another_seed_gives_others():
    c = small_config().model
    params = [fresh(c, seed) for seed in (1, 2)]
    rows = [
        np.asarray(x).reshape(-1)[:8].tobytes()
        for p in params
        for name, stack in p.items()
        for leaf in jax.tree.leaves(stack)
        for x in (leaf if name.endswith("blocks") else [leaf])
        if np.ptp(leaf) > 0  # gains are all one
    ]
    assert len(rows) > 40 and len(set(rows)) == len(rows)


def test_weights_have_the_spread_asked_for_cut_at_three_of_it_and_gains_are_one():
    c = small_config("model.d_model=64", "model.init_std=0.05").model

    def check(path, x, axes):
        assert x.dtype == jnp.float32 and len(axes) == x.ndim, path
        if path[-1].key == "gain":
            np.testing.assert_array_equal(x, 1)
            return
        # a normal cut at 3 sigma has 0.9866 of its spread
        assert abs(float(jnp.std(x)) / (0.9866 * 0.05) - 1) < 5 / np.sqrt(x.size), path
        assert 0.1 < float(jnp.max(jnp.abs(x))) <= 0.15, path

    params = fresh(c)
    jax.tree_util.tree_map_with_path(check, params, logical_axes(c))
