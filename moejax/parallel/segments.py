"""The backward of a whole stage from its input alone (recompute=full): about sqrt(n) activations for its n blocks.

    x --segments of about sqrt(n) blocks; the input of each is kept--> y --head--> dy
    for each segment, the last first:  its input --its blocks; the input of each is kept--> its backward, block by block

Block inputs kept at a time: n / s + s with segments of s blocks, least at s = sqrt(n), where recompute=block keeps n of
them. The price is one more forward: each block runs forward three times in a backward, twice with recompute=block.
Two levels of Chen et al. 2016 (arXiv:1604.06174).
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from moejax.context import Context
from moejax.models.transformer import Params
from moejax.parallel.block_program import BlockProgram
from moejax.parallel.layout import Segment, StageKind, segments
from moejax.parallel.stage import Place, StageProgram, Totals


def place_of(part: Segment, stage: Place, index: Array) -> Place:
    """Of run number `index`."""
    dense, moe = part.dense + index * part.kind.n_dense, part.moe + index * part.kind.n_moe
    return Place(stage.dense_slot + dense, stage.moe_slot + moe, stage.layer + dense + moe)


def backward(
    program: StageProgram,
    kind: StageKind,
    blocks: dict[str, BlockProgram],
    params: Params,
    x: Array,
    context: Context,
    place: Place,
    totals: Totals,
    cotangent: Callable[[Array, Totals], tuple[Array, Params, Totals]],
) -> tuple[Array, Params, Totals]:
    """(cotangent of the stage's input, gradients and totals with this microbatch's added).

    cotangent(y, totals): that of the stage's output, and gradients and totals with the head's added, if it is here.
    """
    parts, starts = segments(kind), []
    for part in parts:

        def forward(x: Array, i: Array, part: Segment = part) -> tuple[Array, Array]:
            return program.forward(part.kind, params, x, context, place_of(part, place, i)), x

        x, inputs = lax.scan(forward, x, jnp.arange(part.count))
        starts.append(inputs)
    dy, gradients, totals = cotangent(x, totals)
    for part, inputs in zip(reversed(parts), reversed(starts), strict=True):

        def pull(carry: Any, run: Any, part: Segment = part) -> tuple[Any, None]:
            dy, gradients, totals = carry
            i, x = run
            here = place_of(part, place, i)
            stash = program.empty_stash(blocks, 1, kinds=(part.kind,))
            _, stash, totals = program.keep(part.kind, blocks, params, x, context, here, stash, 0, totals)
            dy, gradients = program.pull(part.kind, blocks, params, context, here, stash, 0, dy, gradients)
            return (dy, gradients, totals), None

        carry = (dy, gradients, totals)
        (dy, gradients, totals), _ = lax.scan(pull, carry, (jnp.arange(part.count), inputs), reverse=True)
    return dy, gradients, totals
