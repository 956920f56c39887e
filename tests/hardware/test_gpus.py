"""The files of GPUs: each is complete, agrees with what the kernels are compiled for, and a bad one is told apart."""

import pytest

from moejax.errors import UserError
from moejax.hardware.gpus import DTYPES, FOLDER, known_gpus, read_gpu
from pallas_kernels.compile_only import CHIPS, target_config


@pytest.mark.parametrize("name", known_gpus())
def test_every_file_is_whole(name):
    gpu = read_gpu(name)
    assert gpu.name == name and gpu.source
    assert set(gpu.peak_tflops) == set(DTYPES)
    assert gpu.peak_tflops["float8"] > gpu.peak_tflops["bfloat16"] > gpu.peak_tflops["float32"]
    assert gpu.hbm_bytes_per_second > gpu.nvlink_bytes_per_second > gpu.network_bytes_per_second
    assert 0 < gpu.usable_bytes < gpu.memory_bytes
    assert gpu.chip == CHIPS[name], "the kernels are compiled for another chip than plans are"


def test_every_gpu_has_a_target_of_its_own():
    gpus = [read_gpu(name) for name in known_gpus()]
    texts = {target_config(gpu.chip, gpu.vendor_name) for gpu in gpus}
    assert len(texts) == len(gpus)


def test_a_file_of_your_own(tmp_path):
    own = tmp_path / "own.yaml"
    text = (FOLDER / "h200.yaml").read_text()
    own.write_text(text.replace("name: h200", "name: own").split("compile:")[0])
    gpu = read_gpu(str(own))
    assert gpu.name == "own" and gpu.chip is None
    assert gpu.peak_tflops == read_gpu("h200").peak_tflops


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("bytes: 151397597184", "bytes: none"), "memory.bytes='none' must be a number"),
        (("network:", "net:"), "lacks network.bytes_per_second"),
        (("peak_tflops: {", "peak_tflops: {{"), "cannot be read as YAML"),
        (("[9, 0]", "9"), "must be two whole numbers"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path, change, says):
    own = tmp_path / "own.yaml"
    own.write_text((FOLDER / "h200.yaml").read_text().replace(*change))
    with pytest.raises(UserError, match=says.replace("[", r"\[")) as error:
        read_gpu(str(own))
    assert "\n" not in str(error.value)


def test_a_gpu_without_a_file_names_those_that_have_one():
    with pytest.raises(UserError, match="b200, b300, h100, h200"):
        read_gpu("b999")
