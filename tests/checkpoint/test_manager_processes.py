"""Checkpoints beyond one process: killed at any moment, and two that write and read one together."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from moejax.checkpoint.manager import Checkpoints
from tests.checkpoint.states import MESHES, assert_same

ROOT = Path(__file__).resolve().parents[2]


SAVING_LOOP = """
import os, sys, time, random, signal
import jax
import jax.numpy as jnp
from moejax.checkpoint.manager import Checkpoints

folder, lives = sys.argv[1], int(sys.argv[2])
rng = random.Random(3)

def live():  # a training run: take up the newest, go on from it
    checkpoints = Checkpoints(folder, keep=2)
    target = {name: jax.ShapeDtypeStruct((64, 64), "float32") for name in "abc"}
    step = checkpoints.latest() or 0
    if step:
        state, record = checkpoints.restore(target)
        if record != {"step": step} or any(float(x.min()) != step or float(x.max()) != step for x in state.values()):
            os._exit(3)
    while True:
        step += 1
        checkpoints.save(step, {name: jnp.full((64, 64), step, jnp.float32) for name in target}, {"step": step})

for _ in range(lives):  # imported once, no device touched yet: each child starts JAX for itself
    child = os.fork()
    if not child:
        live()
    time.sleep(0.8 + rng.random() * 0.7)
    os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code, sorted(os.listdir(folder)), flush=True)
"""


def start(program: str, *arguments: Any, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_kill_at_any_moment_leaves_the_newest_checkpoint_whole(tmp_path):
    lives = 5
    output, _ = start(SAVING_LOOP, tmp_path, lives).communicate(timeout=120)
    codes = [line.split()[0] for line in output.splitlines()]
    assert codes == ["-9"] * lives, output  # 3: a life found a state that is not what its step wrote
    checkpoints = Checkpoints(tmp_path)
    step = checkpoints.latest()
    assert step is not None and step > lives, output
    state, record = checkpoints.restore({name: jax.ShapeDtypeStruct((64, 64), jnp.float32) for name in "abc"})
    assert record == {"step": step}
    assert_same(state, {name: np.full((64, 64), step, np.float32) for name in "abc"})


ONE_OF_TWO = """
import json, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from moejax.checkpoint.manager import Checkpoints
from moejax.errors import UserError

folder, port, process = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"localhost:{port}", 2, process)
mesh = Mesh(np.array(jax.devices()), ("x",))
value = np.arange(48, dtype=np.float32).reshape(4, 12)

def target(*spec):
    return {"w": jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=NamedSharding(mesh, P(*spec)))}

def put(x, *spec):
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, P(*spec)), lambda index: x[index])

checkpoints = Checkpoints(folder, keep=2)
for step in (1, 2, 3):
    checkpoints.save(step, {"w": put(value + step, "x"), "n": put(np.int32(step))}, {"step": step})
checkpoints.wait()
assert checkpoints.steps() == [2, 3], checkpoints.steps()
state, record = checkpoints.restore(target(None, "x"), subset=True)
assert record == {"step": 3}
for shard in state["w"].addressable_shards:
    np.testing.assert_array_equal(shard.data, (value + 3)[shard.index])
if process == 0:  # one file: one process finds it, both must say so
    name = next(n for n in sorted(checkpoints.read_manifest(3).files) if "process_1/d/" in n)
    path = checkpoints._find(3)[0].path / name
    path.write_bytes(path.read_bytes()[:-1])
from jax.experimental import multihost_utils
multihost_utils.sync_global_devices("damaged")
try:
    checkpoints.restore(target("x"), subset=True)
except UserError as error:
    print(error)
"""


def test_two_processes_write_and_read_one_checkpoint(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    both = [start(ONE_OF_TWO, tmp_path, port, process) for process in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    for output in outputs:
        assert "of step 3 cannot be used: in" in output and "ocdbt.process_1/d/" in output, output
        assert "is truncated" in output and "The checkpoint of step 2, saved before it, is whole" in output
    # and one process alone takes it up
    value = np.arange(48, dtype=np.float32).reshape(4, 12) + 2
    sharding = NamedSharding(MESHES["8"], PartitionSpec())
    target = {"w": jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)}
    assert_same(Checkpoints(tmp_path).restore(target, 2, subset=True)[0], {"w": value})
