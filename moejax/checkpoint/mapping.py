"""Foreign tensors and our weights, as one table that is read in both directions.

    "model.layers.1.mlp.experts.3.up_proj.weight" [F, D]  <--Piece-->  moe_blocks/moe/experts/w_up_gate[1, 3, :, :F]

    read(name) --`assemble`: one tensor at a time, into the shards that hold a part of it--> params, sharded
    params --`take`--> the tensor as the other side stores it

A layout (`hf_names.py`, `olmo_core.py`) is a list of pieces that covers every element of every weight exactly once.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from moejax.checkpoint.arrays import named_leaves
from moejax.errors import UserError
from moejax.models.transformer import Params

Index = tuple[int | slice, ...]
ALIGNMENT = 64  # bytes; XLA:CPU takes up a buffer that starts on such a boundary without copying it


class Piece(NamedTuple):
    """One foreign tensor and the region of a weight it fills.

    name, shape: of the tensor. leaf: the weight, keys joined by "/". index: the region, one entry per axis of the
    weight, slices with both ends. axes: order in which the tensor's axes stand in the region (None: as they are); the
    region's axes are those, some of them split in two (heads and head width) or dropped (width 1).
    """

    name: str
    shape: tuple[int, ...]
    leaf: str
    index: Index
    axes: tuple[int, ...] | None = None

    @property
    def region_shape(self) -> tuple[int, ...]:
        return tuple(i.stop - i.start for i in self.index if isinstance(i, slice))

    def to_region(self, tensor: np.ndarray) -> np.ndarray:
        """The tensor, flat or in its shape, as the region holds it."""
        tensor = tensor.reshape(self.shape)
        return (tensor if self.axes is None else tensor.transpose(self.axes)).reshape(self.region_shape)

    def to_tensor(self, region: np.ndarray) -> np.ndarray:
        """The inverse."""
        if self.axes is None:
            return region.reshape(self.shape)
        permuted = region.reshape([self.shape[axis] for axis in self.axes])
        return permuted.transpose(np.argsort(self.axes))


def whole(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(0, n) for n in shape)


def check_tensors(
    pieces: Iterable[Piece], shapes: Mapping[str, tuple[int, ...]], source: str, *, flat: bool = False
) -> None:
    """Every piece is there in its size and nothing is left over; raises UserError naming tensors otherwise.

    shapes: of all tensors of the source by name. flat: they are stored as vectors.
    """
    known = {piece.name: piece for piece in pieces}
    missing = [name for name in known if name not in shapes]
    left = sorted(set(shapes) - set(known))
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        there = f"; it has {left[0]}, for which there is no place" if left else ""
        raise UserError(f"{source} has no tensor {missing[0]}{more}, which this model needs{there}.")
    if left:
        raise UserError(f"{source} has {len(left)} tensors that this model has no place for, such as {left[0]}.")
    for name, piece in known.items():
        wanted = (math.prod(piece.shape),) if flat else piece.shape
        if tuple(shapes[name]) != wanted:
            raise UserError(
                f"{source}: tensor {name} has shape {list(shapes[name])}, and its config asks for {list(wanted)}."
            )


def _overlap(region: Index, shard: tuple[slice, ...]) -> tuple[Index, Index] | None:
    """Where the region and the shard meet: the index into the region, and into the shard; None if they do not."""
    inside: list[int | slice] = []
    here: list[int | slice] = []
    for wanted, held in zip(region, shard, strict=True):
        if isinstance(wanted, int):
            if not held.start <= wanted < held.stop:
                return None
            here.append(wanted - held.start)
            continue
        start, stop = max(wanted.start, held.start), min(wanted.stop, held.stop)
        if start >= stop:
            return None
        inside.append(slice(start - wanted.start, stop - wanted.start))
        here.append(slice(start - held.start, stop - held.start))
    return tuple(inside), tuple(here)


def _aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Uninitialised, and placed so that a CPU device can take it up as it is."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % ALIGNMENT
    return raw[offset : offset + size].view(dtype).reshape(shape)


def _place(leaf: Any, pieces: Sequence[Piece], read: Callable[[str], np.ndarray]) -> jax.Array:
    """One weight, filled shard by shard; a tensor is read once and let go before the next is read."""
    shape = tuple(leaf.shape)
    sharding: Sharding = getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.local_devices()[0])
    shards: dict[tuple[slice, ...], np.ndarray] = {}
    homes: list[tuple[Any, tuple[slice, ...]]] = []  # device, its part
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(slice(*i.indices(n)[:2]) for i, n in zip(index or (), shape, strict=True))
        homes.append((device, bounds))
        if bounds not in shards:
            shards[bounds] = _aligned(tuple(b.stop - b.start for b in bounds), leaf.dtype)
    for piece in pieces:
        meetings = [(buffer, _overlap(piece.index, bounds)) for bounds, buffer in shards.items()]
        if not any(meeting for _, meeting in meetings):
            continue
        region = piece.to_region(read(piece.name))
        for buffer, meeting in meetings:
            if meeting:
                inside, here = meeting
                buffer[here] = region[inside]
        del region
    arrays = [jax.device_put(shards[bounds], device, may_alias=True) for device, bounds in homes]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def assemble(target: Params, pieces: Iterable[Piece], read: Callable[[str], np.ndarray]) -> Params:
    """The weights of `target` (leaves with shape, dtype, and a sharding or none), filled from foreign tensors.

    read: a tensor by name, flat or in shape, in any float dtype. Host memory beside the weights themselves: on CPU one
    tensor; elsewhere one tensor and the weight being filled. Check the tensors first (`check_tensors`).
    """
    by_leaf: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_leaf.setdefault(piece.leaf, []).append(piece)
    leaves = named_leaves(target)
    assert set(leaves) == set(by_leaf), sorted(set(leaves) ^ set(by_leaf))
    placed = []
    for name, leaf in leaves.items():
        covered = sum(math.prod(piece.region_shape) for piece in by_leaf[name])
        assert covered == math.prod(leaf.shape), f"{name}: {covered} elements of {math.prod(leaf.shape)}"
        placed.append(_place(leaf, by_leaf[name], read))
    return jax.tree.unflatten(jax.tree.structure(target), placed)


def take(leaves: Mapping[str, Any], piece: Piece) -> np.ndarray:
    """The foreign tensor out of our weights, by leaf name as `named_leaves` gives them."""
    return piece.to_tensor(np.asarray(leaves[piece.leaf][piece.index]))
