"""Runs of a two-layer model on a page of made-up text: their arguments, their processes, and what they wrote."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from moejax import train
from moejax.observe.jsonl import FILE_NAME, read_metrics
from tests.small import SETTINGS

ROOT = Path(__file__).resolve().parents[1]
RATES = {"tokens_per_s", "model_flops_per_s"}  # what differs between two runs of one command
PATIENCE_S = 240.0  # the machine may be busy


def write_text(folder: Path, words: int = 20_000) -> Path:
    """A folder with a few files of words, always the same."""
    rng = random.Random(0)
    vocabulary = ["expert", "router", "token", "stage", "mesh", "shard", "gate", "load"]
    for number in range(3):
        path = folder / "text" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(" ".join(rng.choice(vocabulary) for _ in range(words // 3)) + "\n")
    return folder / "text"


def run_arguments(folder: Path, *overrides: str) -> list[str]:
    """Everything within `folder`: text, token cache, runs."""
    if not (folder / "text").is_dir():
        write_text(folder)
    return [
        *SETTINGS,
        "model.n_layers=2",
        "model.n_dense_layers=0",
        "parallel.pipeline.microbatches=2",
        "optimizer.schedule.kind=constant",  # the step is then one compiled program for any number of steps
        "optimizer.schedule.warmup_steps=0",
        f"data.paths={folder / 'text'}",
        f"data.cache_dir={folder / 'cache'}",
        f"run.dir={folder / 'runs'}",
        "run.name=small",
        "run.log_every=1",
        *overrides,
    ]


def main(arguments: list[str]) -> int:
    """The train command in this process, whose devices stay those of the test session."""
    jax.devices()
    return train.main(arguments)


def start(arguments: list[str], **environment: str) -> subprocess.Popen[str]:
    """`python -m moejax.train` with these arguments, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "moejax.train", *arguments],
        cwd=ROOT,
        # as in conftest: compiling outweighs running
        env={**os.environ, "PYTHONUNBUFFERED": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Waits for the end; what the process printed."""
    try:
        return process.communicate(timeout=PATIENCE_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise


def wait_until(process: subprocess.Popen[str], condition: Callable[[], bool]) -> bool:
    """True once the condition holds, false if the process ends before."""
    end = time.monotonic() + PATIENCE_S
    while process.poll() is None:
        if condition():
            return True
        assert time.monotonic() < end, "the run does not get on"
        time.sleep(0.002)
    return False


def steps_written(folder: Path) -> int:
    """Whole lines in metrics.jsonl, an evaluation's included."""
    path = folder / FILE_NAME
    return path.read_bytes().count(b"\n") if path.exists() else 0


def what_was_learnt(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without the rates."""
    return [{k: v for k, v in record.items() if k not in RATES} for record in read_metrics(folder)]
