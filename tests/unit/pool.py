"""A pool of Gloo workers that lives as long as the test session: each test is a function sent to it.

Workers are forked from a server that has imported everything once (:mod:`tests.unit.preload`). A worker that fails or runs
out of time ends its pool (its peers may be in a collective); the next test gets a new one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable

DEFAULT_TIMEOUT = 300.0


class WorkerError(AssertionError):
    """A worker raised: carries its traceback."""


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "DS_ACCELERATOR": "cpu",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def die_with_parent() -> None:
    """Be killed where the parent ends, however it ends: a stopped worker cannot see that its pipe is closed. (Linux, as the tests.)"""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of prctl(2)


def _serve(rank: int, world: int, port: int, pipe) -> None:
    die_with_parent()
    os.environ.update(_environment(rank, world, port))
    import logging

    import deepspeed
    import torch

    torch.set_num_threads(1)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo", verbose=False)
    pipe.send(("ok", None))
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:  # the session ended without closing its pools
            return
        try:
            value = function(*arguments)
            _check_left_behind(function)
            pipe.send(("ok", value))
        except BaseException:
            pipe.send(("error", traceback.format_exc()))
        value = None
        gc.collect()


def _check_left_behind(function: Callable) -> None:
    """DeepSpeed's registry of groups is of the process: what a test leaves in it, the next one's engine takes."""
    from deepspeed.utils import groups

    from deepspeed_autoep import compat

    if groups.mpu is not None or compat._bindings:
        raise RuntimeError(f"{function.__module__}.{function.__qualname__} left its engine's groups in DeepSpeed's registry")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class WorkerPool:
    """``world`` processes with one Gloo world."""

    def __init__(self, world: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.unit.preload"])
        self.world = world
        port = _free_port()
        self.pipes, self.processes = [], []
        for rank in range(world):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, port, theirs))  # data loaders fork: no daemon
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)
        self.alive = True
        self._collect(DEFAULT_TIMEOUT)

    def run(self, function: Callable, *arguments, timeout: float = DEFAULT_TIMEOUT) -> list:
        """``function(*arguments)`` on every rank; the results by rank. Raises :class:`WorkerError`."""
        self._signal(signal.SIGCONT)
        try:
            for pipe in self.pipes:
                pipe.send((function, arguments))
        except BrokenPipeError:
            self.close()
            raise WorkerError(f"a worker of {self.world} has died since the last test") from None
        results = self._collect(timeout)
        self._signal(signal.SIGSTOP)
        return results

    def _signal(self, number: int) -> None:
        """A pool that waits for its next test is stopped: the threads of its groups poll, hundreds of times a second each."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):  # it has died; its pipe says so
                os.kill(process.pid, number)

    def _collect(self, timeout: float) -> list:
        results: list = [None] * self.world
        waiting = dict(enumerate(self.pipes))
        deadline = time.monotonic() + timeout
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise WorkerError(f"ranks {sorted(waiting)} of {self.world} did not finish within {timeout} s")
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    status, value = waiting.pop(rank).recv()
                except EOFError:
                    status, value = "error", "the process died"
                if status == "error":
                    self.close()
                    raise WorkerError(f"rank {rank} of {self.world}:\n{value}")
                results[rank] = value
        return results

    def close(self) -> None:
        self.alive = False
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


_POOLS: dict[int, WorkerPool] = {}


def run_on(world: int, function: Callable, *arguments, timeout: float = DEFAULT_TIMEOUT) -> list:
    """Run a module-level function on ``world`` ranks of the session's pool."""
    pool = _POOLS.get(world)
    if pool is None or not pool.alive:
        pool = _POOLS[world] = WorkerPool(world)
    return pool.run(function, *arguments, timeout=timeout)


def close_pools() -> None:
    for pool in _POOLS.values():
        pool.close()
    _POOLS.clear()
