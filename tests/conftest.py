"""What every test runs under: simulated devices, patient collectives, a compilation cache, quiet hypothesis.

    environment variables (before jax is imported; child processes inherit them) -> jax.config -> hypothesis profile

Sixteen CPU devices for the whole session, in this process only: a command that a test starts makes its own. Set
JAX_PLATFORMS=cuda for the tests marked `gpu`. Set HYPOTHESIS_PROFILE=thorough for more and random examples.
"""

import hashlib
import os
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEVICES = 16


def cpu_fingerprint() -> str:
    """Names the processor by its instruction sets: compiled code of one machine may be illegal on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(flags.encode()).hexdigest()[:12]


def prepare_environment() -> Path:
    """Sets what JAX reads at import, and returns the folder of the compilation cache."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Sixteen device threads on two busy cores reach a rendezvous late: XLA would warn after 20 s and abort after 40 s.
    # Both flags are known to jaxlib 0.11.2 and 0.12.0.1; an unknown one aborts the process.
    flags = os.environ.get("XLA_FLAGS", "")
    for name, seconds in (("warn_stuck_timeout", 120), ("terminate_timeout", 240)):
        flag = f"--xla_cpu_collective_call_{name}_seconds"
        if flag not in flags:
            flags = f"{flags} {flag}={seconds}"
    os.environ["XLA_FLAGS"] = flags.strip()
    # On CPU a cached program gives the same bits, aliasing and memory figures as a compiled one (compared 2026-11, both
    # JAX versions). A torn entry (killed process) fails its checksum: JAX warns and compiles.
    cache = Path(os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax" / cpu_fingerprint())))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
    return cache


cache_folder = prepare_environment()

import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

jax.config.update("jax_num_cpu_devices", DEVICES)
# Small programs that run once: LLVM's dear passes cost more than they save. Not for child processes, whose programs are
# those of users and of kernels for absent GPUs.
jax.config.update("jax_disable_most_optimizations", True)
jax.devices()  # now: a command that the first test calls in this process would fix another number for all that follow

# An example that compiles takes seconds, so few of them, always the same ones, and no deadline.
settings.register_profile(
    "quick", max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", parent=settings.get_profile("quick"), max_examples=500, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def forget_old_programs(folder: Path, days: float = 7.0) -> None:
    """Removes cached programs older than `days`; nothing else bounds the folder, as each change of code adds to it."""
    for entry in folder.glob("*-cache"):
        try:
            if time.time() - entry.stat().st_mtime > days * 86_400:
                entry.unlink()
        except FileNotFoundError:
            pass


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        forget_old_programs(cache_folder)


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and jax.default_backend() != "gpu":
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a GPU and JAX_PLATFORMS=cuda"))
