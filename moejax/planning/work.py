"""How often a stage does what: runs of a block's forward and backward by each op of the schedule.

    stash, recompute, op --runs--> Runs(forward, again, input, weight)

A backward of a stage whose inputs alone were stashed begins with the stage's forward; blocks that are recomputed run
their forward once more inside their own backward. Exchanges over ep follow the same counts.
"""

from typing import NamedTuple

from moejax.config import Recompute
from moejax.parallel.schedules import Op
from moejax.planning.setup import Setup


class Runs(NamedTuple):
    """forward: of every block of the chunk, first time or because the stage runs again. again: forwards inside the
    blocks' own backwards, without the regions that are kept. input, weight: the two halves of a backward."""

    forward: int = 0
    again: int = 0
    input: int = 0
    weight: int = 0


def runs(setup: Setup, op: Op, last: bool) -> Runs:
    """What one op does with the blocks of its chunk. last: the chunk ends the model and its stage has the head."""
    rerun = int(setup.keep_inputs)
    again = int(setup.recompute != Recompute.none)
    match op:
        case Op.FORWARD:
            # the last stage goes straight to its backward, which begins with the forward
            return Runs() if last and setup.keep_inputs else Runs(forward=1)
        case Op.BACKWARD:
            return Runs(rerun, again, 1, 1)
        case Op.BACKWARD_INPUT:
            return Runs(rerun, again, 1, 0)
        case Op.BACKWARD_WEIGHT if setup.keep_inputs:
            return Runs(rerun, again, 1, 1)
        case Op.BACKWARD_WEIGHT:
            return Runs(weight=1)
    return Runs()
