"""Every schedule x stash x number of stages against one device: `python tools/check_pipeline.py --json FILE`.

    loss and gradients of one batch on dp=2,ep=2,pp=P  --compare with one device, fp32-->  worst relative error a case

The tests run a cover of this product (tests/mesh/test_pipeline.py), since most of its cost is compiling; this runs all
54 cases, and ends with exit code 1 if one is off by more than 2e-5. The error is the largest relative L2 error of a
weight's gradient, and that of the loss. A FILE that is there is gone on with.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from moejax.config import ScheduleName, Stash
from moejax.mesh import prepare_devices

TOLERANCE = 2e-5
MODEL = (
    "model.d_model=16",
    "model.attention.head_dim=8",
    "model.moe.num_experts=4",
    "model.moe.hidden=16",
    "model.moe.shared_hidden=16",
    "model.n_layers=18",  # 16 virtual stages and two more layers: some stages have two
    "model.n_dense_layers=2",
)
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def computed(mesh: str, *overrides: str) -> tuple[list[float], dict[str, np.ndarray]]:
    """(losses, gradients by name in model order)."""
    from tests.small import small_batch, small_program

    program = small_program(mesh, (*MODEL, "train.batch_tokens=1024", "parallel.pipeline.microbatches=8", *overrides))
    state, batch = program.init(), program.place_batch(small_batch(program.config))
    step = jax.jit(program.gradients, compiler_options=QUICK)
    gradients, totals, _ = step(state.params, batch, jax.random.key(7))
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(program._to_logical(gradients)))
    named = {jax.tree_util.keystr(path): np.asarray(x, np.float64) for path, x in leaves}
    return [float(totals.cross_entropy), float(totals.z), float(totals.auxiliary)], named


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--stages", default="2,4,8", help="numbers of stages (default: 2,4,8)")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="one line a case")
    given = parser.parse_args()
    prepare_devices(4 * max(map(int, given.stages.split(","))))
    rows = [json.loads(line) for line in given.json.read_text().splitlines()] if given.json.exists() else []
    done = {(row["schedule"], row["stash"], row["stages"]) for row in rows}
    theirs = computed("dp=1")
    for stages in map(int, given.stages.split(",")):
        for schedule, stash in ((s.value, k.value) for s in ScheduleName for k in Stash):
            if (schedule, stash, stages) in done:
                continue
            start = time.perf_counter()
            overrides = (f"parallel.pipeline.schedule={schedule}", f"parallel.pipeline.stash={stash}")
            losses, gradients = computed(f"dp=2,ep=2,pp={stages}", *overrides)
            errors = {k: np.linalg.norm(g - theirs[1][k]) / np.linalg.norm(theirs[1][k]) for k, g in gradients.items()}
            off = max(abs(a / b - 1) for a, b in zip(losses, theirs[0], strict=True))
            worst = max(errors, key=lambda name: errors[name])
            row = {"schedule": schedule, "stash": stash, "stages": stages, "loss_error": off}
            row |= {"gradient_error": float(errors[worst]), "worst": worst, "seconds": time.perf_counter() - start}
            rows.append(row)
            with given.json.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
            jax.clear_caches()
    worst = max(max(row["loss_error"], row["gradient_error"]) for row in rows)
    print(f"{len(rows)} cases, worst relative error {worst:.1e}.")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
