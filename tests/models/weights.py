"""Initial weights, compiled fast."""

import functools

import jax

from moejax.config import ModelConfig
from moejax.models.transformer import Params, init_params


def fresh(config: ModelConfig, seed: int = 0) -> Params:
    """`init_params`; without XLA's optimisations, since it runs once: 2 s, not 16 s."""
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(functools.partial(init_params, config), compiler_options=quick)(jax.random.key(seed))
