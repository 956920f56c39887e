"""Bytes on the fullest device, from formulas: what lives for the whole step, what waits, what lives for a moment.

    Setup --categories--> weights, master, moments, gradients, stash, saved, dispatch, temporaries --> Memory

All devices hold arrays of one shape, so the fullest stage decides for all. Weights, master, moments, gradients and the
rings are counted exactly. What a block keeps for its backward follows `parallel/block_program.py`: the results of
products, exchanges and loops that depend on its input. Temporaries are those of the block whose backward holds most,
fitted to what the compiler allocates (docs/planner.md has the comparison).
"""

from moejax.config import Overflow, Recompute
from moejax.parallel.layout import StageKind, segments
from moejax.parallel.schedules import Op
from moejax.planning.report import CATEGORIES, Memory
from moejax.planning.setup import MX_BYTES, Setup
from moejax.planning.weights import layer_weights, local_weights

FP32 = 4
LOGIT_BYTES = 128 * 2**20  # as in models/head.py, whose import would take longer than the plan


def quick_memory(setup: Setup) -> Memory:
    parts = resident(setup) | {
        "stash": stash_bytes(setup),
        "saved": saved_bytes(setup),
        "dispatch": dispatch_bytes(setup),
        "temporaries": temporary_bytes(setup),
    }
    total = sum(parts.values())
    return Memory(total, total, {name: int(parts[name]) for name in CATEGORIES})


def resident(setup: Setup) -> dict[str, int]:
    """What lives from step to step, and the accumulators that live through the pipeline; exact but for weights whose
    master cannot be cut evenly."""
    local = local_weights(setup)
    return {
        "weights": int(local.total * setup.param_bytes + _mxfp8_copies(setup)),
        "master": int(local.sharded * FP32),
        "moments": int(2 * local.sharded * FP32),
        "gradients": local.total * FP32,
    }


def _mxfp8_copies(setup: Setup) -> float:
    """Two quantised copies of the routed experts, in place of those in the compute dtype unless they are kept."""
    if "experts" not in setup.mxfp8:
        return 0.0
    return local_weights(setup).experts.weights * (2 * MX_BYTES - (0 if setup.keeps_bf16 else setup.param_bytes))


def activation(setup: Setup) -> int:
    """[B, S, D] of a microbatch on one device."""
    return setup.tokens * setup.config.model.d_model * setup.compute_bytes


def stash_bytes(setup: Setup) -> int:
    """The rings of `pipeline_ops.empty_rings`."""
    wiring = setup.wiring
    rings = (wiring.activation_slots + wiring.cotangent_slots) * activation(setup)
    if not setup.keep_inputs:
        rings += wiring.stash_slots * _chunk_keeps(setup)
    return rings


def saved_bytes(setup: Setup) -> int:
    """With inputs in the stash a backward first fills a stash of its own, of one microbatch."""
    return _chunk_keeps(setup) if setup.keep_inputs else 0


def _chunk_keeps(setup: Setup) -> int:
    dense, moe = setup.fullest_chunk
    if setup.recompute == Recompute.full:  # the inputs of all segments, and the blocks of one
        parts = segments(StageKind(dense, moe, False, False))
        inputs = sum(part.count for part in parts) * setup.tokens * setup.config.model.d_model * setup.compute_bytes
        return inputs + max((_blocks_keep(setup, part.kind.n_dense, part.kind.n_moe) for part in parts), default=0)
    return _blocks_keep(setup, dense, moe)


def _blocks_keep(setup: Setup, dense: int, moe: int) -> int:
    return dense * block_keeps(setup, False) + moe * block_keeps(setup, True)


def block_keeps(setup: Setup, moe: bool) -> int:
    """What one block keeps of one microbatch for its backward (`BlockProgram.kept`)."""
    tokens, item, model = setup.tokens, setup.compute_bytes, setup.config.model
    kept = tokens * model.d_model * item
    regions = setup.kept_regions
    if moe:
        kept += tokens * (model.moe.top_k + 1) * 4  # the experts chosen, and the best one not chosen
    if setup.recompute == Recompute.none:
        return kept + _all_products(setup, moe)
    parts = {
        "attention": _attention_output(setup),
        "dispatch": setup.rows * model.d_model * item if moe else 0,
        "hidden": _hidden(setup, moe),
    }
    return kept + sum(parts[name] for name in regions)


def _attention_output(setup: Setup) -> int:
    a = setup.config.model.attention
    return setup.tokens * a.n_heads * (a.head_dim * setup.compute_bytes + FP32)  # and a log-sum-exp for each


def _hidden(setup: Setup, moe: bool) -> int:
    """First products of the MLPs and experts of a block."""
    model, item = setup.config.model, setup.compute_bytes
    if not moe:
        return setup.tokens * 2 * model.dense_width * item
    shared = model.moe.shared_experts * model.moe.shared_hidden
    return 2 * item * (setup.rows * model.moe.hidden + setup.tokens * shared)


def _all_products(setup: Setup, moe: bool) -> int:
    """Everything dear that a block computes: with nothing recomputed all of it is kept."""
    tokens, item, model = setup.tokens, setup.compute_bytes, setup.config.model
    a, d = model.attention, model.d_model
    heads = (a.n_heads + 2 * a.n_kv_heads) * a.head_dim
    kept = tokens * (heads + 2 * d) * item + _attention_output(setup) + _hidden(setup, moe)
    if not moe:
        return kept
    routes = tokens * model.moe.top_k
    exchanged = setup.shape.ep > 1
    kept += tokens * model.moe.num_experts * FP32 + routes * FP32
    kept += (setup.rows * exchanged + routes) * d * item  # rows that arrived, and what came back
    return kept + 2 * tokens * d * FP32 - (0 if model.moe.shared_hidden else tokens * d * item)


def dispatch_bytes(setup: Setup) -> int:
    """Rows on their way in the block whose backward runs: arrivals and their gradient, returns and theirs."""
    model = setup.config.model
    if not model.n_moe_layers:
        return 0
    routes = setup.tokens * model.moe.top_k
    return 2 * (setup.rows + routes) * model.d_model * setup.compute_bytes


def temporary_bytes(setup: Setup) -> int:
    """Of the backward of the fullest block, or of the head."""
    moe = setup.slots("moe_blocks") > 0
    weights = sum(layer_weights(setup, moe))
    again = _all_products(setup, moe) if setup.recompute != Recompute.none else 0
    # kernels read a layer's weights from a copy of their rows of the stack, and hand out its gradients before they are
    # added up; further rounds of an exchange have gradients of their own
    rounds = moe and setup.shape.ep > 1 and setup.config.parallel.experts.overflow == Overflow.exact
    copies = 3 if rounds else 2
    # and cotangents of the first product and of what SwiGLU makes of it
    block = again + _hidden(setup, moe) * 2 + copies * weights * setup.compute_bytes
    model = setup.config.model
    head = 3 * LOGIT_BYTES + model.d_model * model.vocab_size * (FP32 + setup.compute_bytes)
    return max(block, head) + (Op.BACKWARD_WEIGHT in setup.schedule.op) * block
