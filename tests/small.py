"""A model small enough to compile in seconds, and a batch with ignored labels, two documents a row and some padding."""

from collections.abc import Sequence

import numpy as np

from moejax import config_io
from moejax.config import Config
from moejax.mesh import make_mesh, parse_mesh
from moejax.parallel.step import TrainProgram

SETTINGS = (
    "model.d_model=32",
    "model.n_layers=5",
    "model.n_dense_layers=1",
    "model.vocab_size=288",
    "model.init_std=0.1",
    "model.attention.n_heads=2",
    "model.attention.n_kv_heads=1",
    "model.attention.head_dim=16",
    "model.moe.num_experts=8",
    "model.moe.top_k=2",
    "model.moe.hidden=32",
    "model.moe.shared_hidden=32",
    "precision.params=float32",
    "precision.compute=float32",
    "data.sequence_length=16",
    "train.batch_tokens=512",
    "train.steps=20",
    "optimizer.schedule.warmup_steps=2",
    "parallel.pipeline.microbatches=4",
)


def small_config(*overrides: str) -> Config:
    return config_io.load(None, [*SETTINGS, *overrides])


def small_program(mesh: str = "dp=1", overrides: Sequence[str] = ()) -> TrainProgram:
    return TrainProgram(small_config(*overrides), make_mesh(parse_mesh(mesh)))


def small_batch(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """Random ids; rows hold two documents, labels are ignored at ends and in a stretch, one row ends in padding."""
    length = config.data.sequence_length
    rows = config.train.batch_tokens // length
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 256, (rows, length + 1))
    labels, segments = ids[:, 1:].copy(), np.zeros((rows, length), np.int64)
    half = length // 2
    segments[:, half:] = 1
    labels[:, half - 1] = -100
    labels[1, 2 : half - 2] = -100
    segments[2, length - 3 :] = -1
    labels[2, length - 4 :] = -100
    positions = np.arange(length) - np.where(segments == 1, half, 0)
    return {"tokens": ids[:, :-1], "labels": labels, "segment_ids": segments, "positions": positions}
