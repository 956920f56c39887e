"""AdamW through Optax, on the fp32 master copy that every device owns a part of.

    gradient --clip by global norm--> adam moments --+ decay of matrices--> * learning rate --> master --cast--> weights

Masters, moments and gradients carry the sharding of `sharding.zero_layout`; the chain is plain Optax on global arrays,
and XLA turns the sharding of the weights into one all-gather a step.
"""

from typing import Any

import jax
import optax
from jaxtyping import PyTree

from moejax.config import LRSchedule, OptimizerConfig
from moejax.errors import UserError


def learning_rate(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear warm-up from 0, then constant, cosine, or stable with a final linear decay (wsd), ending at `steps`."""
    peak, end = config.learning_rate, config.learning_rate * config.schedule.final_fraction
    # a trial of a few steps keeps the shape of the long run, instead of ending within the warm-up
    warmup = min(config.schedule.warmup_steps, steps // 2)
    if config.schedule.kind == LRSchedule.constant:
        after = optax.constant_schedule(peak)
    elif config.schedule.kind == LRSchedule.cosine:
        after = optax.cosine_decay_schedule(peak, steps - warmup, config.schedule.final_fraction)
    else:
        decay = config.schedule.decay_steps or max(1, steps // 5)
        if warmup + decay > steps:
            raise UserError(
                f"optimizer.schedule: warmup_steps={warmup} + decay_steps={decay} exceed train.steps={steps}."
            )
        after = optax.join_schedules(
            [optax.constant_schedule(peak), optax.linear_schedule(peak, end, decay)], [steps - decay - warmup]
        )
    if warmup == 0:
        return after
    # the first update has count 0: it uses 1/warmup of the peak, not a learning rate of zero
    ramp = optax.linear_schedule(peak / warmup, peak, max(1, warmup - 1))
    return optax.join_schedules([ramp, after], [warmup])


def decay_mask(params: PyTree[Any], embeddings: bool = False) -> PyTree[bool]:
    """True for weights that decay: all but gains, biases and, as published (`group_overrides`), the embedding."""
    spared = ("gain", "b_qkv") if embeddings else ("gain", "b_qkv", "table")
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in spared, params)


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """p <- p - lr (m_hat / (sqrt(v_hat) + eps) + decay p), gradients clipped to a global norm first."""
    chain = [optax.clip_by_global_norm(config.clip)] if config.clip else []
    return optax.chain(
        *chain,
        optax.scale_by_adam(*config.betas, eps=config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=lambda p: decay_mask(p, config.decay_embeddings)),
        optax.scale_by_learning_rate(learning_rate(config, steps)),
    )
