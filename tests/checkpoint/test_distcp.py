"""Distributed checkpoints of torch: every chunk in its place, and no stranger's code run."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from moejax.checkpoint.distcp import DistributedCheckpoint
from moejax.errors import UserError
from tests.checkpoint.foreign import write_distcp


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"flat": (37,), "matrix": (6, 5), "step": ()}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("files, chunks", [(1, 1), (1, 3), (3, 4)])
def test_tensors_come_back(tmp_path: Path, files: int, chunks: int):
    given = tensors()
    checkpoint = DistributedCheckpoint(write_distcp(tmp_path / "c", given, files, chunks))
    assert checkpoint.tensors.keys() == given.keys() and not checkpoint.others
    for name, array in given.items():
        np.testing.assert_array_equal(checkpoint.read(name), array)


class Hostile:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("function", [os.mkdir, eval, getattr])
def test_a_foreign_name_is_refused_before_anything_runs(tmp_path: Path, function):
    folder = write_distcp(tmp_path / "c", tensors())
    witness = tmp_path / "witness"
    arguments = {os.mkdir: (str(witness),), eval: (f"__import__('os').mkdir({str(witness)!r})",), getattr: (1, "real")}
    hostile = pickle.dumps(Hostile(function, *arguments[function]))
    if function is os.mkdir:
        pickle.loads(hostile)  # it would
        witness.rmdir()
    (folder / ".metadata").write_bytes(hostile)
    with pytest.raises(UserError, match="asks for the Python object"):
        DistributedCheckpoint(folder)
    assert not witness.exists()


def test_a_foreign_name_in_a_shard_is_refused(tmp_path: Path):
    folder = write_distcp(tmp_path / "c", {"flat": np.ones(4, np.float32)})
    shard = folder / "__0_0.distcp"
    data = shard.read_bytes()
    shard.write_bytes(data.replace(b"torch._utils", b"torch.xutils"))
    with pytest.raises(UserError):
        DistributedCheckpoint(folder).read("flat")


@pytest.mark.parametrize("name", ["torch\nfloat32", "torch\nFloatStorage", "torch\nSize", "collections\nOrderedDict"])
def test_stand_ins_cannot_be_altered(tmp_path: Path, name: str):
    folder = write_distcp(tmp_path / "c", tensors())
    state = pickle.dumps((3, ">", None, None, None, -1, -1, 0), 0)[:-1]
    (folder / ".metadata").write_bytes(f"c{name}\n".encode() + state + b"b.")
    with pytest.raises(UserError):
        DistributedCheckpoint(folder)
    assert np.dtype(np.float32).isnative
    again = write_distcp(tmp_path / "again", tensors(), chunks=2)
    np.testing.assert_array_equal(DistributedCheckpoint(again).read("flat"), tensors()["flat"])


def test_damage_is_named(tmp_path: Path):
    folder = write_distcp(tmp_path / "c", tensors(), files=2, chunks=2)
    shard = folder / "__1_0.distcp"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    with pytest.raises(UserError, match="__1_0.distcp is cut short"):
        DistributedCheckpoint(folder)
    place = whole.index(tensors()["flat"].tobytes()[-8:])
    shard.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(UserError, match="tensor flat, is damaged"):
        DistributedCheckpoint(folder).read("flat")
    shard.unlink()
    with pytest.raises(UserError, match="lacks __1_0.distcp"):
        DistributedCheckpoint(folder)
    metadata = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(metadata[: len(metadata) // 2])
    with pytest.raises(UserError, match="damaged"):
        DistributedCheckpoint(folder)
    with pytest.raises(UserError, match="is no distributed checkpoint"):
        DistributedCheckpoint(tmp_path)
