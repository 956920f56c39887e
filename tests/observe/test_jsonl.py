"""metrics.jsonl: bit-exact numbers, one valid JSON object a line, and whole again after a kill at any byte."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.errors import UserError
from moejax.observe.append_file import AppendFile
from moejax.observe.jsonl import FILE_NAME, cut_after, encode_line, read_metrics
from moejax.observe.writers import open_writers

float32_bits = st.integers(0, 2**32 - 1)


def metrics_at(step):
    return {"loss": 5.0 / step, "grad_norm": math.nan if step % 3 == 0 else step / 7, "load": [step, 0, 3 * step]}


def write_steps(run_dir, first, last, resume_step):
    with open_writers(["jsonl"], run_dir, {}, resume_step) as writers:
        for step in range(first, last + 1):
            writers.write(step, metrics_at(step))


@given(bits=st.lists(float32_bits, min_size=1, max_size=20))
def test_any_float32_returns_bit_for_bit(tmp_path_factory, bits):
    run_dir = tmp_path_factory.mktemp("run")
    values = np.array(bits, np.uint32).view(np.float32)
    with open_writers(["jsonl"], run_dir, {}, None) as writers:
        writers.write(1, {"scalar": values[0], "list": values, "python": [float(v) for v in values]})
    [record] = read_metrics(run_dir)
    number = ~np.isnan(values)
    for key in ("list", "python"):
        back = np.array(record[key], np.float32)
        np.testing.assert_array_equal(np.isnan(back), ~number)
        np.testing.assert_array_equal(back.view(np.uint32)[number], values.view(np.uint32)[number])
    np.testing.assert_equal(record["scalar"], float(values[0]))


@pytest.mark.parametrize("value", [1e-45, 1.1754942e-38, -0.0, 3.4028235e38, 16777216.0])
def test_the_edges_of_float32_return_bit_for_bit(tmp_path, value):
    with open_writers(["jsonl"], tmp_path, {}, None) as writers:
        writers.write(1, {"x": np.float32(value)})
    [record] = read_metrics(tmp_path)
    assert np.float32(record["x"]).tobytes() == np.float32(value).tobytes()


def test_every_line_is_strict_json_with_step_first_and_keys_in_the_order_given(tmp_path):
    with open_writers(["jsonl"], tmp_path, {}, None) as writers:
        writers.write(1, {"z": math.nan, "a": math.inf, "m": [1, -math.inf], "count": np.int64(2**60)})
        writers.write(2, {"count": 1, "m": np.array([[1, 2], [3, 4]]), "a": 0.5, "z": np.float32(0.1)})

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in (tmp_path / FILE_NAME).read_text().splitlines()]
    assert [list(line) for line in lines] == [["step", "z", "a", "m", "count"], ["step", "count", "m", "a", "z"]]
    assert lines[0] == {"step": 1, "a": "Infinity", "count": 2**60, "m": [1, "-Infinity"], "z": "NaN"}
    assert lines[1]["m"] == [[1, 2], [3, 4]]
    first, _ = read_metrics(tmp_path)
    assert first["a"] == math.inf and first["m"] == [1, -math.inf] and math.isnan(first["z"])


def test_a_line_is_on_disk_when_write_returns(tmp_path):
    with open_writers(["jsonl"], tmp_path, {}, None) as writers:
        for step in (1, 2, 3):
            writers.write(step, metrics_at(step))
            assert [r["step"] for r in read_metrics(tmp_path)] == list(range(1, step + 1))


@given(data=st.data())
def test_killed_at_any_byte_and_resumed_the_file_is_that_of_an_undisturbed_run(tmp_path_factory, data):
    run_dir = tmp_path_factory.mktemp("run")
    path = run_dir / FILE_NAME
    whole = b"".join(encode_line(step, metrics_at(step)) for step in range(1, 9))
    size = data.draw(st.integers(0, len(whole)), label="bytes that reached the disk")
    path.write_bytes(whole[:size])
    # What counts is in the file; that its newline is missing is mended.
    written = whole[:size].count(b"\n") + (whole[size : size + 1] == b"\n")
    resume_step = data.draw(st.integers(0, written), label="step of the checkpoint")
    with open_writers(["jsonl"], run_dir, {}, resume_step):
        assert path.read_bytes() == b"".join(encode_line(s, metrics_at(s)) for s in range(1, resume_step + 1))
    write_steps(run_dir, resume_step + 1, 8, resume_step)
    assert path.read_bytes() == whole
    assert os.listdir(run_dir) == [FILE_NAME]


@pytest.mark.parametrize("records", [1, 3])
def test_a_last_line_that_lacks_only_its_newline_is_kept(tmp_path, records):
    path = tmp_path / FILE_NAME
    whole = b"".join(encode_line(step, metrics_at(step)) for step in range(1, records + 1))
    path.write_bytes(whole[:-1])
    cut_after(path, records)
    assert path.read_bytes() == whole


def test_a_process_killed_while_writing_leaves_whole_lines_but_perhaps_the_last(tmp_path):
    script = (
        "import sys, itertools\n"
        "from moejax.observe.writers import open_writers\n"
        "writers = open_writers(['jsonl'], sys.argv[1], {}, None)\n"
        "for step in itertools.count(1): writers.write(step, {'load': [step / 3] * 500})\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
    path = tmp_path / FILE_NAME
    try:
        deadline = time.monotonic() + 30
        while not (path.exists() and path.stat().st_size > 100_000):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    steps = [record["step"] for record in read_metrics(tmp_path)]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > 5
    with open_writers(["jsonl"], tmp_path, {}, steps[-1] - 2) as writers:
        writers.write(steps[-1] - 1, {"load": [0.0]})
    assert [record["step"] for record in read_metrics(tmp_path)] == steps[:-1]


def test_resume_none_starts_anew_and_zero_keeps_what_was_before_training(tmp_path):
    path = tmp_path / FILE_NAME
    for step in range(3):
        AppendFile(path).append(encode_line(step, {"loss": 1.0}))
    cut_after(path, 0)
    assert [r["step"] for r in read_metrics(path)] == [0]
    cut_after(path, None)
    assert path.read_bytes() == b""


def test_a_file_with_nothing_to_cut_is_left_alone(tmp_path):
    write_steps(tmp_path, 1, 5, None)
    before = (tmp_path / FILE_NAME).stat()
    cut_after(tmp_path / FILE_NAME, 5)
    after = (tmp_path / FILE_NAME).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_lines_that_are_no_records_are_left_out_with_a_warning_and_the_others_kept(tmp_path, caplog):
    path = tmp_path / FILE_NAME
    good = [encode_line(step, metrics_at(step)) for step in (1, 2, 3)]
    path.write_bytes(good[0] + b"\0\0\0\n" + good[1] + b"[1]\n\n\xff\n" + good[2])
    cut_after(path, 3)
    assert path.read_bytes() == b"".join(good)
    assert "lines 2, 4, 5, 6 were no records" in caplog.text


def test_a_full_disk_while_cutting_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    write_steps(tmp_path, 1, 5, None)
    before = (tmp_path / FILE_NAME).read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"No room is left on the disk that holds .*metrics\.jsonl; free some"):
        open_writers(["jsonl"], tmp_path, {}, 3)
    assert (tmp_path / FILE_NAME).read_bytes() == before
    assert os.listdir(tmp_path) == [FILE_NAME]


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="name a run folder"):
        read_metrics(tmp_path)
