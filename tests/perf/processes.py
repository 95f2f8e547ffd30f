"""The parent's side: groups of worker processes, one for each variant, and a second transformers beside the installed one."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 600.0
# What transformers needs at other versions than the newest transformers does.
_BESIDE = ["huggingface-hub>=1.5,<2", "httpx", "httpcore", "certifi"]


# glibc returns large blocks to the kernel or keeps them, by chance of the heap's layout: 60 ms of page faults a step more or
# less for either engine. Kept, as a GPU's caching allocator does.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_THRESHOLD_": str(2**30)}


class WorkerGroup:
    """``world`` ranks of :mod:`tests.perf.worker`. A context: leaving it ends the processes that it started."""

    def __init__(self, name: str, world: int, pythonpath: str | None = None, keep_memory: bool = True) -> None:
        self.name, self.world = name, world
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        path = [str(entry) for entry in (pythonpath, ROOT, os.environ.get("PYTHONPATH")) if entry]
        self._logs = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        for rank in range(world):
            environment = {
                # ninja of the same environment: DeepSpeed compiles a communication op at first use.
                "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
                "PYTHONPATH": os.pathsep.join(path),
                "DS_ACCELERATOR": "cpu",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                **(KEEP_MEMORY if keep_memory else {}),
            }
            mine, theirs = multiprocessing.Pipe()
            with open(self._log(rank), "wb") as log:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.perf.worker", str(theirs.fileno())],
                        cwd=ROOT,
                        env={**os.environ, **environment},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        pass_fds=[theirs.fileno()],
                    )
                )
            theirs.close()
            self._pipes.append(mine)

    def _log(self, rank: int) -> Path:
        return Path(self._logs.name) / f"rank{rank}.log"

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1 if exception[0] else 20)
            process.kill()
            process.wait()
        self._logs.cleanup()

    def call(self, command: str, argument=None) -> list:
        """Run one command on every rank; the results by rank. Raises ``RuntimeError`` with the worker's traceback."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # its end is reported below
                pipe.send((command, argument))
        results: list = [None] * self.world
        waiting = dict(enumerate(self._pipes))
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting.values()), TIMEOUT)
            if not ready:
                raise RuntimeError(
                    f"{self.name}: ranks {sorted(waiting)} did not answer {command!r} within {TIMEOUT} s"
                )
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    status, results[rank] = waiting.pop(rank).recv()
                except (EOFError, ConnectionError):
                    status, results[rank] = "error", "the process ended"
                if status == "error":
                    log = self._log(rank).read_text(errors="replace")[-3000:]
                    raise RuntimeError(f"{self.name}, rank {rank}, {command!r}:\n{results[rank]}\n{log}")
        return results


def transformers_beside(version: str, folder: str | None) -> str:
    """A folder to put first on PYTHONPATH; without ``folder`` one under build/, filled by pip the first time."""
    if folder is not None:
        if not (Path(folder) / "transformers").is_dir():
            raise SystemExit(f"--stock-pythonpath {folder}: no transformers folder there")
        return str(Path(folder).resolve())
    target = ROOT / "build" / f"transformers-{version}"
    if not target.is_dir():
        print(f"installing transformers {version} into {target.relative_to(ROOT)} (once)", file=sys.stderr)
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(partial)]
        subprocess.run([*pip, f"transformers=={version}", *_BESIDE], check=True)
        partial.rename(target)
    return str(target)
