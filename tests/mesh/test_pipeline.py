"""Every schedule gives the loss and the gradients of one device: a cover of schedule x stash x mesh, and drawn ones.

Compiling is the price, so not every product is run, and none in `make test`: there 1F1B and GPipe are run by
tests/mesh/test_same_on_every_mesh.py. Each schedule meets each stash mode where they differ, and each mesh (pp=2, 4, 8
with ep=2, dp=2 as devices allow) meets several schedules; `COVER` says which. The other products are the same branches
over another table, and tables are proved without a device in tests/parallel/test_schedules.py.
"""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.errors import UserError
from moejax.parallel.layout import to_logical
from moejax.parallel.schedule_csv import to_csv
from moejax.parallel.schedule_makers import make_schedule
from tests.small import small_batch, small_config, small_program

TOLERANCE = 2e-5  # relative L2, per tensor
NINE_LAYERS = ("model.n_layers=9", "model.n_dense_layers=2")

# tools/check_pipeline.py runs the whole product. Left out here: gpipe/residuals and 1f1b_lockstep/inputs (their ops are
# those of 1f1b with the same stash, in another order), interleaved/inputs at pp=8 (it is compiled for 512 GPUs in
# test_absent_gpu.py).
COVER = [
    ("dp=2,pp=2", "interleaved_1f1b", "residuals", ("parallel.pipeline.ends=sharded", "model.tie_embeddings=true")),
    ("dp=2,ep=2,pp=4", "gpipe", "named", ()),
    ("dp=2,ep=2,pp=2", "zero_bubble_v", "inputs", ()),
    ("dp=2,ep=2,pp=2", "interleaved_1f1b", "inputs", ()),
    ("dp=2,ep=2,pp=2", "zero_bubble", "named", ("parallel.regions.dispatch=keep",)),
    ("dp=2,ep=2,pp=4", "zero_bubble_v", "residuals", ()),
    ("ep=2,pp=8", "1f1b_lockstep", "residuals", ()),
    ("dp=2,pp=2", "zero_bubble", "residuals", ("parallel.pipeline.mode=masked",)),
]


class Computed:
    """Gradients and losses of one step, on the host, in model order."""

    def __init__(self, mesh: str, overrides: tuple[str, ...], rows: int | None = None, evaluate: bool = False):
        program = small_program(mesh, overrides)
        batch = {name: x[:rows] for name, x in small_batch(program.config).items()}
        state, placed = program.init(), program.place_batch(batch)
        step = jax.jit(program.gradients)
        gradients, totals, tokens = step(state.params, placed, jax.random.key(7))
        self.gradients = jax.device_get(program._to_logical(gradients))
        self.tokens = float(tokens)
        self.losses = [float(totals.cross_entropy), float(totals.z), float(totals.auxiliary)]
        self.counts = None
        if totals.statistics is not None:
            statistics = to_logical(totals.statistics, program.layout.stacks["moe_blocks"])
            self.counts = jax.device_get(statistics.counts)
        if evaluate:
            evaluated, _ = jax.jit(program._evaluate)(state.params, placed)
            self.evaluated = float(evaluated)


@functools.cache
def on_one_device(overrides: tuple[str, ...], rows: int | None = None) -> Computed:
    return Computed("dp=1", overrides, rows)


def check_same(ours: Computed, theirs: Computed, tolerance: float = TOLERANCE) -> None:
    assert ours.tokens == theirs.tokens
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=tolerance)
    np.testing.assert_array_equal(ours.counts, theirs.counts)

    def close(path, one, other):
        error = np.linalg.norm(one - other) / np.linalg.norm(other)
        assert error <= tolerance, f"{jax.tree_util.keystr(path)}: relative error {error:.1e}"

    jax.tree_util.tree_map_with_path(close, ours.gradients, theirs.gradients)


def on_mesh(schedule: str, stash: str, more: tuple[str, ...]) -> tuple[str, ...]:
    return (f"parallel.pipeline.schedule={schedule}", f"parallel.pipeline.stash={stash}", *more)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "schedule", "stash", "more"), COVER)
def test_loss_and_gradients_are_those_of_one_device(mesh, schedule, stash, more):
    model = (*NINE_LAYERS, *(o for o in more if o.startswith("model.")))
    sharded = "parallel.pipeline.ends=sharded" in more
    ours = Computed(mesh, (*model, *on_mesh(schedule, stash, more)), evaluate=sharded)
    check_same(ours, on_one_device(model))
    if sharded:
        np.testing.assert_allclose(ours.evaluated, ours.losses[0], rtol=TOLERANCE)


@pytest.mark.slow
@settings(max_examples=2)
@given(
    st.sampled_from(["gpipe", "1f1b_lockstep", "interleaved_1f1b", "zero_bubble"]),
    st.sampled_from(["inputs", "residuals"]),
    st.sampled_from([2, 4]),
    st.sampled_from([2, 4, 8]),
    st.integers(0, 3),
    st.data(),
)
def test_drawn_sizes(schedule, stash, stages, microbatches, n_dense, data):
    chunks = {"interleaved_1f1b": 3 if stages == 2 else 2}.get(schedule, 1)
    n_layers = data.draw(st.integers(max(stages * chunks, n_dense + 1), stages * chunks + 5))
    model = (
        f"model.n_layers={n_layers}",
        f"model.n_dense_layers={n_dense}",
        f"parallel.pipeline.microbatches={microbatches}",
    )
    more = (f"parallel.pipeline.chunks={chunks}",)
    check_same(Computed(f"pp={stages}", (*model, *on_mesh(schedule, stash, more))), Computed("dp=1", model))


@pytest.mark.slow
def test_a_table_of_ones_own_runs_and_a_partial_last_microbatch_is_counted_nowhere(tmp_path):
    to_csv(make_schedule("1f1b_lockstep", 2, 4), tmp_path / "mine.csv")
    # 30 rows of 32: four microbatches of eight are two rows short
    overrides = (*NINE_LAYERS, "model.moe.router.lb_granularity=instance")
    table = (f"parallel.pipeline.table={tmp_path / 'mine.csv'}",)
    ours = Computed("dp=2,pp=2", (*overrides, *table), rows=30)
    check_same(ours, on_one_device((*overrides, "parallel.pipeline.microbatches=1"), 30))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["block", "named"])
def test_routing_is_not_drawn_again_in_recompute(recompute):
    """With random assignment, a draw in the backward that differs from the forward's would send gradients elsewhere."""
    model = ("model.n_layers=3", "model.moe.router.assignment=random")
    keeping = on_one_device(model)
    regions = ("parallel.regions.hidden=keep", "parallel.regions.dispatch=keep") if recompute == "named" else ()
    again = Computed("dp=1", (*model, f"parallel.recompute={recompute}", *regions))
    check_same(again, keeping, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "stash"), [("1f1b", "residuals"), ("gpipe", "inputs")])
def test_only_gpipe_needs_more_memory_for_more_microbatches(schedule, stash):
    """docs/pipeline.md has the table of all schedules, at pp=4."""
    program = small_program("pp=2", ("model.n_layers=2", "model.n_dense_layers=0", *on_mesh(schedule, stash, ())))
    few, many = (program.lower(m).compile().memory_analysis().temp_size_in_bytes for m in (16, 64))
    assert (many > 1.1 * few) if schedule == "gpipe" else (many < 1.05 * few)


def test_a_batch_of_another_size_changes_the_number_of_microbatches():
    program = small_program()
    batch = small_batch(program.config)
    assert program.place_batch(batch).tokens.shape == (4, 8, 16)
    twice = {name: np.concatenate([x, x]) for name, x in batch.items()}
    assert program.place_batch(twice).tokens.shape == (8, 8, 16)
    partial = program.place_batch({name: x[:19] for name, x in batch.items()})
    assert partial.tokens.shape == (3, 8, 16)
    assert int((np.asarray(partial.segment_ids) >= 0).sum()) == int((batch["segment_ids"][:19] >= 0).sum())
    assert int((np.asarray(partial.labels) != -100).sum()) == int((batch["labels"][:19] != -100).sum())


@pytest.mark.slow
def test_steps_on_batches_of_other_sizes_are_those_of_one_device():
    """Whole and partial batches one after the other, the state going on: microbatches of 8 on a pipeline, and
    one of 64 on one device, mostly padding when the batch is small."""
    model = ("model.n_layers=3", "model.moe.router.lb_granularity=instance", "train.batch_tokens=1024")
    pipelined = small_program("dp=2,pp=2", (*model, "parallel.pipeline.microbatches=8"))
    alone = small_program("dp=1", (*model, "parallel.pipeline.microbatches=1"))
    states = [program.init() for program in (pipelined, alone)]
    batch = small_batch(pipelined.config)
    for rows, parts in ((64, 8), (19, 3), (64, 8)):
        losses, tokens = [], []
        for i, program in enumerate((pipelined, alone)):
            placed = program.place_batch({name: x[:rows] for name, x in batch.items()})
            assert placed.tokens.shape[:2] == ((parts, 8), (1, 64))[i]
            states[i], metrics = program.step(states[i], placed)
            losses.append([float(metrics.loss), float(metrics.auxiliary_loss), float(metrics.gradient_norm)])
            tokens.append(float(metrics.tokens))
        assert tokens[0] == tokens[1] == float((batch["labels"][:rows] != -100).sum())
        np.testing.assert_allclose(*losses, rtol=TOLERANCE)


def test_checkpoints_are_in_model_order_whatever_the_chunks():
    program = small_program("dp=2,pp=2", ("model.n_layers=7", "parallel.pipeline.schedule=interleaved_1f1b"))
    assert not program.layout.stacks["moe_blocks"].identity
    state = program.init()
    portable = jax.device_get(program.portable(state))
    plain = small_program("dp=1", ("model.n_layers=7",))
    jax.tree.map(np.testing.assert_array_equal, portable.master, jax.device_get(plain.init().master))
    back = program.from_portable(portable)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(back), jax.device_get(state))


@pytest.mark.parametrize(
    ("mesh", "overrides", "words"),
    [
        ("pp=4", ["parallel.pipeline.schedule=interleaved_1f1b"], "8 pipeline stages"),
        ("pp=2", ["parallel.pipeline.ends=sharded", "model.vocab_size=287"], "vocab_size=287"),
        ("pp=2", ["parallel.pipeline.chunks=2"], "1f1b has one chunk"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(mesh, overrides, words):
    with pytest.raises(UserError, match=words):
        small_program(mesh, overrides)


def test_a_table_for_other_sizes_is_refused(tmp_path):
    to_csv(make_schedule("1f1b", 2, 4), tmp_path / "mine.csv")
    with pytest.raises(UserError, match="for 2 stages, but there are 4"):
        small_program("pp=4", [f"parallel.pipeline.table={tmp_path / 'mine.csv'}"])


@pytest.mark.parametrize("overrides", [("parallel.pipeline.stash=residuals", "parallel.recompute=block")])
def test_a_stash_of_residuals_leaves_nothing_to_recompute(overrides):
    with pytest.raises(UserError, match="stash=named"):
        small_config(*overrides)
