"""The training run: data, state, steps, metrics and checkpoints of one config on one mesh.

    trainer = Trainer(config)          opens data, builds the program, restores the run if there is one
    metrics = trainer.step()           one optimizer step by hand
    trainer.run()                      to the end, with progress, metrics, checkpoints and signals

A run folder holds `config.yaml`, `metrics.jsonl`, `log.txt`, `checkpoints/`, and `profile/` if one was asked for; the
same name resumes. Without a folder (`Trainer(config, folder=None)`) nothing is written, as in a notebook.
"""

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
from jax.sharding import Mesh

import moejax
from moejax import config_io
from moejax.accounting import parameter_counts
from moejax.checkpoint.manager import Checkpoints, open_checkpoints
from moejax.checkpoint.manifest import Manifest
from moejax.checkpoint.saved_model import SavedModel
from moejax.config import Config
from moejax.data.loader import Loader, one_pass
from moejax.data.packing import PackedWindows
from moejax.data.token_files import open_corpus
from moejax.data.tokenizers import Tokenizer, load_tokenizer
from moejax.errors import UserError
from moejax.mesh import make_mesh, parse_mesh
from moejax.models.transformer import Transformer
from moejax.observe.log import open_log
from moejax.observe.profile import ProfiledSteps
from moejax.observe.progress import Progress
from moejax.observe.writers import open_writers
from moejax.parallel import mxfp8
from moejax.parallel.step import PortableState, StepMetrics, TrainProgram, TrainState
from moejax.run_folder import RunFolder, changed_settings, other_model
from moejax.signals import Agreement, Interruption, signal_name
from moejax.step_report import StepReport, plain_metrics
from pallas_kernels import describe_implementation


class Text(NamedTuple):
    """The text of a run: its tokenizer, the training batches of this process, how many sequences there are to train on,
    and the held-out ones (None: none)."""

    tokenizer: Tokenizer
    batches: Loader
    sequences: int
    held_out: PackedWindows | None


def open_text(config: Config, host: int, hosts: int) -> Text:
    """Tokenise (once, cached), cut, shuffle the text that `config.data` names; part `host` of `hosts` of each batch."""
    data, length = config.data, config.data.sequence_length
    tokenizer = load_tokenizer(data.tokenizer)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(
            f"model.vocab_size={config.model.vocab_size} is smaller than the {tokenizer.vocab_size} tokens of "
            f"data.tokenizer={data.tokenizer}; set model.vocab_size to at least {tokenizer.vocab_size}."
        )
    groups = [[path] for path in data.paths] if data.weights else [list(data.paths)]
    corpora = [open_corpus(paths, tokenizer, data.cache_dir, vocab_size=config.model.vocab_size) for paths in groups]

    def windows(corpus: list[Any], split: str) -> PackedWindows:
        return PackedWindows(corpus, length, split=split, validation_fraction=data.validation_fraction)

    training = [windows(corpus, "train") for corpus in corpora]
    batches = Loader(
        training,
        global_batch_size=config.train.batch_tokens // length,
        seed=data.seed,
        weights=list(data.weights) or None,
        host_index=host,
        host_count=hosts,
    )
    held_out = None
    if data.validation_fraction > 0 and config.train.eval_batches:
        held_out = windows(list(itertools.chain(*corpora)), "validation")
    return Text(tokenizer, batches, sum(map(len, training)), held_out)


class Trainer:
    """One run. Attributes: config, program (`parallel.step.TrainProgram`), state, text, step_number.

    folder: "auto" takes `run.dir/run.name` and resumes what is there; None writes nothing.
    Raises UserError for anything in the config, the data or the folder that the person can mend.
    """

    def __init__(self, config: Config, mesh: Mesh | None = None, *, folder: str | None = "auto"):
        self.config = config
        self.mesh = make_mesh(parse_mesh(config.parallel.mesh)) if mesh is None else mesh
        self.program = TrainProgram(config, self.mesh)
        self.is_writer = jax.process_index() == 0
        self.folder: RunFolder | None = None
        self.checkpoints: Checkpoints | None = None
        self.changed: list[str] = []
        with contextlib.ExitStack() as opened:
            self.text = open_text(config, *self.program.data_shard())
            opened.callback(self.text.batches.close)
            if folder == "auto":
                path = Path(config.run.dir) / config.run.name
                if self.is_writer:
                    self.folder = RunFolder(config)
                    opened.callback(self.folder.close)
                self.checkpoints = open_checkpoints(path / "checkpoints", config.checkpoint)
                opened.callback(self.checkpoints.close)
            self.resumed_from = self._resume()
            self.began_with = ""
            if self.resumed_from is None:
                self.state = self._begin()
            if self.folder:  # not before the old run has been taken up: a refusal changes nothing on disk
                self.folder.write_config(config)
            self._opened = opened.pop_all()
        self._saved_step = self.resumed_from
        self._last: StepMetrics | None = None
        self._evaluated: tuple[int, float] | None = None  # step, held-out loss
        self.step_number = self.resumed_from or 0

    # --- one step at a time ----------------------------------------------------------------------------------------

    def step(self) -> dict[str, Any]:
        """One optimizer step on the next batch; its metrics as plain numbers (see `plain_metrics`)."""
        return plain_metrics(self.advance())

    def advance(self) -> StepMetrics:
        """One step, its metrics still on the devices: the caller decides when to wait for them."""
        batch = self.program.place_batch(next(self.text.batches))
        self.state, metrics = self.program.step(self.state, batch)
        self.step_number += 1
        self._last = metrics
        return metrics

    def evaluate(self) -> float | None:
        """Mean cross entropy in nats per token over `train.eval_batches` batches of held-out text; None without any."""
        if self.text.held_out is None:
            return None
        host, hosts = self.program.data_shard()
        size = self.config.train.batch_tokens // self.config.data.sequence_length
        held_out = one_pass(self.text.held_out, global_batch_size=size, host_index=host, host_count=hosts)
        total, tokens = 0.0, 0.0
        for batch in itertools.islice(held_out, self.config.train.eval_batches):
            placed = self.program.place_batch(batch)
            loss, count = self.program.evaluate(self.state.params, placed, self.state.score_bias)
            total, tokens = total + float(loss), tokens + float(count)
        self._evaluated = (self.step_number, total / tokens)
        return total / tokens

    def model(self) -> Transformer:
        """The model as one Flax module with the current fp32 weights, in model order."""
        portable = self.program.portable(self.state)
        return Transformer(self.config.model, portable.master, score_bias=portable.score_bias)

    # --- saving ----------------------------------------------------------------------------------------------------

    def save(self, *, wait: bool = False) -> None:
        """A checkpoint of the state, the position in the data, and the config; asynchronous unless `wait`."""
        if self.checkpoints is None:
            return
        # not asked of the disk: processes that see it at different moments must come to the same answer
        if self.step_number == self._saved_step:
            if wait:
                self.checkpoints.wait()
            return
        record = {
            "config": config_io.to_dict(self.config),
            "data": self.text.batches.get_state(),
            "mesh": str(self.program.shape),
            "moejax": moejax.__version__,
            "metrics": self._metrics_here(),
        }
        self.checkpoints.save(self.step_number, self.program.portable(self.state), record, wait=wait)
        self._saved_step = self.step_number

    def _metrics_here(self) -> dict[str, float | None]:
        """What `checkpoint.best` compares; None for what was not measured at this step."""
        here = self._evaluated[1] if self._evaluated and self._evaluated[0] == self.step_number else None
        return {"loss": float(self._last.loss) if self._last else None, "held_out_loss": here}

    def _resume(self) -> int | None:
        if self.checkpoints is None or self.checkpoints.latest() is None:
            return None
        if self.folder:
            self.changed = self.folder.changes(self.config)
        whole = self.program.portable_target()

        def target(manifest: Manifest) -> Any:
            saved = {name.split("/")[0] for name in manifest.tensors}
            if "first_moment" in saved:
                return whole
            # an imported model: weights alone, so the optimizer starts anew
            return {name: leaf for name, leaf in whole._asdict().items() if name in saved}

        found, record = self.checkpoints.restore(target, fall_back=self.config.checkpoint.fall_back)
        if isinstance(found, PortableState):
            self.state = self.program.from_portable(found)
        else:
            self.state = self.program.with_params(found["master"], found.get("score_bias"))
        if record["data"] is not None:
            self.text.batches.set_state(record["data"])
        return int(self.state.step)

    def _begin(self) -> TrainState:
        """The state of a new run: fresh weights, or those of the run that `train.init_from` names."""
        given = self.config.train.init_from
        if given is None:
            return self.program.init()
        saved = SavedModel.at(given)
        if other := other_model(changed_settings(saved.record["config"], self.config)):
            raise UserError(
                f"The weights in train.init_from={given} are those of another model ({'; '.join(other)}); "
                f"take its settings, or other weights."
            )
        weights = saved.params(self.program.portable_target().master)
        self.began_with = f"Weights of step {saved.step} of {saved.path}; the optimizer and the data begin anew."
        return self.program.with_params(weights, saved.score_bias())

    # --- the whole run ---------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Train to `train.steps`. Returns the signal that ended it earlier, after saving; 0 if none did."""
        config = self.config
        folder = self.folder.path if self.folder else None
        with contextlib.ExitStack() as stack:
            if folder:
                stack.enter_context(open_log(folder))
            progress = stack.enter_context(self._progress(stack))
            writers = None
            if folder:
                kinds = [writer.value for writer in config.run.writers]
                writers = stack.enter_context(open_writers(kinds, folder, config_io.to_dict(config), self.resumed_from))
            for sentence in self.describe():
                progress.say(sentence)
            if self.step_number >= config.train.steps:
                progress.say(
                    f"The run has reached step {self.step_number} already; give train.steps=N with a larger N to go on."
                )
                return 0
            interruption = stack.enter_context(self._interruption(progress))
            agreement = Agreement(self.mesh)
            profile = stack.enter_context(ProfiledSteps(config.train.profile, folder and folder / "profile"))
            report = StepReport(config, progress, writers)
            left = 0
            while self.step_number < config.train.steps:
                left = agreement(interruption.signal)
                if left:
                    break
                report.start(self.step_number)
                profile.before_step(self.step_number)
                report.finish(self.step_number + 1, self.advance())
                if profile.stops_after(self.step_number):
                    report.flush()
                    profile.stop()
                self._between_steps(report, progress)
            report.flush()
            if not left:
                self._say_evaluation(report)
            self.save(wait=True)
            if folder:
                then = "the same command goes on from there." if left else "the run is finished."
                progress.say(f"Step {self.step_number} is saved in {folder}; {then}")
            return left

    def _interruption(self, progress: Progress) -> Interruption:
        def heard(number: int) -> None:
            progress.say(
                f"{signal_name(number)}: the step under way is finished, then saved; a second one leaves at once."
            )

        def leaving(number: int) -> None:
            progress.say(f"{signal_name(number)}: left at once; the same command goes on from the last checkpoint.")
            progress.__exit__()  # gives the terminal its cursor back

        return Interruption(heard, leaving)

    def _between_steps(self, report: StepReport, progress: Progress) -> None:
        every = self.config.train.eval_every
        last = self.step_number == self.config.train.steps
        if every and self.step_number % every == 0 and not last:
            report.flush()
            self._say_evaluation(report)
        if self.config.checkpoint.every and self.step_number % self.config.checkpoint.every == 0 and not last:
            report.flush()  # metrics on disk are never behind the checkpoint
            self.save()

    def _say_evaluation(self, report: StepReport) -> None:
        loss = self.evaluate()
        if loss is not None:
            report.evaluation(self.step_number, loss)

    def _progress(self, stack: contextlib.ExitStack) -> Progress:
        stream = None if self.is_writer else stack.enter_context(open(os.devnull, "w"))
        return Progress(
            self.config.train.steps,
            self.step_number,
            stream,
            is_terminal=None if self.step_number < self.config.train.steps else False,  # no bar over a finished run
            log_every=self.config.run.log_every,
            byte_tokens=self.config.data.tokenizer == "bytes",
        )

    def describe(self) -> Iterator[str]:
        """What runs, said once at the start: sizes, devices, and every choice that was made."""
        c, program = self.config, self.program
        device = self.mesh.devices.flat[0]
        kind = "simulated CPU device" if device.platform == "cpu" else device.device_kind
        plural = "s" if self.mesh.size > 1 else ""
        processes = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
        yield f"{self.mesh.size} {kind}{plural}{processes}, mesh {program.shape}; jax {jax.__version__}."
        counts = parameter_counts(c.model)
        yield (
            f"Model: {counts.total / 1e6:,.2f}M parameters, {counts.active / 1e6:,.2f}M active per token, "
            f"{program.parameter_bytes_per_device() / 2**20:,.1f} MiB of {c.precision.params.value} weights a device."
        )
        in_mx = mxfp8.sentence(c, self.mesh)
        if in_mx is not None:
            yield in_mx
        if c.model.n_moe_layers:
            yield (
                f"Experts: {c.model.moe.num_experts}, {c.model.moe.top_k} per token; transport "
                f"{program.transport.name}, receive buffer {program.receive_buffer_rows():,} rows a device, "
                f"overflow {c.parallel.experts.overflow.value}."
            )
            widths = (c.model.d_model, c.model.moe.hidden)
            yield (
                "Expert products: grouped GEMM "
                f"{describe_implementation(device.platform, c.precision.compute.value, widths)}."
            )
            if program.shape.ep > 1:
                yield program.choice.table()
        held_out = f"{len(self.text.held_out):,}" if self.text.held_out else "none"
        epochs = c.train.steps * c.train.batch_tokens / c.data.sequence_length / self.text.sequences
        yield (
            f"Text: {self.text.sequences:,} sequences of {c.data.sequence_length} tokens, {held_out} held out; "
            f"{c.train.steps:,} steps are {epochs:.3g} times through it."
        )
        yield (
            f"Batch: {c.train.batch_tokens:,} tokens in {c.parallel.pipeline.microbatches} microbatches, "
            f"schedule {program.schedule.name}, recompute {c.parallel.recompute.value}."
        )
        if self.changed:
            yield f"Settings changed since this run was last started: {'; '.join(self.changed)}."
        if self.began_with:
            yield self.began_with
        if self.resumed_from is not None:
            yield f"Resuming from step {self.resumed_from}."

    def close(self) -> None:
        """Waits for the checkpoint that is being written, and lets go of the run folder. Safe to call twice."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
