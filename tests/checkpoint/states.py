"""States made from their step, meshes of eight simulated devices, and comparisons, for the tests of checkpoints."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moejax.checkpoint.manager import Checkpoints


class State(NamedTuple):
    step: Any
    master: Any
    moments: Any


MESHES = {
    "8": Mesh(np.array(jax.devices()[:8]).reshape(1, 8), ("a", "b")),
    "2x4": Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("a", "b")),
    "4x2 reversed": Mesh(np.array(jax.devices()[7::-1]).reshape(4, 2), ("a", "b")),
    "1": Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("a", "b")),
}
SPECS = State(
    step=PartitionSpec(),
    master={
        "blocks": {"w": PartitionSpec(None, "b", "a"), "scale": PartitionSpec()},
        "half": PartitionSpec("b"),
        "none": PartitionSpec("a"),
    },
    moments=[PartitionSpec(("a", "b"))],
)


def values(step: int) -> State:
    """A state made from its step: every dtype and corner that a run has, floats from all bit patterns but NaNs."""
    rng = np.random.default_rng(step)

    def floats(*shape: int) -> np.ndarray:
        x = rng.integers(0, 2**32, shape, np.uint32).view(np.float32)
        return np.where(np.isnan(x), np.float32(-0.0), x)

    return State(
        step=np.int32(step),
        master={
            "blocks": {"w": floats(3, 16, 8), "scale": floats(5)},
            "half": floats(8, 3).astype(jnp.bfloat16),
            "none": np.zeros((0, 4), np.float32),
        },
        moments=[rng.integers(-(2**31), 2**31, (16,), np.int32)],
    )


def shardings(mesh: Mesh, specs: Any = SPECS) -> Any:
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def state_on(mesh: Mesh, step: int) -> State:
    return jax.device_put(values(step), shardings(mesh))


def target_on(mesh: Mesh, specs: Any = SPECS) -> State:
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), values(0), shardings(mesh, specs)
    )


def assert_same(found: Any, expected: Any) -> None:
    def same(x: Any, y: np.ndarray) -> None:
        assert x.dtype == y.dtype and x.shape == y.shape
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()

    jax.tree.map(same, found, expected)


def small(step: int) -> dict[str, jax.Array]:
    """A state of one tensor, for tests of what happens around the arrays."""
    return {"w": jnp.full((4,), step, jnp.float32)}


SMALL_TARGET = {"w": jax.ShapeDtypeStruct((4,), jnp.float32)}


def restored_value(checkpoints: Checkpoints, **how: Any) -> float:
    return float(checkpoints.restore(SMALL_TARGET, **how)[0]["w"][0])


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())
