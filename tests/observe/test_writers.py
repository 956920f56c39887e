"""Writers: every kind gets the same numbers; what is missing or refuses is one sentence."""

import errno
import importlib
import math
import os
import struct
import subprocess
import sys
import types

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c

from moejax.errors import UserError
from moejax.observe.append_file import AppendFile
from moejax.observe.jsonl import FILE_NAME, read_metrics
from moejax.observe.writers import open_writers


def events(run_dir):
    """All events of a run folder, in the order in which TensorBoard reads them, checksums checked."""
    found = []
    for path in sorted(run_dir.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            record = data[12 : 12 + length]
            assert struct.unpack("<I", data[8:12])[0] == masked_crc32c(data[:8])
            assert struct.unpack("<I", data[12 + length : 16 + length])[0] == masked_crc32c(record)
            found.append(Event.FromString(record))
            data = data[16 + length :]
    return found


@pytest.fixture
def without(monkeypatch):
    """Make packages look as if they were not installed."""
    real = importlib.import_module

    def hide(*packages):
        def fake(name, *args):
            if name.split(".")[0] in packages:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return real(name, *args)

        monkeypatch.setattr(importlib, "import_module", fake)

    return hide


@pytest.mark.parametrize(
    "kind, packages", [("tensorboard", ["tensorboardX", "tensorboard"]), ("wandb", ["wandb"])], ids=lambda x: str(x)
)
def test_a_missing_extra_is_one_sentence_that_names_it_and_cuts_nothing(tmp_path, without, kind, packages):
    with open_writers(["jsonl"], tmp_path, {}, None) as writers:
        writers.write(9, {"loss": 1.0})
    without(*packages)
    with pytest.raises(UserError, match=rf"pip install moejax\[{kind}\]") as caught:
        open_writers(["jsonl", kind], tmp_path, {}, 5)
    assert "\n" not in str(caught.value)
    assert [record["step"] for record in read_metrics(tmp_path)] == [9]


def test_an_unknown_kind_is_one_sentence_that_lists_the_known(tmp_path):
    with pytest.raises(UserError, match="no 'csv'; there are: jsonl, tensorboard, wandb"):
        open_writers(["jsonl", "csv"], tmp_path, {}, None)
    assert os.listdir(tmp_path) == []


def test_tensorboard_holds_the_numbers_of_the_jsonl(tmp_path):
    rows = [{"loss": 1 / 3 + step, "nan": math.nan, "huge": 1e300, "load": np.arange(8) * step} for step in range(1, 4)]
    with open_writers(["tensorboard", "jsonl", "jsonl"], tmp_path, {}, None) as writers:
        for step, row in enumerate(rows, 1):
            writers.write(step, row)
    version, start, *steps = events(tmp_path)
    assert version.file_version == "brain.Event:2"
    assert start.session_log.status == SessionLog.START and start.step == 0
    records = read_metrics(tmp_path)
    assert [event.step for event in steps] == [record["step"] for record in records] == [1, 2, 3]
    for event, record in zip(steps, records, strict=True):
        values = {value.tag: value for value in event.summary.value}
        assert list(values) == ["huge", "load", "loss", "nan"]
        assert values["loss"].simple_value == np.float32(record["loss"])
        assert math.isnan(values["nan"].simple_value) and values["huge"].simple_value == math.inf
        histogram, load = values["load"].histo, np.array(record["load"])
        assert (histogram.num, histogram.sum, histogram.max) == (8, load.sum(), load.max())
        assert histogram.sum_squares == np.square(load).sum() and sum(histogram.bucket) == 8
        assert len(histogram.bucket) == len(histogram.bucket_limit)


def test_tensorboard_forgets_what_came_after_the_resume_step(tmp_path):
    for resume_step in (None, 7, 7):  # three starts, perhaps within one second: three files
        with open_writers(["tensorboard"], tmp_path, {}, resume_step) as writers:
            writers.write(8, {"loss": 1.0, "load": [], "spoiled": [math.nan]})
    starts = [e.step for e in events(tmp_path) if e.session_log.status == SessionLog.START]
    assert starts == [0, 8, 8]
    assert len(list(tmp_path.glob("events.*"))) == 3


def test_wandb_resumes_the_same_run_with_config_and_histograms(tmp_path, monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda payload, step: calls.append(("log", step, payload)), finish=lambda: calls.append(("finish",))
    )
    fake = types.ModuleType("wandb")
    fake.init = lambda **kwargs: calls.append(("init", kwargs)) or run
    fake.Settings = lambda **kwargs: kwargs
    fake.Histogram = lambda values: ("histogram", values.tolist())
    fake.Error = RuntimeError
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for resume_step in (None, 1):
        with open_writers(["wandb"], tmp_path / "tiny", {"train": {"steps": 3}}, resume_step) as writers:
            writers.write(2, {"loss": np.float32(0.5), "load": [[1, 2], [math.inf, 4]]})
    first, logged, finished, second, *_ = calls
    assert first[1]["id"] == second[1]["id"] and first[1]["resume"] == "allow"
    assert first[1]["config"] == {"train": {"steps": 3}} and first[1]["name"] == "tiny"
    assert logged == ("log", 2, {"loss": 0.5, "load": ("histogram", [1, 2, 4])})
    assert finished == ("finish",)

    def refuse(**kwargs):
        raise RuntimeError("api_key not configured")

    fake.init = refuse
    with pytest.raises(UserError, match=r"api_key not configured.*WANDB_MODE=offline"):
        open_writers(["wandb"], tmp_path / "tiny", {}, 1)


def test_a_full_disk_is_one_sentence(tmp_path):
    (tmp_path / FILE_NAME).symlink_to("/dev/full")
    with open_writers(["jsonl"], tmp_path, {}, None) as writers:
        with pytest.raises(UserError, match=r"No room is left on the disk that holds .*metrics\.jsonl; free some"):
            writers.write(1, {"loss": 1.0})


def test_a_record_that_does_not_fit_is_taken_back(tmp_path):
    """A real refusal half-way through a record: the limit on file sizes stands in for the end of the disk."""
    script = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))\n"
        "from moejax.errors import UserError\n"
        "from moejax.observe.writers import open_writers\n"
        "writers = open_writers(['jsonl'], sys.argv[1], {}, None)\n"
        "try:\n"
        "    for step in range(1, 100): writers.write(step, {'load': [7] * 100})\n"
        "except UserError as error: print(step, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)
    step, _, sentence = done.stdout.strip().partition(" ")
    assert "metrics.jsonl cannot be written (file too large)" in sentence and done.stderr == ""
    data = (tmp_path / FILE_NAME).read_bytes()
    assert data.endswith(b"\n") and len(read_metrics(tmp_path)) == int(step) - 1 > 0


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/run cannot be written \(not a directory\).*run\.dir=FOLDER"):
        open_writers(["jsonl"], tmp_path / "file" / "run", {}, None)


@pytest.mark.parametrize("kind", ["jsonl", "tensorboard"])
def test_a_read_only_folder_is_one_sentence(tmp_path, monkeypatch, kind):
    def refuse(*args):  # root may write anywhere, so that a mode of 0500 proves nothing there
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UserError, match=r"cannot be written \(read-only file system\); make it writable or choose"):
        open_writers([kind], tmp_path, {}, None)


@pytest.mark.parametrize(
    "metrics, error", [({"step": 1}, ValueError), ({"loss": "2.5"}, TypeError), ({"loss": None}, TypeError)]
)
def test_what_is_no_metric_is_refused_and_nothing_written(tmp_path, metrics, error):
    with open_writers(["jsonl"], tmp_path, {}, None) as writers:
        with pytest.raises(error):
            writers.write(1, metrics)
    assert read_metrics(tmp_path) == []


def test_closing_twice_is_fine_and_appending_to_a_closed_file_is_a_fault(tmp_path):
    writers = open_writers(["jsonl", "tensorboard"], tmp_path, {}, None)
    writers.close()
    writers.close()
    file = AppendFile(tmp_path / "file")
    file.close()
    with pytest.raises(ValueError, match="is closed"):
        file.append(b"x")
