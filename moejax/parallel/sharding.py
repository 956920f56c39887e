"""From logical axis names to mesh axes: where weights live, and where their master copy and moments live.

One table, `RULES`, says which mesh axis a logical axis falls on; a weight is replicated over all others. Its fp32
master and moments are cut further, over every axis the weight is replicated on (ZeRO-1): `zero_layout` picks the
dimension.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from moejax.mesh import AXES, MeshShape

RULES = {"layers": "pp", "experts": "ep"}
CUT_ALIKE = {"layers": "pp"}  # `parallel.strategy=fsdp`: experts are weights like others, see `parallel/fsdp.py`
LARGE_BYTES = 256 * 2**20  # of a gradient; a copy of less is nothing to avoid
SHARED_ENDS = RULES | {"vocab": "pp"}  # embedding and head cut over the stages by vocabulary


def is_axes(x: Any) -> bool:
    return isinstance(x, tuple) and all(isinstance(name, str) for name in x)


def param_spec(axes: tuple[str, ...], rules: Mapping[str, str] = RULES) -> PartitionSpec:
    """Where the working copy of a weight with these logical axes lives."""
    return PartitionSpec(*(rules.get(name) for name in axes))


@dataclass(frozen=True)
class ZeroLayout:
    """How the gradient, master and moments of one weight are spread.

    spec: of the sharded arrays. scatter_axes: mesh axes that cut dimension `dimension` (none: replicated);
    sum_axes: the remaining mesh axes over which the weight is replicated, summed whole.
    """

    spec: PartitionSpec
    dimension: int
    scatter_axes: tuple[str, ...]
    sum_axes: tuple[str, ...]


def zero_layout(
    shape: tuple[int, ...], axes: tuple[str, ...], mesh: MeshShape, rules: Mapping[str, str] = RULES
) -> ZeroLayout:
    """Cut one dimension over as many replicas as possible.

    Preference: most devices first, then the outermost dimension after the layers, be it on a mesh axis already (experts
    over ep, then over dp): a layer's part is then one run of memory, and XLA scatters it without a copy.
    """
    sizes = {name: getattr(mesh, name) for name in AXES}
    taken = [rules.get(name) for name in axes]
    replicas = tuple(name for name in AXES if name not in taken and sizes[name] > 1)
    subsets = [tuple(n for i, n in enumerate(replicas) if mask >> i & 1) for mask in range(1, 2 ** len(replicas))]
    of_layers = axes[0] in ("layers", "") and len(axes) > 1  # "": layers that every stage holds whole
    free = [d for d in range(int(of_layers), len(shape)) if taken[d] != "pp"]
    local = [size // sizes[name] if name else size for size, name in zip(shape, taken, strict=True)]
    for subset in sorted(subsets, key=lambda s: -math.prod(sizes[n] for n in s)):
        count = math.prod(sizes[n] for n in subset)
        fitting = [d for d in free if local[d] % count == 0]
        if fitting:
            dimension = fitting[0]
            cut: list[Any] = list(taken)
            cut[dimension] = tuple(name for name in (taken[dimension], *subset) if name)
            spec = PartitionSpec(*(c[0] if isinstance(c, tuple) and len(c) == 1 else c for c in cut))
            return ZeroLayout(spec, dimension, subset, tuple(n for n in replicas if n not in subset))
    return ZeroLayout(PartitionSpec(*taken), 0, (), replicas)


def zero_layouts(
    params: PyTree[Any], axes: PyTree[Any], mesh: MeshShape, rules: Mapping[str, str] = RULES
) -> PyTree[ZeroLayout]:
    """`zero_layout` of every weight; params give global shapes."""
    return jax.tree.map(lambda p, a: zero_layout(p.shape, a, mesh, rules), params, axes, is_leaf=is_axes)


def spread(params: PyTree[Any], mesh: Mesh) -> PyTree[jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of weights that nobody computes with: cut over all devices of the mesh, each along
    the largest dimension that divides over as many as possible. For conversions, whose models need not fit one."""
    shape = MeshShape(**dict(mesh.shape))

    def one(p: Any) -> jax.ShapeDtypeStruct:
        spec = zero_layout(p.shape, ("",) * len(p.shape), shape).spec
        return jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(one, params)


def reduce_gradient(gradient: Array, layout: ZeroLayout) -> Array:
    """Inside the manual region: sum this device's fp32 gradient over all replicas, keeping this device's part.

    XLA:GPU scatters along the outermost dimension, and along another one copies the whole array first: of a large stack
    that would be half its accumulators once more (52 GB beside ultra_128e's 99, 2026-11). So it goes layer by layer.
    """
    if layout.sum_axes:
        gradient = lax.psum(gradient, layout.sum_axes)
    if not layout.scatter_axes:
        return gradient

    def scatter(x: Array, dimension: int) -> Array:
        return lax.psum_scatter(x, layout.scatter_axes, scatter_dimension=dimension, tiled=True)

    stack_of_matrices = gradient.ndim > 2 and layout.dimension > 0
    if stack_of_matrices and gradient.nbytes > LARGE_BYTES:
        return lax.map(lambda layer: scatter(layer, layout.dimension - 1), gradient)
    return scatter(gradient, layout.dimension)
