"""From a step's metrics on the devices to what is printed and written.

    StepMetrics --plain_metrics--> numbers --> metrics.jsonl and other writers, the progress display

The metrics of a step are fetched only after the next step was started, so that the devices never wait for the host.
"""

from typing import Any

import jax
import numpy as np

from moejax.accounting import flops_per_token
from moejax.config import Config
from moejax.errors import UserError
from moejax.observe.progress import Progress
from moejax.observe.routing import GerrymanderAlarm, routing_metrics
from moejax.observe.throughput import Throughput
from moejax.observe.writers import Writers
from moejax.parallel.step import StepMetrics


def plain_metrics(metrics: StepMetrics) -> dict[str, Any]:
    """Numbers and lists, fp32 values unchanged, counts as integers. Waits for the step.

    loss: nats a token; z_loss, auxiliary_loss: weighted; gradient_norm: before clipping; tokens: non-ignored ones.
    With MoE layers, lists by layer: those of `observe.routing.routing_metrics`, and expert_counts (by layer, then
    expert); load_imbalance is the largest load_max_over_mean.
    """
    host = jax.device_get(metrics)
    plain: dict[str, Any] = {name: value.item() for name, value in host._asdict().items() if name != "routing"}
    if host.routing is not None:
        by_layer = routing_metrics(host.routing)
        plain |= {
            "load_imbalance": max(by_layer["load_max_over_mean"]),
            **by_layer,
            "expert_counts": host.routing.counts.astype(np.int64).tolist(),
        }
    return plain


class StepReport:
    """Prints and writes one step behind the training loop.

    start(step) before and finish(step + 1, metrics) after each step; flush() before anything that must not overtake the
    metrics: a checkpoint, an evaluation, the end. Raises UserError when the loss is no longer a number.
    """

    def __init__(self, config: Config, progress: Progress, writers: Writers | None):
        self.config, self.progress, self.writers = config, progress, writers
        flops = flops_per_token(config.model, config.data.sequence_length).total
        self.throughput = Throughput(config.train.batch_tokens, flops, config.train.steps)
        self._waiting: tuple[int, StepMetrics] | None = None
        self._timing = False
        self._alarm = GerrymanderAlarm()

    def start(self, step: int) -> None:
        if not self._timing:
            self.throughput.start(step)
            self._timing = True

    def finish(self, step: int, metrics: StepMetrics) -> None:
        before, self._waiting = self._waiting, (step, metrics)
        if before is not None:
            self._report(*before)

    def flush(self) -> None:
        if self._waiting is not None:
            (step, metrics), self._waiting = self._waiting, None
            self._report(step, metrics)
        self._timing = False  # what comes now is no step, and not timed as one

    def evaluation(self, step: int, loss: float) -> None:
        """Held-out loss in nats a token."""
        in_bits = f", {loss / np.log(2):.3f} bits a byte" if self.config.data.tokenizer == "bytes" else ""
        self.progress.say(f"Step {step}: held-out loss {loss:.4f} nats a token{in_bits}.")
        if self.writers is not None:
            self.writers.write(step, {"held_out_loss": loss})

    def _report(self, step: int, metrics: StepMetrics) -> None:
        plain = plain_metrics(metrics)
        self.throughput.finish(step)
        rates = self.throughput.rates()
        if rates is not None:
            plain |= {"tokens_per_s": rates.tokens_per_s, "model_flops_per_s": rates.flops_per_s}
        if self.writers is not None:
            self.writers.write(step, plain)
        self.progress.update(
            step,
            loss=plain["loss"],
            tokens_per_s=rates.tokens_per_s if rates else None,
            flops_per_s=rates.flops_per_s if rates else None,
            grad_norm=plain["gradient_norm"],
            load_imbalance=plain.get("load_imbalance"),
            learning_rate=plain["learning_rate"],
            seconds_left=rates.seconds_left if rates else None,
        )
        if "gerrymander_index" in plain:
            for sentence in self._alarm.update(plain["gerrymander_index"], plain["load_max_over_mean"]):
                self.progress.say(sentence)
        if not np.isfinite(plain["loss"]) or not np.isfinite(plain["gradient_norm"]):
            raise UserError(
                f"Step {step} has loss {plain['loss']} and gradient norm {plain['gradient_norm']}, and nothing of it "
                "was saved; give the same command again with a lower optimizer.learning_rate or optimizer.clip: it "
                "goes on from the last checkpoint, or from the beginning if there is none."
            )
