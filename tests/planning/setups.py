"""A small plan's subject, and published ones, for the tests of the planner."""

from pathlib import Path

from moejax import config_io
from moejax.hardware.gpus import read_gpu
from moejax.mesh import parse_mesh
from moejax.planning.setup import Setup, make_setup
from tests.small import small_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def small_setup(mesh: str, *overrides: str, gpu: str = "h200") -> Setup:
    config = small_config("model.attention.implementation=blocks", *overrides)
    return make_setup(config, parse_mesh(mesh), read_gpu(gpu))


def published(name: str, mesh: str | None = None, *overrides: str, gpu: str = "b300") -> Setup:
    file = str(CONFIGS / f"{name}.yaml")
    config = config_io.load(file, list(overrides))
    return make_setup(config, parse_mesh(mesh or config.parallel.mesh), read_gpu(gpu), file)
