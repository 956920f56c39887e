"""The folder of one run: who may write there, and which config it was started with."""

import fcntl
from pathlib import Path
from typing import IO

import yaml

from moejax import config_io
from moejax.config import Config
from moejax.errors import UserError
from moejax.observe.append_file import write_error

# What may change between two starts of one run without making its weights those of another model
NOT_THE_MODEL = ("moe.router.lb_", "moe.router.z_loss", "z_loss", "init_std", "attention.implementation")


class RunFolder:
    """The folder of one run, held by one process at a time. Raises UserError: read-only, full, in use, another model."""

    def __init__(self, config: Config):
        self.path = Path(config.run.dir) / config.run.name
        self._lock: IO[str] | None = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / "lock", "w")  # noqa: SIM115  (held until close)
        except OSError as error:
            raise write_error(self.path, error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"Another process is training in {self.path}; give this run another run.name.") from None

    def take_config(self, config: Config) -> list[str]:
        """Write config.yaml; compare with the one that is there. Returns what differs, apart from where and how it runs.

        Raises UserError naming the fields if the model differs: its weights could not be taken up.
        """
        file, new, changed = self.path / "config.yaml", config_io.to_dict(config), []
        if file.exists():
            old = yaml.safe_load(file.read_text())
            changed = config_io.differences(old, new)
            of_model = config_io.differences(old.get("model", {}), new["model"])
            shaping = [line for line in of_model if not line.startswith(NOT_THE_MODEL)]
            if shaping:
                raise UserError(
                    f"The run in {self.path} has another model ({'; '.join('model.' + line for line in shaping)}); "
                    "give this run another run.name, or go back to the old settings."
                )
        try:
            temporary = file.with_suffix(".tmp")
            temporary.write_text(config_io.to_yaml(config))
            temporary.replace(file)
        except OSError as error:
            raise write_error(file, error) from error
        return changed

    def close(self) -> None:
        if self._lock:
            self._lock.close()
