"""The first line of a plan: whether it fits, what is largest, and what to change.

Memory, Setup --judge--> Verdict
"""

from moejax.config import PipelineEnds, Recompute, Stash
from moejax.planning.report import CATEGORIES, Memory, Verdict
from moejax.planning.setup import Setup

GB = 1e9


def judge(setup: Setup, memory: Memory) -> Verdict:
    spare = setup.gpu.usable_bytes - memory.peak_bytes
    largest = max(memory.categories, key=lambda name: memory.categories[name])
    fits = spare >= 0
    card = f"{setup.gpu.memory_bytes / GB:,.0f} GB of a {setup.gpu.vendor_name}"
    usable = f"{setup.gpu.usable_bytes / GB:,.1f} GB usable"
    peak = f"{memory.peak_bytes / GB:,.1f} GB"
    size = f"{CATEGORIES[largest]}, {memory.categories[largest] / GB:,.1f} GB"
    if fits:
        sentence = f"Fits: the peak is {peak} of {card} ({usable}); {spare / GB:,.1f} GB are left. Largest: {size}."
    else:
        sentence = (
            f"Does not fit: the peak is {peak} of {card} ({usable}); {-spare / GB:,.1f} GB too much. Largest: {size}."
        )
    said = advice(setup, memory, fits)
    if said and not fits:
        sentence += f" First to change: {said[0]}."
    return Verdict(fits, sentence, spare, largest, said)


def advice(setup: Setup, memory: Memory, fits: bool) -> list[str]:
    """What would lower the peak, most bytes first; what would raise the speed if it fits already."""
    parts, shape, pipe = memory.categories, setup.shape, setup.config.parallel.pipeline
    moving = parts["saved"] + parts["temporaries"] + parts["dispatch"]
    gains: list[tuple[float, str]] = []
    if not fits:
        weights = parts["weights"] + parts["gradients"]
        if shape.ep < setup.config.model.moe.num_experts and setup.config.model.n_moe_layers:
            gains.append((weights / 2, f"double ep to {2 * shape.ep}: half the experts on each device"))
        if 2 * setup.schedule.virtual_stages <= setup.config.model.n_layers:
            gains.append((weights / 2, f"double pp to {2 * shape.pp}: half the layers on each device"))
        if shape.dp == 1:
            gains.append(((parts["master"] + parts["moments"]) / 2, "dp=2: master and moments are cut over dp"))
        if setup.recompute == Recompute.none:
            gains.append((parts["saved"] + parts["stash"] / 2, "parallel.recompute=block"))
        if setup.sequences > 1:
            more = pipe.microbatches * 2
            gains.append((moving / 2, f"parallel.pipeline.microbatches={more}: half the tokens at a time"))
        if pipe.ends == PipelineEnds.stages and shape.pp > 1:
            table = setup.config.model.vocab_size * setup.config.model.d_model
            gains.append((table * 8, "parallel.pipeline.ends=sharded: embedding and head cut over the stages"))
        return [sentence for _, sentence in sorted(gains, reverse=True)]
    said = []
    if setup.recompute == Recompute.block and setup.keep_inputs and shape.pp > 1:
        said.append(
            "parallel.pipeline.stash=named with parallel.recompute=named runs each block's forward twice a step; "
            "stash=inputs with recompute=block runs it three times."
        )
    if pipe.stash == Stash.inputs and setup.recompute == Recompute.block and shape.pp == 1:
        said.append("parallel.recompute=named keeps chosen regions and saves part of the second forward.")
    if setup.schedule.name == "1f1b" and shape.pp > 1:
        said.append(
            "parallel.pipeline.schedule=1f1b_lockstep or interleaved_1f1b: in 1f1b neighbours run a forward and a "
            "backward in the same tick, and wait for the longer one."
        )
    return said
