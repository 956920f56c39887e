"""`Transformer.expert_ids` says where the tokens really went."""

import jax
import numpy as np

from moejax.models.transformer import Transformer, init_params
from tests.small import small_batch, small_config


def test_they_add_up_to_the_counts_of_the_layers():
    config = small_config()
    model = Transformer(config.model, init_params(config.model, jax.random.key(1)))
    batch = small_batch(config)
    ids, segments = batch["tokens"][:8].astype(np.int32), batch["segment_ids"][:8].astype(np.int32)
    experts, k = config.model.moe.num_experts, config.model.moe.top_k
    chosen_LBSK = np.asarray(model.expert_ids(ids, segments))
    assert chosen_LBSK.shape == (config.model.n_moe_layers, *ids.shape, k)

    _, auxiliary = model.with_routing(ids, segments)
    counts_LE = np.stack([np.bincount(layer.reshape(-1), minlength=experts + 1)[:experts] for layer in chosen_LBSK])
    np.testing.assert_array_equal(counts_LE, np.asarray(auxiliary.statistics.counts))
    assert (chosen_LBSK[:, segments < 0] == experts).all() and (chosen_LBSK[:, segments >= 0] < experts).all()
    assert (segments < 0).any()
    assert (np.diff(np.sort(chosen_LBSK[:, segments >= 0], axis=-1), axis=-1) > 0).all(), "K different experts"
