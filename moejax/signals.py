"""Ctrl-C and SIGTERM as a request to save and leave, not as an exception in the middle of a step.

signal --C handler--> a byte in a pipe --our thread--> a word to the person at once, even while XLA compiles
       --Python handler, between two steps--> `Interruption.signal`
       --of several processes: the largest number any has seen (`Agreement`)--> all leave after the same step
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def signal_name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


class Interruption:
    """Context manager: `signal` is 0 until the first SIGINT or SIGTERM; a second one ends the process at once.

    heard(number): called from a thread of our own as soon as the first signal is there; leaving(number): before the
    second one ends the process with 128 + number. What is on disk is whole at any moment, so that this loses no more
    than a kill does. Off the main thread, where Python hands out no signals, nothing happens.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(
        self, heard: Callable[[int], None] | None = None, leaving: Callable[[int], None] | None = None
    ) -> None:
        self.signal = 0
        self._heard, self._leaving = heard, leaving
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._thread = threading.Thread(target=self._listen, args=(read,), name="moejax_signals", daemon=True)
        self._thread.start()
        self._old_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._ask) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        if not self._before:
            return
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}
        signal.set_wakeup_fd(self._old_fd)
        os.close(self._write)
        self._thread.join()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number

    def _listen(self, read: int) -> None:
        count = 0
        while byte := os.read(read, 1):
            if byte[0] not in self.SIGNALS:
                continue
            count += 1
            if count == 1 and self._heard is not None:
                self._heard(byte[0])
            if count == 2:  # Python's own handlers would wait for XLA, which may compile for minutes
                if self._leaving is not None:
                    self._leaving(byte[0])
                sys.stdout.flush()
                os._exit(128 + byte[0])
        os.close(read)


class Agreement:
    """The signal on which all processes of a run leave, the same in each after the same step.

    Called once a step by every process with what it has seen (0: nothing); returns the largest number that any had seen
    one call before, so that nobody waits for the devices. A single process gets its own number back.
    """

    def __init__(self, mesh: Mesh):
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._devices = mesh.size
        self._largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._asked: jax.Array | None = None

    def __call__(self, seen: int) -> int:
        if jax.process_count() == 1:
            return seen
        mine = np.full(1, seen, np.int32)
        spread = jax.make_array_from_callback((self._devices,), self._sharding, lambda _: mine)
        before, self._asked = self._asked, self._largest(spread)
        return 0 if before is None else int(before)
