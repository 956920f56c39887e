"""moejax: training mixture-of-experts language models in JAX.

    import moejax
    config = moejax.load_config("configs/tiny.yaml", ["train.steps=100"])
    trainer = moejax.Trainer(config, folder=None)          # nothing is written
    for _ in range(100):
        metrics = trainer.step()                           # plain numbers: loss, expert_counts, ...
    model = trainer.model()                                # a Flax module: logits = model(ids)

On a CPU, `moejax.prepare_devices(64)` before anything else simulates 64 devices for `--mesh dp=2,ep=8,pp=4`.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from moejax.config import Config
    from moejax.config_io import load as load_config
    from moejax.errors import UserError
    from moejax.mesh import make_mesh, parse_mesh, prepare_devices
    from moejax.models.transformer import Transformer
    from moejax.trainer import Trainer

# The public names and where they live; loaded when asked for, since Grain and Orbax take seconds to import.
_HOMES = {
    "Config": ("moejax.config", "Config"),
    "load_config": ("moejax.config_io", "load"),
    "UserError": ("moejax.errors", "UserError"),
    "make_mesh": ("moejax.mesh", "make_mesh"),
    "parse_mesh": ("moejax.mesh", "parse_mesh"),
    "prepare_devices": ("moejax.mesh", "prepare_devices"),
    "Transformer": ("moejax.models.transformer", "Transformer"),
    "Trainer": ("moejax.trainer", "Trainer"),
}

__all__ = [  # noqa: F822
    "Config",
    "Trainer",
    "Transformer",
    "UserError",
    "load_config",
    "make_mesh",
    "parse_mesh",
    "prepare_devices",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'moejax' has no attribute '{name}'")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
