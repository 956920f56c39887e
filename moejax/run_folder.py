"""The folder of one run: who may write there, and which config it was started with."""

import fcntl
from pathlib import Path
from typing import IO, Any

import yaml

from moejax import config_io
from moejax.config import Config
from moejax.errors import UserError
from moejax.observe.append_file import write_error

# What may change between two starts of one run without making its weights those of another model
NOT_THE_MODEL = ("model.moe.router.lb_", "model.moe.router.z_loss", "model.z_loss", "model.init_std")
NOT_THE_MODEL += ("model.attention.implementation",)


def changed_settings(old: dict[str, Any], config: Config) -> list[str]:
    """`field: old -> new` for every setting that differs from `old`, a tree as it was saved.

    A field that did not exist then had what is the default now.
    """
    return config_io.differences(
        {**config_io.flatten(config_io.to_dict(Config())), **config_io.flatten(old)},
        config_io.flatten(config_io.to_dict(config)),
    )


def other_model(changed: list[str]) -> list[str]:
    """Those of the changed settings that make the weights those of another model."""
    return [line for line in changed if line.startswith("model.") and not line.startswith(NOT_THE_MODEL)]


class RunFolder:
    """The folder of one run, held by one process at a time. Raises UserError: read-only, full, in use."""

    def __init__(self, config: Config):
        self.path = Path(config.run.dir) / config.run.name
        self._config_file = self.path / "config.yaml"
        self._lock: IO[str] | None = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / "lock", "w")  # noqa: SIM115  (held until close)
        except OSError as error:
            raise write_error(self.path, error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise UserError(
                f"Another process is training in {self.path}; wait for it, or give this run a name of its own with "
                "run.name=NAME."
            ) from None

    def changes(self, config: Config) -> list[str]:
        """`field: old -> new` for every setting that differs from those the run was last started with.

        Raises UserError naming the fields if the model differs: the saved weights could not be taken up.
        """
        if not self._config_file.exists():
            return []
        try:
            old: Any = yaml.safe_load(self._config_file.read_text())
        except (OSError, ValueError, yaml.YAMLError) as error:
            old = error
        if not isinstance(old, dict):
            raise UserError(
                f"{self._config_file}, the settings this run was started with, cannot be read; delete it if you are "
                "sure of yours, or start anew with run.name=NAME."
            )
        changed = changed_settings(old, config)
        if other := other_model(changed):
            raise UserError(
                f"The run in {self.path} was started with another model ({'; '.join(other)}); give this one a name of "
                "its own with run.name=NAME, or go back to the old settings."
            )
        return changed

    def write_config(self, config: Config) -> None:
        """Write config.yaml, whole or not at all. Raises UserError: read-only, full."""
        try:
            temporary = self._config_file.with_suffix(".tmp")
            temporary.write_text(config_io.to_yaml(config))
            temporary.replace(self._config_file)
        except OSError as error:
            raise write_error(self._config_file, error) from error

    def close(self) -> None:
        if self._lock:
            self._lock.close()
