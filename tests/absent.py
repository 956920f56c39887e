"""Compiling for absent GPUs in a test: whether there is a compiler, and a process of its own for each target."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moejax.hardware.absent_gpu import missing

ROOT = Path(__file__).resolve().parents[1]
needs_compiler = pytest.mark.skipif(missing() is not None, reason=f"nothing to compile with: {missing()}")


def own_process(*arguments: str) -> str:
    """What `python *arguments` prints. JAX keeps the first target of a process, so each has its own; and without the
    flags of the tests' CPU programs."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
