"""A checkpoint of Olmo-core 3 as its trainer writes it: `stepN/` with `config.json` and `model_and_optim/`.

    module.<name>.main, .exp_avg, .exp_avg_sq: flat fp32   --OlmoCoreFolder.import_state--> master and both moments
    module.<name>.step                                     --> step (the same for all)

There are no working weights in it: the fp32 masters are the model. Names and shapes: `olmo_core.pieces`.
"""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from moejax.checkpoint import olmo_core
from moejax.checkpoint.distcp import METADATA, DistributedCheckpoint
from moejax.checkpoint.mapping import Piece, assemble, check_tensors
from moejax.checkpoint.olmo_core_config import import_trainer_config, is_trainer_config
from moejax.config import ModelConfig
from moejax.errors import UserError
from moejax.models.transformer import Params, abstract_params

ROLES = {"main": "master", "exp_avg": "first_moment", "exp_avg_sq": "second_moment"}
"""Olmo-core's ending of a tensor's name to our part of the state."""
# The trainer's own bookkeeping, pickled objects that are left unread
BOOKKEEPING = ("__moe_skip_step_losses", "__moe_skip_step_grad_norms")


class OlmoCoreFolder:
    """model, step, pieces, roles (the parts of the state it has: with or without moments), score_bias, settings.

    path: `stepN`, or `stepN/model_and_optim` with `config.json` in it or above it, or the folder of a run, of which the
    newest step is taken. config.json: a training run's (`olmo_core_config`), or the arguments of the released builder
    (`olmo_core.import_model_config`). Nothing but metadata and steps is read. Raises UserError: a file missing or
    damaged, a setting or a tensor with no counterpart here.
    """

    def __init__(self, path: str | Path):
        given = newest_step(Path(path))
        inner = given / "model_and_optim"
        self.path = inner if (inner / METADATA).exists() or not (given / METADATA).exists() else given
        self._checkpoint = DistributedCheckpoint(self.path)
        self.settings = _settings(self.path)
        read_model = import_trainer_config if is_trainer_config(self.settings) else olmo_core.import_model_config
        self.model: ModelConfig = read_model(self.settings)
        self._keys, steps, buffers = self._sort_tensors()
        if "master" not in self._keys:
            raise UserError(f"{self.path} has no weights: no tensor is called module.<name>.main.")
        self.pieces: list[Piece] = olmo_core.pieces(self.model, fused=olmo_core.is_fused(self._keys["master"]))
        for keys in self._keys.values():
            shapes = {name: self._checkpoint.tensors[key].shape for name, key in keys.items()}
            flat = {name: (int(np.prod(shape)),) for name, shape in shapes.items()}
            check_tensors(self.pieces, flat, str(self.path), flat=True)
        if ("first_moment" in self._keys) != ("second_moment" in self._keys):
            raise UserError(f"{self.path} has one of the two moments only.")
        self.roles = tuple(self._keys)
        read = {key.removeprefix("model_buffer."): self._checkpoint.read(key) for key in buffers}
        self.score_bias = olmo_core.import_score_bias(self.model, read)
        self.step = self._step(steps)

    def _sort_tensors(self) -> tuple[dict[str, dict[str, str]], list[str], list[str]]:
        """Role to {name: key in the checkpoint}, those of step counts, and buffers; refuses what has no place."""
        keys: dict[str, dict[str, str]] = {}
        steps, buffers = [], []
        for key in self._checkpoint.tensors:
            name, _, ending = key.rpartition(".")
            if key.startswith("model_buffer."):
                buffers.append(key)
            elif key.startswith("module.") and ending in ROLES:
                while name.startswith("module."):
                    name = name.removeprefix("module.")
                keys.setdefault(ROLES[ending], {})[name] = key
            elif key.startswith("module.") and ending == "step":
                steps.append(key)
            else:
                raise UserError(f"{self.path}: there is no place for the tensor {key}.")
        if left := [name for name in self._checkpoint.others if name not in BOOKKEEPING]:
            raise UserError(f"{self.path}: there is no place for the object {left[0]}, which is no tensor.")
        return keys, steps, buffers

    def _step(self, keys: list[str]) -> int:
        steps = {int(self._checkpoint.read(key)) for key in keys}
        if len(steps) > 1:
            raise UserError(f"{self.path}: weights stand at different steps, {min(steps)} to {max(steps)}.")
        return steps.pop() if steps and "first_moment" in self._keys else 0

    def read(self, role: str, name: str) -> np.ndarray:
        """One tensor, flat. role: master, first_moment or second_moment."""
        return self._checkpoint.read(self._keys[role][name])

    def import_params(self, role: str = "master", target: Params | None = None) -> Params:
        """fp32 in model order on the shardings of `target` (None: the first device), one tensor at a time."""
        target = abstract_params(self.model) if target is None else target
        return assemble(target, self.pieces, lambda name: self.read(role, name))

    def import_state(self, target: dict[str, Any] | None = None) -> dict[str, Any]:
        """step (int32), every role it has, and the score bias of its routers (zeros for those without one), with the
        field names of `parallel.step.PortableState`."""
        state: dict[str, Any] = {role: self.import_params(role, target and target[role]) for role in self.roles}
        if self.model.n_moe_layers:
            shape = (self.model.n_moe_layers, self.model.moe.num_experts)
            state["score_bias"] = jnp.zeros(shape) if self.score_bias is None else jnp.asarray(self.score_bias)
        return {"step": jnp.asarray(self.step, jnp.int32), **state}


def newest_step(path: Path) -> Path:
    """The `stepN` with the largest N that has a checkpoint in it, of a folder of such; any other path as it is."""
    steps = {int(name[4:]): path / name for name in (p.name for p in path.glob("step*")) if name[4:].isdecimal()}
    whole = [step for step, folder in steps.items() if (folder / "model_and_optim" / METADATA).exists()]
    return steps[max(whole)] if whole else path


def _settings(path: Path) -> dict[str, Any]:
    for folder in (path, path.parent):
        file = folder / "config.json"
        if file.is_file():
            break
    else:
        raise UserError(
            f"{path} has no config.json in it or above it; without one the shapes of the model are unknown."
        )
    try:
        settings = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is not valid JSON ({error}).") from error
    if not isinstance(settings, dict):
        raise UserError(f"{file} must hold a JSON object.")
    return settings
