"""The arrays of a checkpoint, through Orbax: any pytree of jax Arrays into a folder, and back onto any sharding.

    state --names--> {"master/embedding": Array, ...} --copy to host, then in the background--> folder/ (OCDBT)
    folder/ + target (shapes, dtypes, shardings) --every device reads its part--> state

Orbax writes a nested dict by those names, so that a folder can also be read with Orbax alone. Arrays without elements,
which it refuses, exist in the names only.
"""

import logging
import math
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import PyTree

# A save that took longer than this (seconds) is given up; the default of Orbax, 1,200, is short for a slow disk.
TIMEOUT = 7200
# Shards are written in chunks of at most this many bytes; who needs a part of a shard reads the chunks it lies in.
CHUNK_BYTES = 32 * 2**20


class _OrbaxNoise(logging.Filter):
    """Drops what Orbax logs: each of its failures also reaches us as an exception, and becomes one sentence."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname and "orbax" not in record.getMessage()


def _silence(unraisable: Any, show: Callable[[Any], object] = sys.unraisablehook) -> None:
    """After a failed write TensorStore reports those still under way to an event loop that Orbax has closed."""
    if not (isinstance(unraisable.exc_value, RuntimeError) and str(unraisable.exc_value) == "Event loop is closed"):
        show(unraisable)


for _logger in ("absl", "asyncio"):
    logging.getLogger(_logger).addFilter(_OrbaxNoise())
sys.unraisablehook = _silence
warnings.filterwarnings("ignore", r"coroutine '\w*(serialize|cancellable)\w*.* was never awaited", RuntimeWarning)


class Tensor(NamedTuple):
    """shape; dtype by name, e.g. `bfloat16`."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Leaves by name, `/` between the keys: a NamedTuple's field, a dict's key and a list's position look alike.

    Raises ValueError where two leaves would have one name, or a leaf none.
    """
    paths = jax.tree_util.tree_leaves_with_path(tree)
    pairs = [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in paths]
    leaves = dict(pairs)
    if len(leaves) < len(pairs) or not all(leaves):
        raise ValueError("A state needs a container, and its keys no '/', for its leaves to have names of their own.")
    return leaves


def check_saveable(state: PyTree) -> None:
    """Raises TypeError for leaves that are no arrays of numbers, before anything is written."""

    def numbers(x: Any) -> bool:
        return isinstance(x, jax.Array) and not jax.numpy.issubdtype(x.dtype, jax.dtypes.extended)

    if odd := [name for name, x in named_leaves(state).items() if not numbers(x)]:
        raise TypeError(
            f"{', '.join(odd[:3])}: a state consists of jax Arrays of numbers (a random key: its key_data)."
        )


def describe(tree: PyTree) -> dict[str, Tensor]:
    """Shape and dtype of every leaf by name; of arrays, or of anything abstract that has both."""
    return {name: Tensor(tuple(x.shape), jax.numpy.dtype(x.dtype).name) for name, x in named_leaves(tree).items()}


def mismatch(saved: Mapping[str, Tensor], wanted: Mapping[str, Tensor], *, subset: bool = False, most: int = 3) -> str:
    """How `wanted` differs from `saved`, naming the first `most` tensors of each kind; empty if it does not.

    subset: what is saved and not wanted is no difference.
    """

    def some(names: list[str]) -> str:
        return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")

    both = [name for name in wanted if name in saved]
    changed = [f"{name} ({saved[name]} there, {wanted[name]} here)" for name in both if saved[name] != wanted[name]]
    absent = [name for name in wanted if name not in saved]
    extra = [] if subset else [name for name in saved if name not in wanted]
    parts = [("different: ", changed), ("not there: ", absent), ("only there: ", extra)]
    return "; ".join(title + some(names) for title, names in parts if names)


def _nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *path, last = name.split("/")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def _handler(memory: int, largest: int) -> ocp.PyTreeCheckpointHandler:
    """memory: bytes in flight. largest: bytes of the largest tensor; Orbax raises an error if it may not pass whole."""
    # Orbax would let replicas share the writing on CPU only, with a small program compiled for every shape. Its file of
    # shardings is of no use here: the target has them.
    arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False, enable_write_sharding_file=False)
    # twice: a part is counted by the chunks it touches
    concurrent: Any = max(memory, 2 * largest + 1) / 1e9
    return ocp.PyTreeCheckpointHandler(
        save_concurrent_gb=concurrent,
        restore_concurrent_gb=concurrent,
        use_compression=False,  # zstd takes 7% off fp32 weights and twice the time (2 cores, 2026-11)
        type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, arrays)),
    )


def start_saving(folder: Path, state: PyTree, memory: int) -> Callable[[], None]:
    """Begins to write `state` to `folder`, which must not exist; call what it returns, once, to wait for the end.

    When this returns, all that this process writes is in host memory (one copy of its shards; on CPU the shards
    themselves, which JAX then does not overwrite): the state may be donated. Collective over processes. Raises what
    Orbax and the system raise, here or at the end.
    """
    leaves = named_leaves(state)
    tree = _nest({name: x for name, x in leaves.items() if x.size})
    if not tree:
        return lambda: None
    checkpointer = ocp.AsyncCheckpointer(
        _handler(memory, max(x.nbytes for x in leaves.values())),
        # directories first: a folder that cannot be written is known at once
        async_options=ocp.AsyncOptions(timeout_secs=TIMEOUT, create_directories_asynchronously=False),
    )

    def finish() -> None:
        try:
            checkpointer.wait_until_finished()
        finally:
            checkpointer.close()

    chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), tree)
    try:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(tree, save_args=chunks))
    except BaseException:
        checkpointer.close()
        raise
    return finish


def _sharding(leaf: Any) -> Sharding:
    """Where a leaf of the target should live; a target that does not say so gets the first device."""
    return getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.local_devices()[0])


def restore(folder: Path, target: PyTree, memory: int) -> PyTree:
    """The tree of `target` with the saved arrays, each on the target leaf's sharding; tensors it lacks stay unread.

    target: leaves with shape and dtype as saved (`mismatch` says so; not checked again), and a sharding. memory: bytes
    of host memory between disk and devices. Collective over processes.
    """
    leaves = named_leaves(target)
    wanted = _nest({name: x for name, x in leaves.items() if math.prod(x.shape)})
    read: dict[str, Any] = {}
    if wanted:
        arguments = jax.tree.map(
            lambda x: ocp.ArrayRestoreArgs(sharding=_sharding(x), global_shape=tuple(x.shape), dtype=x.dtype), wanted
        )
        largest = max(tensor.nbytes for tensor in describe(target).values())
        with ocp.Checkpointer(_handler(memory, largest)) as checkpointer:
            tree = checkpointer.restore(
                folder, args=ocp.args.PyTreeRestore(wanted, restore_args=arguments, partial_restore=True)
            )
        read = named_leaves(tree)

    def leaf(name: str, x: Any) -> jax.Array:
        if name in read:
            return read[name]
        empty = np.zeros(x.shape, x.dtype)
        return jax.make_array_from_callback(empty.shape, _sharding(x), lambda index: empty[index])

    return jax.tree.unflatten(jax.tree.structure(target), [leaf(name, x) for name, x in leaves.items()])
