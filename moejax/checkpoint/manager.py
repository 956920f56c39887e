"""Checkpoints of a run: saved in the background, committed whole or not at all, verified before they are taken up.

    state, record --copy to host--> step_00000100-0007.saving/{state/, record.json} --checksums--> manifest.json
        --rename--> step_00000100-0007/          only now it exists, and older ones may go
    step_00000100-0007/ --every file against the manifest, every tensor against the target--> state, record

The second number counts the saves of a folder, so that "newest" means saved last: a run that went back to an earlier
step and on from there does not fall for the checkpoints of the future it left, and a step can be saved again without a
moment in which it is gone. Folders with a further ending are unfinished; nobody reads them and the next save removes
them. Several processes must share one file system; each writes its part and checks its part.
"""

import errno
import itertools
import json
import logging
import math
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree
from orbax.checkpoint import multihost

from moejax.checkpoint import arrays, manifest
from moejax.checkpoint.manifest import Damage, Manifest
from moejax.config import Best, CheckpointConfig
from moejax.errors import UserError

STATE, RECORD = "state", "record.json"
SAVING, REMOVED = ".saving", ".removed"
_NAME = re.compile(r"step_(\d+)-(\d+)")
_DEBRIS = re.compile(r"step_\d+-(\d+)\.(saving|removed)")

logger = logging.getLogger(__name__)
_barriers = itertools.count()  # a key of the coordinator serves once; every process counts alike


class _Saved(NamedTuple):
    """A committed checkpoint; they sort by the order in which they were saved."""

    sequence: int
    step: int
    path: Path


class Checkpoints:
    """The checkpoints in one folder.

        checkpoints = Checkpoints("runs/tiny/checkpoints", keep=2)
        checkpoints.save(100, state, {"config": ...})               # returns while the writing goes on
        state, record = checkpoints.restore(target)                 # the newest, onto the shardings of `target`

    keep: newest ones kept. keep_every: steps that it divides are kept for good, 0 for none. score: from a record to a
    number, None for none; the checkpoint with the lowest one is kept too. memory_gb: host memory between disk and
    devices, in 1e9 bytes, at least twice the largest tensor; a save also holds one copy of this process's shards.

    Every method is collective: with several processes all call it, in the same order. Nothing is written before the
    first save. Raises UserError for what the file system refuses and for checkpoints that are absent, damaged or do not
    fit; a save that fails in the background raises at the next save, restore, wait or close.
    """

    def __init__(
        self,
        directory: str | Path,
        keep: int = 2,
        *,
        keep_every: int = 0,
        score: Callable[[dict[str, Any]], float | None] | None = None,
        memory_gb: float = 4.0,
    ):
        if keep < 1:
            raise UserError(f"checkpoint.keep={keep} must be at least 1: the newest checkpoint always stays.")
        self.directory = Path(directory).absolute()
        self._keep, self._keep_every, self._score = keep, keep_every, score
        self._memory = int(memory_gb * 1e9)
        self._damaged: set[Path] = set()  # found so and left behind by a restore of this object
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    # --- what is there ---------------------------------------------------------------------------------------------

    def latest(self) -> int | None:
        """The step saved last, None without any."""
        saved = self._saved()
        return saved[-1].step if saved else None

    def steps(self) -> list[int]:
        """Steps that can be restored, in the order they were saved; without those found damaged by `fall_back`."""
        return [saved.step for saved in self._newest_of_each_step()]

    def read_record(self, step: int) -> dict[str, Any]:
        """What was given to `save` as its record. Raises UserError: no such step, or the record is damaged."""
        saved = self._find(step)[0]
        try:
            return self._record(saved, manifest.read(saved.path))
        except Damage as damage:
            raise UserError(f"{_unusable(saved, damage)}.") from damage

    def read_manifest(self, step: int) -> Manifest:
        """Files with sizes, tensors with shapes. Raises UserError: no such step, or the manifest is damaged."""
        saved = self._find(step)[0]
        try:
            return manifest.read(saved.path)
        except Damage as damage:
            raise UserError(f"{_unusable(saved, damage)}.") from damage

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.directory)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(f"{self.directory} cannot be read ({_reason(error)}).") from error

    def _committed(self) -> list[_Saved]:
        """Oldest save first, also those that a later save of their step replaces."""
        matches = [match for name in self._names() if (match := _NAME.fullmatch(name))]
        return sorted(_Saved(int(match[2]), int(match[1]), self.directory / match[0]) for match in matches)

    def _saved(self) -> list[_Saved]:
        """The same without those found damaged."""
        return [saved for saved in self._committed() if saved.path not in self._damaged]

    def _newest_of_each_step(self) -> list[_Saved]:
        return sorted({saved.step: saved for saved in self._saved()}.values())

    def _find(self, step: int | None) -> list[_Saved]:
        """The checkpoint of `step` (None: the newest), then those saved before it, newest first."""
        saved = self._saved()[::-1]
        if not saved:
            raise UserError(f"There is no checkpoint in {self.directory}; train first, or name another folder.")
        if step is None:
            return saved
        while saved and saved[0].step != step:
            saved = saved[1:]
        if not saved:
            there = ", ".join(map(str, self.steps()))
            raise UserError(f"There is no checkpoint of step {step} in {self.directory}, only of steps {there}.")
        return saved

    # --- saving ----------------------------------------------------------------------------------------------------

    def save(self, step: int, state: PyTree, record: dict[str, Any], *, wait: bool = False) -> None:
        """Save `state`, a pytree of jax Arrays, and `record`, anything JSON can hold, as the newest checkpoint.

        Returns when the arrays are copied and may be donated; wait: when the checkpoint is committed. If it fails, what
        it wrote is removed and the checkpoints before it stay as they are. Raises TypeError for a state or record that
        cannot be saved as it is.
        """
        self.wait()
        text = json.dumps(record, indent=1).encode()
        arrays.check_saveable(state)
        tensors = arrays.describe(state)
        staging = self._stage(step, text)
        try:
            finish_arrays = arrays.start_saving(staging / STATE, state, self._memory)
        except BaseException as error:
            self._discard(staging)
            if (refusal := self._refusal(step, error)) is None:
                raise
            raise refusal from error

        def finish() -> None:
            try:
                finish_arrays()
                self._commit(step, staging, tensors)
            except BaseException as error:
                self._discard(staging)
                self._failure = self._refusal(step, error) or error

        self._thread = threading.Thread(target=finish, name="moejax_checkpoint")
        self._thread.start()
        if wait:
            self.wait()

    def wait(self) -> None:
        """Until the save under way is committed. Raises what made it fail, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """As `wait`; to be called before the program ends, since Python stops background work when it does."""
        self.wait()

    def _stage(self, step: int, record: bytes) -> Path:
        """A fresh folder with the record in it, made by the first process."""
        name, failure = "", None
        if jax.process_index() == 0:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                name = self._next_name(step)
                staging = self.directory / f"{name}{SAVING}"
                staging.mkdir()
                manifest.write_flushed(staging / RECORD, record)
            except (OSError, UserError) as error:
                self._discard(self.directory / f"{name}{SAVING}" if name else None)
                name, failure = "", error
        name = _from_every_process(name)[0]
        if failure is not None:
            raise self._refusal(step, failure) or failure
        if not name:
            raise UserError(f"Process 0 could not begin the checkpoint of step {step}; its own message says why.")
        return self.directory / f"{name}{SAVING}"

    def _next_name(self, step: int) -> str:
        """Removes what earlier saves left unfinished, and counts one further than any save before."""
        sequences = [0]
        for name in self._names():
            if debris := _DEBRIS.fullmatch(name):
                shutil.rmtree(self.directory / name)
                sequences.append(int(debris[1]))
            elif match := _NAME.fullmatch(name):
                sequences.append(int(match[2]))
        return f"step_{step:08d}-{max(sequences) + 1:04d}"

    def _commit(self, step: int, staging: Path, tensors: dict[str, arrays.Tensor]) -> None:
        process, processes = jax.process_index(), jax.process_count()
        names = manifest.file_names(staging)
        files = manifest.seal(staging, names[process::processes])
        if processes > 1:
            self._barrier("listed")  # or the parts written now would be in somebody's list of files
            manifest.write_flushed(staging / f"part-{process}", json.dumps(files).encode())
            self._barrier("sealed")
        if process == 0:
            for other in range(processes) if processes > 1 else ():
                part = staging / f"part-{other}"
                files |= json.loads(part.read_bytes())
                part.unlink()
            manifest.write(staging, Manifest(step, files, tensors))
            staging.rename(staging.with_suffix(""))
            manifest.flush_directory(self.directory)
            try:
                self._trim()
            except OSError as error:  # the new checkpoint is there: that an old one stays is no failure
                logger.warning(f"An old checkpoint in {self.directory} could not be removed ({_reason(error)}).")
        self._barrier("committed")

    def _barrier(self, place: str) -> None:
        """Waits for the other processes; through the coordinator, as devices are not to be touched from a thread."""
        key = f"moejax checkpoint {next(_barriers)} {place}"
        multihost.get_barrier_sync_fn()(key=key, timeout_ms=1000 * arrays.TIMEOUT)

    def _trim(self) -> None:
        """Removes what neither `keep` nor `keep_every` nor `score` holds."""
        newest = self._newest_of_each_step()
        kept = set(newest[-self._keep :])
        oldest = min(kept)
        if self._keep_every:
            kept |= {saved for saved in newest if saved.step % self._keep_every == 0}
        if self._score is not None:
            scores = {saved: self._score_of(saved) for saved in newest}
            best = min(newest, key=lambda saved: scores[saved])
            kept |= {best} if scores[best] < math.inf else set()
        # those found damaged are no checkpoints any more, and go when they are old
        damaged = {saved for saved in self._committed() if saved.path in self._damaged and saved < oldest}
        for saved in sorted({*self._saved(), *damaged} - kept):
            # a rename first: a half deleted folder must not look like a checkpoint
            shutil.rmtree(saved.path.rename(f"{saved.path}{REMOVED}"))

    def _score_of(self, saved: _Saved) -> float:
        assert self._score is not None
        try:
            score = self._score(self._record(saved, manifest.read(saved.path)))
        except Damage:
            score = None
        return math.inf if score is None or math.isnan(score) else score

    def _discard(self, staging: Path | None) -> None:
        """Removes an unfinished save; what cannot be removed now, the next save removes."""
        if staging is not None and jax.process_index() == 0:
            for _ in range(3):  # threads of TensorStore that have not heard of the failure may still create files
                shutil.rmtree(staging, ignore_errors=True)

    def _refusal(self, step: int, error: BaseException) -> UserError | None:
        """The sentence for what the file system refused; None for anything else, a fault of the program."""
        code = _errno(error)
        if code is None or not isinstance(error, Exception):
            return None
        try:
            last = self.latest()
        except UserError:
            last = None
        before = f"; the one of step {last} is untouched" if last is not None else ""
        if code in (errno.ENOSPC, errno.EDQUOT):
            why = f"no room is left on the disk that holds {self.directory}{before}. Free some"
        else:
            why = f"{self.directory} cannot be written ({os.strerror(code).lower()}){before}. Make it writable"
        refusal = UserError(f"The checkpoint of step {step} could not be saved: {why} and give the same command again.")
        refusal.__cause__ = error
        return refusal

    # --- restoring -------------------------------------------------------------------------------------------------

    def restore(
        self,
        target: PyTree | Callable[[Manifest], PyTree],
        step: int | None = None,
        *,
        fall_back: bool = False,
        subset: bool = False,
    ) -> tuple[PyTree, dict[str, Any]]:
        """State and record of `step`, by default the newest, onto the shardings of `target`, bit for bit.

        target: the tree that was saved, each leaf with shape, dtype and sharding (jax.ShapeDtypeStruct or Array), on
        any mesh; a NamedTuple and a dict with its field names are the same. Or a function that makes it from the
        manifest of the checkpoint that is taken. subset: the target may leave tensors out, e.g. `{"master": ...}`.
        fall_back: instead of a damaged checkpoint take the newest whole one saved before it, and warn. Raises
        UserError: damaged, naming the file; not fitting, naming tensors; absent. Never restores in part.
        """
        self.wait()
        first, *earlier = self._find(step)
        chosen, found = first, self._check(first)
        if isinstance(found, Damage):
            damaged, problem = {first.path}, _unusable(first, found)
            for chosen in earlier:
                if isinstance(found := self._check(chosen), Manifest):
                    break
                damaged.add(chosen.path)
            if isinstance(found, Damage):
                others = "none of those before it is whole" if earlier else "there is none before it"
                raise UserError(f"{problem}; {others}. Bring the file back from a copy or start in a new folder.")
            if not fall_back:
                raise UserError(
                    f"{problem}. The checkpoint of step {chosen.step}, saved before it, is whole: "
                    f"to go on from there, move {first.path} away."
                )
            logger.warning(f"{problem}; falling back to the checkpoint of step {chosen.step}, which is whole.")
            self._damaged |= damaged
        if callable(target):
            target = target(found)
        if difference := arrays.mismatch(found.tensors, arrays.describe(target), subset=subset):
            raise UserError(
                f"The checkpoint of step {chosen.step} in {self.directory} does not fit the model here: {difference}. "
                f"The settings it was saved with are in {chosen.path / RECORD}."
            )
        return arrays.restore(chosen.path / STATE, target, self._memory), self._record(chosen, found)

    def _check(self, saved: _Saved) -> Manifest | Damage:
        """The manifest if every file is as it was written; each process reads its part, all come to one verdict."""
        found, verdict = None, ""
        try:
            found = manifest.read(saved.path)
            if found.step != saved.step:
                raise Damage(f"{manifest.FILE_NAME} is of step {found.step}")
            names = sorted(found.files)
            manifest.verify(saved.path, found, names[jax.process_index() :: jax.process_count()])
        except Damage as damage:
            verdict = str(damage)
        verdict = next(filter(None, _from_every_process(verdict)), "")
        return Damage(verdict) if verdict or found is None else found

    def _record(self, saved: _Saved, found: Manifest) -> dict[str, Any]:
        manifest.verify(saved.path, found, [RECORD])
        return json.loads((saved.path / RECORD).read_bytes())


def open_checkpoints(directory: str | Path, config: CheckpointConfig) -> Checkpoints:
    """Those of a run, kept as its settings say; the score is the number of that name in `metrics` of the record."""
    best = config.best.value

    def score(record: dict[str, Any]) -> float | None:
        return record.get("metrics", {}).get(best)

    ranked = None if config.best == Best.none else score
    return Checkpoints(directory, config.keep, keep_every=config.keep_every, score=ranked)


def _unusable(saved: _Saved, damage: Damage) -> str:
    return f"The checkpoint of step {saved.step} cannot be used: in {saved.path} {damage}"


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _errno(error: BaseException) -> int | None:
    """The system's error number behind an exception; TensorStore puts it into the text."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno is not None:
            return seen.errno
        if match := re.search(r"os_error_code='(\d+)'", str(seen)):
            return int(match[1])
        seen = seen.__cause__ or seen.__context__
    return None


def _from_every_process(text: str) -> list[str]:
    """The texts of all processes, by process."""
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.asarray(data.size, np.int32)).ravel()
    padded = np.zeros(max(int(sizes.max()), 1), np.uint8)
    padded[: data.size] = data
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]
