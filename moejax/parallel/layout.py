"""Which layer lives where: layers to virtual stages, and virtual stages to rows of the stacked weights.

The model counts layers 0..L-1, dense ones first. A pipeline of S stages with v chunks each has S v virtual stages; the
first L mod (S v) of them get one layer more, so that the last ones, which also carry the head, are the short ones (the
published layout: 63 layers over 16 virtual stages are fifteen times 4 and once 3). Every device's part of an array has
the same shape, so a stage has as many rows (slots) of a kind of block as the fullest stage needs; the rest stay unused.

    logical stack [n_layers_of_kind, ...]   --to_physical-->   [S * slots, ...], sharded over pp   --to_logical--> back
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import PyTree

from moejax.errors import UserError
from moejax.parallel.schedules import Schedule


class StageKind(NamedTuple):
    """A program: stages of one kind run the same code. Layers by kind, and whether the ends of the model are here."""

    n_dense: int
    n_moe: int
    first: bool
    last: bool


@dataclass(frozen=True)
class StackLayout:
    """Rows of one stack of blocks: slots per stage, the logical row held by each physical one (-1: unused)."""

    slots: int
    logical: np.ndarray  # int [S * slots]

    @property
    def identity(self) -> bool:
        return bool(np.array_equal(self.logical, np.arange(len(self.logical))))

    @property
    def count(self) -> int:
        return int(self.logical.max(initial=-1)) + 1


@dataclass(frozen=True)
class Layout:
    """kinds: the distinct programs. kind_of, first_dense_slot, first_moe_slot, first_layer: int32 [stages, chunks]."""

    kinds: tuple[StageKind, ...]
    kind_of: np.ndarray
    first_dense_slot: np.ndarray
    first_moe_slot: np.ndarray
    first_layer: np.ndarray
    stacks: dict[str, StackLayout]


def layers_of_virtual_stages(n_layers: int, virtual_stages: int) -> list[range]:
    """Consecutive layers per virtual stage; the first n_layers mod virtual_stages have one more."""
    if virtual_stages > n_layers:
        raise UserError(
            f"{virtual_stages} pipeline stages (pp times chunks) are more than model.n_layers={n_layers}; "
            "each needs at least one layer."
        )
    base, extra = divmod(n_layers, virtual_stages)
    bounds = np.cumsum([0] + [base + (q < extra) for q in range(virtual_stages)])
    return [range(a, b) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


def make_layout(n_layers: int, n_dense: int, schedule: Schedule, ends_apart: bool = False) -> Layout:
    """ends_apart: embedding and head are no part of any stage, so that first and last ones are as the others."""
    stages, chunks = schedule.stages, schedule.chunks
    layers = layers_of_virtual_stages(n_layers, schedule.virtual_stages)
    table = {name: np.zeros((stages, chunks), np.int32) for name in ("kind", "dense", "moe", "layer")}
    rows: dict[str, list[list[int]]] = {"dense_blocks": [], "moe_blocks": []}
    kinds: list[StageKind] = []
    for stage in range(stages):
        dense_here: list[int] = []
        moe_here: list[int] = []
        for chunk in range(chunks):
            q = int(schedule.virtual_stage(stage, chunk))
            dense = [layer for layer in layers[q] if layer < n_dense]
            moe = [layer - n_dense for layer in layers[q] if layer >= n_dense]
            ends = (q == 0, q == schedule.virtual_stages - 1) if not ends_apart else (False, False)
            kind = StageKind(len(dense), len(moe), *ends)
            if kind not in kinds:
                kinds.append(kind)
            table["kind"][stage, chunk] = kinds.index(kind)
            table["dense"][stage, chunk], table["moe"][stage, chunk] = len(dense_here), len(moe_here)
            table["layer"][stage, chunk] = layers[q].start
            dense_here += dense
            moe_here += moe
        rows["dense_blocks"].append(dense_here)
        rows["moe_blocks"].append(moe_here)
    stacks = {}
    for name, per_stage in rows.items():
        slots = max(map(len, per_stage))
        if slots:
            padded = [here + [-1] * (slots - len(here)) for here in per_stage]
            stacks[name] = StackLayout(slots, np.array(padded, np.int32).reshape(-1))
    return Layout(tuple(kinds), table["kind"], table["dense"], table["moe"], table["layer"], stacks)


def to_physical(stack: PyTree[Array], layout: StackLayout) -> PyTree[Array]:
    """Rows of a logical stack, in the order stages hold them; unused rows are zero."""
    if layout.identity:
        return stack
    return jax.tree.map(lambda x: _rows(x, layout.logical), stack)


def to_logical(stack: PyTree[Array], layout: StackLayout) -> PyTree[Array]:
    """Rows in model order, unused ones left out; the inverse of `to_physical`."""
    if layout.identity:
        return stack
    where = np.array([int(np.flatnonzero(layout.logical == row)[0]) for row in range(layout.count)])
    return jax.tree.map(lambda x: _rows(x, where), stack)


def _rows(x: Array, rows: np.ndarray) -> Array:
    """x[rows], zeros where a row is -1, as slices put one after the other.

    The rows are known, and no gather: XLA's partitioner aborts on one between two ways of cutting the other dimensions
    (dp=4,pp=3 on CPU, jaxlib 0.12.0.1: "Could not slice dimension 1 with size 4").
    """
    steps = np.where((rows[1:] == rows[:-1] + 1) & (rows[:-1] >= 0) | (rows[1:] == -1) & (rows[:-1] == -1), 0, 1)
    parts = []
    for run in np.split(rows, np.flatnonzero(steps) + 1):
        if run[0] < 0:
            parts.append(jnp.zeros((len(run), *x.shape[1:]), x.dtype))
        else:
            parts.append(lax.slice_in_dim(x, int(run[0]), int(run[-1]) + 1))
    return jnp.concatenate(parts)


class Segment(NamedTuple):
    """`count` runs of the same blocks, one after the other: kind says of how many. dense, moe: where the first begins,
    in blocks of that kind from the stage's first."""

    kind: StageKind
    count: int
    dense: int
    moe: int


def segments(kind: StageKind) -> list[Segment]:
    """The blocks of a stage in order: dense ones, then MoE blocks, each in runs of ceil(sqrt(n)) and what is over."""
    made = []
    for name, n in (("n_dense", kind.n_dense), ("n_moe", kind.n_moe)):
        if n == 0:
            continue
        size = math.ceil(math.sqrt(n))
        for length, count, first in ((size, n // size, 0), (n % size, 1, n - n % size)):
            if length:
                part = StageKind(0, 0, False, False)._replace(**{name: length})
                dense, moe = (first, 0) if name == "n_dense" else (kind.n_dense, first)
                made.append(Segment(part, count, dense, moe))
    return made
