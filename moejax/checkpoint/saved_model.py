"""A model in a run folder: its config and weights, whoever wrote them, and the folder that an importer writes.

    runs/tiny/{config.yaml, checkpoints/} --SavedModel--> config, step, params on any sharding
    config + state + origin --write_run--> runs/olmoe/{config.yaml, checkpoints/, origin/}

`origin/` keeps what came with an imported model and is not ours to change: its config.json, tokenizer, generation
settings, and in which dtype each tensor was stored. Export takes it up again.
"""

import contextlib
import dataclasses
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import jax

import moejax
from moejax import config_io
from moejax.checkpoint.manager import Checkpoints
from moejax.checkpoint.manifest import Manifest
from moejax.config import Config, ModelConfig, PrecisionConfig, ScoreBias
from moejax.errors import UserError
from moejax.models.transformer import Params, abstract_params

STEP = re.compile(r"step_(\d+)-\d+")
ORIGIN, ORIGIN_FILE = "origin", "origin.json"
CHECKPOINTS, CONFIG = "checkpoints", "config.yaml"


class SavedModel:
    """A checkpoint of a run folder, opened for reading. config: as it was saved with; step; origin: None, or what
    `origin/origin.json` says of where the model came from.

    step: None takes the newest. Raises UserError: no such folder, no checkpoint in it, damage.
    """

    def __init__(self, path: str | Path, step: int | None = None):
        self.path = Path(path)
        if not (self.path / CHECKPOINTS).is_dir():
            raise UserError(
                f"{self.path} is no run folder: it has no {CHECKPOINTS}/; train one, or import one with `python -m "
                f"moejax.convert`."
            )
        self.checkpoints = Checkpoints(self.path / CHECKPOINTS)
        latest = self.checkpoints.latest()
        if step is None and latest is None:
            raise UserError(f"{self.path / CHECKPOINTS} holds no checkpoint yet; wait for the first, or train on.")
        self.step: int = latest if step is None else step  # type: ignore[assignment]
        self.record = self.checkpoints.read_record(self.step)
        self.config: Config = config_io.from_dict(self.record["config"])

    @classmethod
    def at(cls, path: str | Path) -> Self:
        """Of a run folder, the newest checkpoint; or the one whose own folder, RUN/checkpoints/step_N-M, is given."""
        path = Path(path)
        match = STEP.fullmatch(path.name)
        if match is None or path.parent.name != CHECKPOINTS:
            return cls(path)
        saved = cls(path.parent.parent, int(match[1]))
        if not path.is_dir():
            there = ", ".join(map(str, saved.checkpoints.steps()))
            raise UserError(f"There is no checkpoint {path}; {saved.path} has those of steps {there}.")
        return saved

    @property
    def manifest(self) -> Manifest:
        return self.checkpoints.read_manifest(self.step)

    @property
    def origin(self) -> dict[str, Any] | None:
        file = self.path / ORIGIN / ORIGIN_FILE
        return json.loads(file.read_text()) if file.is_file() else None

    def origin_files(self) -> list[Path]:
        """What came along with an imported model, without our own note."""
        folder = self.path / ORIGIN
        return sorted(file for file in folder.glob("*") if file.name != ORIGIN_FILE) if folder.is_dir() else []

    def params(self, target: Params | None = None) -> Params:
        """fp32 weights in model order on the shardings of `target` (None: the first device); nothing else is read."""
        target = abstract_params(self.config.model) if target is None else target
        state, _ = self.checkpoints.restore({"master": target}, self.step, subset=True)
        return state["master"]

    def score_bias(self) -> jax.Array | None:
        """fp32[L, E] of the routers' choice, by MoE layer; None where the routers have none."""
        if self.config.model.moe.router.score_bias == ScoreBias.none or "score_bias" not in self.manifest.tensors:
            return None
        target = {"score_bias": abstract_score_bias(self.config.model)}
        return self.checkpoints.restore(target, self.step, subset=True)[0]["score_bias"]


def run_config(model: ModelConfig, dst: Path, *, dtype: str, sequence_length: int, tokenizer: str) -> Config:
    """The config of a run that begins with an imported model: everything but the model as by default.

    dtype: float32 or bfloat16. The batch keeps its default size where the sequence length allows.
    """
    default = Config()
    length = min(sequence_length, 2048)
    unit = length * default.parallel.pipeline.microbatches
    plain = config_io.to_dict(
        dataclasses.replace(
            default,
            model=model,
            precision=PrecisionConfig(),
            data=dataclasses.replace(default.data, sequence_length=length, tokenizer=tokenizer),
            train=dataclasses.replace(default.train, batch_tokens=max(1, default.train.batch_tokens // unit) * unit),
            run=dataclasses.replace(default.run, dir=str(dst.parent), name=dst.name),
        )
    )
    plain["precision"] |= {"params": dtype, "compute": dtype}
    return config_io.from_dict(plain)


@contextlib.contextmanager
def whole_or_nothing(dst: Path) -> Iterator[Path]:
    """A folder beside `dst` to write into, which takes its name at the end; whatever goes wrong, it is removed.

    Raises UserError: `dst` holds something, or the file system refuses.
    """
    partial = dst.parent / f".{dst.name}.partial"
    try:
        if dst.exists() and (not dst.is_dir() or any(dst.iterdir())):
            raise UserError(f"{dst} exists and is not empty; name another folder, or remove it first.")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        if dst.exists():
            dst.rmdir()
        partial.rename(dst)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(
            f"{dst} cannot be written ({reason}); nothing is left of it. Make room or name another folder."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_run(
    folder: Path, config: Config, state: dict[str, Any], origin: dict[str, Any], beside: Sequence[Path] = ()
) -> Checkpoints:
    """Write a run folder with one checkpoint, at the state's own step; returns its checkpoints.

    state: step, master, and optionally the moments, by the names of `PortableState`. origin: JSON. beside: files to
    copy.
    """
    (folder / ORIGIN).mkdir()
    for file in beside:
        shutil.copyfile(file, folder / ORIGIN / file.name)
    (folder / ORIGIN / ORIGIN_FILE).write_text(json.dumps(origin, indent=1) + "\n")
    (folder / CONFIG).write_text(config_io.to_yaml(config))
    checkpoints = Checkpoints(folder / CHECKPOINTS)
    record = {"config": config_io.to_dict(config), "data": None, "mesh": "dp=1,ep=1,pp=1", "moejax": moejax.__version__}
    checkpoints.save(int(state["step"]), state, record, wait=True)
    return checkpoints


def abstract_score_bias(model: ModelConfig) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((model.n_moe_layers, model.moe.num_experts), jax.numpy.float32)


def abstract_state(weights: Params, roles: Sequence[str]) -> dict[str, Any]:
    """What `write_run` saved, to restore into, each role as `weights`; without a score bias."""
    return {"step": jax.ShapeDtypeStruct((), jax.numpy.int32)} | dict.fromkeys(roles, weights)
