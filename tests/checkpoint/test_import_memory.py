"""Host memory of an import: the device copy and one tensor, whatever the size of the model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moejax.checkpoint import hf_config, hf_names
from tests.checkpoint.foreign import hf_settings

READ = """
params = jax.block_until_ready(HFFolder(source).import_params())
"""
# Reads, writes a run folder, reads that and compares: what `convert hf` does.
CONVERT = """
report = import_hf(source, target)
"""
FRAME = """
import resource, sys
from pathlib import Path
import jax
from moejax.checkpoint.conversion import import_hf
from moejax.checkpoint.huggingface import HFFolder

source, target = map(Path, sys.argv[1:])
jax.block_until_ready(jax.numpy.zeros(8))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
{work}
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(1024 * (peak - before))
"""


def write_zeros(folder: Path) -> tuple[int, int]:
    """A model of 2 GB in fp32; its bytes, and those of its largest tensor (0.41 GB)."""
    folder.mkdir()
    sizes = dict(hidden_size=1024, num_attention_heads=8, num_key_value_heads=8, vocab_size=100_000)
    settings = hf_settings("olmoe", **sizes, num_experts=32, intermediate_size=1536)
    table = hf_names.pieces("olmoe", hf_config.import_config(settings))
    (folder / "config.json").write_text(json.dumps(settings))
    header, offset, largest = {}, 0, 0
    for piece in table:
        size = 4 * piece.shape[0] * (piece.shape[1] if len(piece.shape) > 1 else 1)
        header[piece.name] = {"dtype": "F32", "shape": list(piece.shape), "data_offsets": [offset, offset + size]}
        offset, largest = offset + size, max(largest, size)
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)  # zeros that take no room on disk
    assert offset > 2.0e9
    return offset, largest


@pytest.mark.slow
@pytest.mark.parametrize("work", [READ, CONVERT], ids=["read", "convert"])
def test_two_gigabytes(work: str, tmp_path: Path):
    """Peak over the device copy: under 1.3 times the largest tensor."""
    copy, largest = write_zeros(tmp_path / "hf")
    command = [sys.executable, "-c", FRAME.format(work=work), str(tmp_path / "hf"), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak = int(done.stdout)
    figures = f"{peak:,} bytes at peak for {copy:,} on the device, largest tensor {largest:,}"
    print(figures)
    assert peak - copy < 1.3 * largest, figures
