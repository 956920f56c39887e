"""Where masters live: every element owned exactly once per copy, and a state that any mesh can take up."""

import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from moejax.mesh import AXES, MeshShape, make_mesh
from moejax.parallel.sharding import RULES, param_spec, reduce_gradient, zero_layout
from moejax.parallel.step import TrainState
from tests.small import small_batch, small_program

SIZES = st.sampled_from([1, 2, 4, 8])
NAMES = st.sampled_from(["layers", "experts", "embed", "heads", "mlp"])


@st.composite
def weights(draw):
    """A mesh, and the shape of a weight that fits it."""
    mesh = MeshShape(draw(SIZES), draw(SIZES), draw(SIZES))
    axes = tuple(draw(st.lists(NAMES, min_size=1, max_size=4, unique=True)))
    shape = tuple(draw(st.integers(1, 12)) * (getattr(mesh, RULES[name]) if name in RULES else 1) for name in axes)
    return mesh, axes, shape


@given(weight=weights())
def test_cut_and_summed_axes_are_all_there_are_and_no_element_is_owned_twice(weight):
    mesh, axes, shape = weight
    sizes = {name: getattr(mesh, name) for name in AXES}
    layout = zero_layout(shape, axes, mesh)
    used = [n for entry in layout.spec if entry for n in (entry if isinstance(entry, tuple) else (entry,))]
    assert len(used) == len(set(used))
    # every axis of the mesh either cuts the weight, cuts its master, or is summed over
    working = [name for name in param_spec(axes) if name]
    everywhere = [*working, *layout.scatter_axes, *layout.sum_axes]
    assert sorted(n for n in everywhere if sizes[n] > 1) == sorted(n for n in AXES if sizes[n] > 1)
    assert set(used) == {*working, *layout.scatter_axes}
    # the parts multiply up to the whole: (elements of one part) * (parts) = elements
    parts = math.prod(sizes[n] for n in used)
    local = [
        size // math.prod(sizes[n] for n in (entry if isinstance(entry, tuple) else (entry,)) if n)
        for size, entry in itertools.zip_longest(shape, layout.spec)
    ]
    assert math.prod(local) * parts == math.prod(shape)


@given(weight=weights())
def test_no_cut_over_more_devices_would_have_been_possible(weight):
    mesh, axes, shape = weight
    layout = zero_layout(shape, axes, mesh)
    taken = [RULES.get(name) for name in axes]
    replicas = [n for n in AXES if n not in taken and getattr(mesh, n) > 1]
    best = 1
    for count in range(len(replicas) + 1):
        for subset in itertools.combinations(replicas, count):
            cut = math.prod(getattr(mesh, n) for n in subset)
            local = [size // getattr(mesh, t) if t else size for t, size in zip(taken, shape, strict=True)]
            if any(t != "pp" and size % cut == 0 for t, size in zip(taken, local, strict=True)):
                best = max(best, cut)
    assert math.prod(getattr(mesh, n) for n in layout.scatter_axes) == best


def test_a_device_owns_an_equal_part_of_the_masters():
    shape = MeshShape(pp=2, dp=2, ep=2)
    program = small_program(str(shape), ["model.n_layers=4", "model.n_dense_layers=0"])
    layouts = jax.tree.leaves(program.zero)
    for weight, layout in zip(jax.tree.leaves(program.abstract), layouts, strict=True):
        local = NamedSharding(program.mesh, layout.spec).shard_shape(weight.shape)
        if weight.size > 100:
            assert math.prod(local) * 8 == weight.size


def test_a_state_comes_back_bit_for_bit_from_any_mesh_to_any_other():
    overrides = ["model.n_dense_layers=2"]
    one = small_program("dp=1", overrides)
    state, _ = one.step(one.init(), one.place_batch(small_batch(one.config)))
    trained = jax.device_get(one.portable(state))
    assert float(np.abs(trained.first_moment["head"]["w"]).max()) > 0
    for mesh in ("dp=2,ep=2,pp=4", "ep=8", "dp=4,pp=3"):
        program = small_program(mesh, overrides)
        targets = jax.tree.map(lambda x: x.sharding, program.portable_target())
        there = program.from_portable(jax.device_put(trained, targets))
        assert isinstance(there, TrainState)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(program.portable(there)), trained)
    # and on one device the whole of it, optimizer counts and working weights included
    back = one.from_portable(jax.tree.map(jax.numpy.asarray, trained))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(back), jax.device_get(state))


@pytest.mark.parametrize("mesh", ["dp=4,ep=2", "dp=2,ep=2,pp=2", "pp=4,dp=2", "pp=2,ep=4"])
@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_what_processes_feed_is_each_sequence_to_the_device_that_one_process_would_feed_it_to(
    monkeypatch, mesh, processes
):
    program = small_program(mesh)
    batch = small_batch(program.config)
    whole = program.place_batch(batch).tokens
    on_device = {shard.device: np.asarray(shard.data) for shard in whole.addressable_shards}
    rows = len(batch["tokens"])
    everything = NamedSharding.addressable_devices_indices_map
    devices = program.mesh.devices.flatten()
    fed: dict[jax.Device, np.ndarray] = {}
    for process in range(processes):
        mine = set(devices[process * 8 // processes : (process + 1) * 8 // processes])

        def reachable(self, shape, mine=mine):
            return {device: index for device, index in everything(self, shape).items() if device in mine}

        def place(sharding, local, mine=mine):
            # what make_array_from_process_local_data does: this process's rows are its part of the whole, in order
            shape = (local.shape[0], rows // program.config.parallel.pipeline.microbatches, local.shape[2])
            index = {d: i for d, i in everything(sharding, shape).items() if d in mine}
            starts = sorted({i[1].indices(shape[1])[0] for i in index.values()})
            size = local.shape[1] // len(starts)
            return {
                d: local[:, (at := starts.index(i[1].indices(shape[1])[0]) * size) : at + size]
                for d, i in index.items()
            }

        with monkeypatch.context() as patched:
            patched.setattr(NamedSharding, "addressable_devices_indices_map", reachable)
            part, parts = program.data_shard()
            patched.setattr(jax, "make_array_from_process_local_data", place)
            mine_rows = {name: x[part * rows // parts : (part + 1) * rows // parts] for name, x in batch.items()}
            fed |= program.place_batch(mine_rows).tokens
    assert set(fed) == set(on_device)
    for device, there in on_device.items():
        np.testing.assert_array_equal(fed[device], there)


def test_a_large_stack_is_reduced_layer_by_layer_to_the_same_parts(monkeypatch):
    mesh, shape = MeshShape(pp=1, dp=2, ep=2), (3, 4, 4, 8)
    layout = zero_layout(shape, ("layers", "experts", "embed", "mlp"), mesh)
    assert layout.spec == PartitionSpec("pp", ("ep", "dp"), None, None), "the outermost dimension after the layers"
    gradient = np.random.default_rng(0).normal(size=(2, *shape)).astype(np.float32)  # one for each dp

    def reduce(x):
        part = lambda g: reduce_gradient(g[0], layout)  # noqa: E731
        spec = PartitionSpec("dp", None, "ep")
        region = jax.shard_map(part, mesh=make_mesh(mesh), in_specs=spec, out_specs=layout.spec, check_vma=False)
        return jax.jit(region).lower(x)

    whole = reduce(gradient)
    monkeypatch.setattr("moejax.parallel.sharding.LARGE_BYTES", 0)
    by_layer = reduce(gradient)
    assert "while" in by_layer.as_text() and "while" not in whole.as_text()
    for lowered in (whole, by_layer):
        np.testing.assert_array_equal(lowered.compile()(gradient), gradient.sum(0))
