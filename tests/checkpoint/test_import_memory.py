"""Host memory of an import: the device copy and one tensor, whatever the size of the model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moejax.checkpoint import hf_config, hf_names
from tests.checkpoint.foreign import hf_settings

SCRIPT = """
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


@pytest.mark.slow
def test_two_gigabytes(tmp_path: Path):
    """Peak over the device copy of a 2 GB model in fp32: under 1.3 times its largest tensor (0.41 GB)."""
    sizes = dict(hidden_size=1024, num_attention_heads=8, num_key_value_heads=8, vocab_size=100_000)
    settings = hf_settings("olmoe", **sizes, num_experts=32, intermediate_size=1536)
    table = hf_names.pieces("olmoe", hf_config.import_config(settings))
    (tmp_path / "config.json").write_text(json.dumps(settings))
    header, offset, largest = {}, 0, 0
    for piece in table:
        size = 4 * piece.shape[0] * (piece.shape[1] if len(piece.shape) > 1 else 1)
        header[piece.name] = {"dtype": "F32", "shape": list(piece.shape), "data_offsets": [offset, offset + size]}
        offset, largest = offset + size, max(largest, size)
    text = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)  # zeros that take no room on disk
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=True)
    peak, copy = map(int, done.stdout.split())
    assert copy == offset > 2.0e9
    assert peak - copy < 1.3 * largest, f"{peak:,} bytes at peak for {copy:,} on the device, largest tensor {largest:,}"
