"""The best way to spread a model over some GPUs: many layouts by formulas, the best few compiled, losers with reasons.

    config, GPU, count --candidates--> meshes x schedules x what is kept x microbatches
                       --memory, roofline--> ranked --compile the best few--> a winner that fits

A layout that does not fit is told by how much; one that fits and is slower by the term in which it loses most to the
winner.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from moejax.config import Config, PipelineConfig, Recompute, Region, RegionsConfig, ScheduleName, Stash
from moejax.errors import UserError
from moejax.hardware.gpus import Gpu
from moejax.mesh import MeshShape
from moejax.mesh import problem as mesh_problem
from moejax.planning import quick, report
from moejax.planning.memory import quick_memory, resident
from moejax.planning.roofline import estimate
from moejax.planning.setup import Setup, make_setup

GB = 1e9
SEQUENCES = (1, 2, 4, 8)  # of a microbatch on one device
MOST_STAGES = 32
MOST_GPUS = 2**16
NOTHING = RegionsConfig(Region.recompute, Region.recompute, Region.recompute)
ATTENTION = RegionsConfig(Region.keep, Region.recompute, Region.recompute)


@dataclass(frozen=True)
class Keeping:
    """What stays between forward and backward, least memory first."""

    name: str
    stash: Stash
    recompute: Recompute
    regions: RegionsConfig = ATTENTION


KEEPINGS = (
    Keeping("stage inputs", Stash.inputs, Recompute.block),
    Keeping("block inputs", Stash.named, Recompute.named, NOTHING),
    Keeping("block inputs and attention", Stash.named, Recompute.named),
    Keeping("stage inputs, one stage's residuals", Stash.inputs, Recompute.none),
    Keeping("residuals", Stash.residuals, Recompute.none),
)
ALONE = (  # without stages there is nothing between a forward and its backward
    Keeping("block inputs", Stash.inputs, Recompute.block),
    Keeping("block inputs and attention", Stash.inputs, Recompute.named),
    Keeping("residuals", Stash.inputs, Recompute.none),
)


@dataclass
class Candidate:
    """One layout. time is None if it does not fit. compiled: its plan from the compiler, if that was made."""

    config: Config
    shape: MeshShape
    gpu: Gpu
    config_file: str
    keeping: str
    transport: str
    sequences: int
    memory: report.Memory
    time: report.Time | None
    reason: str = ""
    compiled: report.Plan | None = None

    @functools.cached_property
    def setup(self) -> Setup:
        return make_setup(self.config, self.shape, self.gpu, self.config_file)

    @property
    def pipeline(self) -> PipelineConfig:
        return self.config.parallel.pipeline

    @property
    def missing(self) -> int:
        """Bytes too many, 0 if it fits; by the compiler where it was asked."""
        peak = self.memory.peak_bytes if self.compiled is None else self.compiled.memory.peak_bytes
        return max(0, peak - self.gpu.usable_bytes)


def meshes(config: Config, devices: int) -> Iterator[MeshShape]:
    model = config.model
    for pp in (n for n in range(1, min(devices, model.n_layers, MOST_STAGES) + 1) if devices % n == 0):
        for ep in (n for n in range(1, devices // pp + 1) if devices // pp % n == 0):
            if not model.n_moe_layers and ep > 1 or model.moe.num_experts % ep:
                continue
            yield MeshShape(pp=pp, dp=devices // pp // ep, ep=ep)


def layouts(config: Config, shape: MeshShape) -> Iterator[tuple[Config, Keeping]]:
    """Configs of one mesh, with the batch as it is."""
    sequences = config.train.batch_tokens // config.data.sequence_length
    schedules = [("1f1b_lockstep", None), ("interleaved_1f1b", 2)] if shape.pp > 1 else [("1f1b", None)]
    for per_device in SEQUENCES:
        parts, left = divmod(sequences, shape.data_shards * per_device)
        if left or parts < 1:
            continue
        for name, chunks in schedules:
            if shape.pp * (chunks or 1) > config.model.n_layers or (chunks and parts % shape.pp):
                continue
            for keeping in KEEPINGS if shape.pp > 1 else ALONE:
                pipe = dataclasses.replace(
                    config.parallel.pipeline,
                    schedule=ScheduleName(name),
                    table=None,
                    chunks=chunks,
                    microbatches=parts,
                    stash=keeping.stash,
                )
                parallel = dataclasses.replace(
                    config.parallel,
                    mesh=str(shape),
                    pipeline=pipe,
                    recompute=keeping.recompute,
                    regions=keeping.regions,
                )
                yield dataclasses.replace(config, parallel=parallel), keeping


def candidates(
    config: Config, gpu: Gpu, devices: int, config_file: str, attained: dict[str, float] | None
) -> Iterator[Candidate]:
    for shape in meshes(config, devices):
        for layout, keeping in layouts(config, shape):
            if mesh_problem(layout, shape) is not None:
                continue
            try:
                small = make_setup(_with_microbatches(layout, _few(layout, shape)[-1]), shape, gpu, config_file)
            except UserError:  # no transport can carry it
                continue
            memory = quick_memory(small)
            fits = memory.peak_bytes <= gpu.usable_bytes
            time = _project(layout, shape, gpu, attained) if fits else None
            name = small.choice.transport.name
            yield Candidate(layout, shape, gpu, config_file, keeping.name, name, small.sequences, memory, time)


def _few(config: Config, shape: MeshShape) -> tuple[int, ...]:
    """Numbers of microbatches to reckon with: the config's own, or two that are past the beginning of the pipeline."""
    whole = config.parallel.pipeline.microbatches
    return (4 * shape.pp, 6 * shape.pp) if whole > 6 * shape.pp else (whole,)


def _with_microbatches(config: Config, microbatches: int) -> Config:
    """The same microbatches, another number of them in the batch."""
    pipe = config.parallel.pipeline
    batch = config.train.batch_tokens // pipe.microbatches * microbatches
    parallel = dataclasses.replace(config.parallel, pipeline=dataclasses.replace(pipe, microbatches=microbatches))
    return dataclasses.replace(config, parallel=parallel, train=dataclasses.replace(config.train, batch_tokens=batch))


def _project(config: Config, shape: MeshShape, gpu: Gpu, attained: dict[str, float] | None) -> report.Time:
    """The time of a step from those of fewer microbatches: past the beginning each one adds the same."""
    few = _few(config, shape)
    times = [estimate(make_setup(_with_microbatches(config, n), shape, gpu), attained) for n in few]
    if len(few) == 1:
        return times[0]
    further = (config.parallel.pipeline.microbatches - few[1]) / (few[1] - few[0])
    before = {(term.name, term.resource): term.seconds for term in times[0].terms}

    def on(term: report.TimeTerm) -> report.TimeTerm:
        more = term.seconds - before.get((term.name, term.resource), 0.0)
        return dataclasses.replace(term, seconds=term.seconds + further * more)

    terms = [on(term) for term in times[1].terms]
    step = sum(term.seconds for term in terms)
    rate = config.train.batch_tokens / step
    faster = rate / times[1].tokens_per_second
    idle = [time.bubble * time.step_seconds for time in times]
    return dataclasses.replace(
        times[1],
        step_seconds=step,
        tokens_per_second=rate,
        tokens_per_second_per_gpu=rate / shape.devices,
        model_tflops_per_gpu=times[1].model_tflops_per_gpu * faster,
        mfu=times[1].mfu * faster,
        bubble=(idle[1] + further * (idle[1] - idle[0])) / step,
        terms=terms,
    )


def search(
    config: Config, gpu: Gpu, devices: int, config_file: str = "", attained: dict[str, float] | None = None
) -> list[Candidate]:
    """The best layout of every mesh, best first, with the reason each loser lost. Raises UserError if none fits."""
    best: dict[MeshShape, Candidate] = {}
    tried = 0
    for one in candidates(config, gpu, devices, config_file, attained):
        tried += 1
        there = best.get(one.shape)
        if there is None or _rank(one) < _rank(there):
            best[one.shape] = one
    ranked = sorted(best.values(), key=_rank)
    if not ranked:
        raise UserError(
            f"No mesh of {devices} GPUs can share out {config.model.moe.num_experts} experts and batches of "
            f"train.batch_tokens={config.train.batch_tokens} in sequences of {config.data.sequence_length}; change one "
            "of them, or --gpus."
        )
    if ranked[0].time is None:
        closest = ranked[0]
        raise UserError(
            f"The model does not fit on {devices} {gpu.name} in any of {tried} layouts tried: the closest, "
            f"{closest.shape} with {closest.keeping} kept, needs {closest.memory.peak_bytes / GB:,.1f} GB of "
            f"{gpu.usable_bytes / GB:,.1f} usable, {closest.missing / GB:,.1f} GB too much on each GPU; "
            + _smallest_sentence(smallest_gpus(config, gpu, devices))
        )
    for one in ranked[1:]:
        one.reason = _why(one, ranked[0])
    return ranked


def _rank(one: Candidate) -> tuple[bool, float]:
    return one.time is None, one.time.step_seconds if one.time else float(one.missing)


def _why(one: Candidate, winner: Candidate) -> str:
    if one.time is None or winner.time is None:
        return f"does not fit: {one.missing / GB:,.1f} GB too much, largest {_largest(one.memory)}"
    mine, best = (_by_name(time) for time in (one.time, winner.time))
    more = {name: seconds - best.get(name, 0.0) for name, seconds in mine.items()}
    worst = max(more, key=lambda name: more[name])
    slower = one.time.step_seconds / winner.time.step_seconds - 1
    return f"{slower:.1%} slower: {worst} takes {more[worst]:,.2f} s more of {one.time.step_seconds:,.2f} s"


def _by_name(time: report.Time) -> dict[str, float]:
    found: dict[str, float] = {}
    for term in time.terms:
        found[term.name] = found.get(term.name, 0.0) + term.seconds
    return found


def _largest(memory: report.Memory) -> str:
    return max(memory.categories, key=lambda name: memory.categories[name])


def settle(
    ranked: list[Candidate],
    gpu: str,
    compile_plan: Callable[..., report.Plan] | None,
    most: int,
    attained: dict[str, float] | None = None,
    tokens_per_second: tuple[float, ...] = (),
) -> report.Plan:
    """The plan of the best layout; compiled, if there is something to compile with: of the `most` best by formulas the
    fastest that the compiler says fits, which then comes first. Raises UserError if none of them does."""
    if compile_plan is None:
        return quick.quick_plan(ranked[0].setup, attained, tokens_per_second)
    for one in ranked[:most]:
        if one.time is None:
            break
        one.compiled = compile_plan(one.setup, gpu, attained, tokens_per_second)
        if one.missing:
            one.reason = f"compiled, does not fit: {one.missing / GB:,.1f} GB too much"
    fitting = [one for one in ranked if one.compiled is not None and not one.missing]
    if not fitting:
        raise UserError(
            f"The best {most} layouts fit by formulas and not as compiled, the first by {ranked[0].missing / GB:,.1f} "
            "GB; compile more of them with --compile N."
        )
    winner = fitting[0]
    winner.reason = ""
    ranked.remove(winner)
    ranked.insert(0, winner)
    assert winner.compiled is not None
    return winner.compiled


def rows(ranked: list[Candidate]) -> list[dict[str, Any]]:
    """For `--json`: the layouts in order."""
    return [
        {
            "mesh": str(one.shape),
            "schedule": one.pipeline.schedule.value,
            "chunks": one.pipeline.chunks or 1,
            "microbatches": one.pipeline.microbatches,
            "sequences": one.sequences,
            "kept": one.keeping,
            "transport": one.transport,
            "peak_bytes": one.memory.peak_bytes,
            "compiled_peak_bytes": None if one.compiled is None else one.compiled.memory.peak_bytes,
            "step_seconds": None if one.time is None else one.time.step_seconds,
            "tokens_per_second_per_gpu": None if one.time is None else one.time.tokens_per_second_per_gpu,
            "bubble": None if one.time is None else one.time.bubble,
            "reason": one.reason,
            "overrides": overrides(one),
        }
        for one in ranked
    ]


def overrides(one: Candidate) -> str:
    """What to add to the command line to train so."""
    parallel, pipe = one.config.parallel, one.pipeline
    parts = [
        f"--mesh {one.shape}",
        f"parallel.pipeline.schedule={pipe.schedule}",
        f"parallel.pipeline.microbatches={pipe.microbatches}",
        f"parallel.pipeline.stash={pipe.stash}",
        f"parallel.recompute={parallel.recompute}",
    ]
    if parallel.recompute == Recompute.named:
        parts += [
            f"parallel.regions.{f.name}={getattr(parallel.regions, f.name)}" for f in dataclasses.fields(RegionsConfig)
        ]
    return " ".join(parts)


def table(ranked: list[Candidate], most: int = 12) -> Table:
    """The best layouts, and of those that do not fit the ones that lack least."""
    result = Table(title="Layouts, best first (one for each mesh)", title_justify="left", caption_justify="left")
    for name in ("mesh", "schedule", "sequences x microbatches", "kept", "GB", "s a step", "tokens/s/GPU", "why not"):
        result.add_column(name, justify="right" if name in ("GB", "s a step", "tokens/s/GPU") else "left")
    for one in ranked[:most]:
        peak = f"{one.memory.peak_bytes / GB:,.1f}"
        if one.compiled is not None:
            peak += f" (compiled {one.compiled.memory.peak_bytes / GB:,.1f})"
        result.add_row(
            str(one.shape),
            one.pipeline.schedule.value if one.shape.pp > 1 else "",
            f"{one.sequences} x {one.pipeline.microbatches}",
            one.keeping,
            peak,
            f"{one.time.step_seconds:,.2f}" if one.time else "",
            f"{one.time.tokens_per_second_per_gpu:,.0f}" if one.time else "",
            one.reason or "taken",
        )
    result.caption = f"To train so: {overrides(ranked[0])}"
    return result


# --- how many would do ---------------------------------------------------------------------------------------------


def smallest_gpus(config: Config, gpu: Gpu, above: int = 0) -> int | None:
    """Fewest GPUs, a power of two of them, on which some layout fits by formulas; None if more than MOST_GPUS."""
    count = 1
    while count <= MOST_GPUS:
        if count > above and any(_holds(config, gpu, shape) for shape in meshes(config, count)):
            return count
        count *= 2
    return None


def _holds(config: Config, gpu: Gpu, shape: MeshShape) -> bool:
    """Whether the layout with the least memory fits: one sequence at a time, blocks recomputed, few microbatches, since
    memory does not grow with their number."""
    length = config.data.sequence_length
    pipe = dataclasses.replace(
        config.parallel.pipeline,
        schedule=ScheduleName("1f1b"),
        table=None,
        chunks=None,
        microbatches=2 * shape.pp,
        stash=Stash.inputs,
    )
    parallel = dataclasses.replace(config.parallel, mesh=str(shape), pipeline=pipe, recompute=Recompute.block)
    train = dataclasses.replace(config.train, batch_tokens=2 * shape.pp * shape.data_shards * length)
    small = dataclasses.replace(config, parallel=parallel, train=train)
    if mesh_problem(small, shape) is not None:
        return False
    try:
        setup = make_setup(small, shape, gpu)
    except UserError:
        return False
    return sum(resident(setup).values()) <= gpu.usable_bytes >= quick_memory(setup).peak_bytes


def _smallest_sentence(count: int | None) -> str:
    if count is None:
        return f"no number of these GPUs up to {MOST_GPUS:,} would do."
    return f"the smallest number of these GPUs that would do is {count}."


def with_smallest(setup: Setup, plan: report.Plan) -> report.Plan:
    """A plan that does not fit, with the number of GPUs that would do in its verdict."""
    count = smallest_gpus(setup.config, setup.gpu, above=0)
    others = "Another layout of as many GPUs" if count is not None and count <= setup.shape.devices else None
    sentence = (
        f"{others} would do: --search finds it."
        if others
        else _smallest_sentence(count)[:1].upper() + _smallest_sentence(count)[1:]
    )
    verdict = dataclasses.replace(plan.verdict, sentence=f"{plan.verdict.sentence} {sentence}", smallest_gpus=count)
    return dataclasses.replace(plan, verdict=verdict)
