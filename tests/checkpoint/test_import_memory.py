"""Host memory of an import: the device copy and one tensor, whatever the size of the model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moejax.checkpoint import hf_config, hf_names
from tests.checkpoint.foreign import hf_settings

READ = """
import resource, sys
import jax
from moejax.checkpoint.huggingface import HFFolder

folder = HFFolder(sys.argv[1])
jax.block_until_ready(jax.numpy.zeros(8))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
params = jax.block_until_ready(folder.import_params())
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(1024 * (peak - before), sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""


def write_zeros(folder: Path) -> int:
    """A model of 2 GB in fp32; the bytes of its largest tensor (0.41 GB)."""
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
    return largest


@pytest.mark.slow
def test_two_gigabytes(tmp_path: Path):
    """Peak over the device copy: under 1.3 times the largest tensor."""
    largest = write_zeros(tmp_path / "hf")
    command = [sys.executable, "-c", READ, str(tmp_path / "hf")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, copy = map(int, done.stdout.split())
    figures = f"{peak:,} bytes at peak for {copy:,} on the device, largest tensor {largest:,}"
    print(figures)
    assert copy > 2.0e9 and peak - copy < 1.3 * largest, figures
