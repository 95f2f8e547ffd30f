"""What ``bench_checkpoint`` measures on one rank. Each function is called in a worker; the engine lives between calls."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch.distributed as dist

from tests.perf.memory import AnonymousPeak, release_free_memory
from tests.perf.worker import EngineVariant
from tests.perf.workload import Workload

_variant: EngineVariant | None = None


def build(work: Workload, stock: bool, expert: dict) -> dict[str, int]:
    """Two steps, so that there are moments. Returns the bytes of the unique state, on rank 0's count."""
    global _variant
    _variant = EngineVariant(work, stock=stock)
    for _ in range(2):
        _variant.step()
    release_free_memory()
    # fp32 weights, which are their own masters, and AdamW's two moments.
    return {"unique": 3 * 4 * sum(parameter.numel() for parameter in _whole_parameters(work))}


def _whole_parameters(work: Workload):
    import torch

    from tests.perf.workload import make_model

    with torch.device("meta"):
        return list(make_model(work).parameters())


def _timed(action) -> dict[str, float]:
    """Seconds until every rank is done; bytes of anonymous memory beyond those before."""
    dist.barrier()
    with AnonymousPeak() as held:
        start = time.perf_counter()
        action()
        own = time.perf_counter() - start
        dist.barrier()
        seconds = time.perf_counter() - start
    release_free_memory()
    return {"seconds": seconds, "own_seconds": own, "peak": held.peak}


def save(folder: str, synced: bool = False, **options) -> dict[str, float]:
    """``synced``: until the kernel has written everything, for files that are not synced by themselves."""

    def action() -> None:
        _variant.engine.save_checkpoint(folder, tag="t", **options)
        if synced:
            dist.barrier()
            if dist.get_rank() == 0:
                os.sync()

    return _timed(action)


def save_beside(folder: str, steps: int) -> dict[str, list[float]]:
    """An asynchronous save: how long the call blocks, and steps until it is done."""
    blocked = _timed(lambda: _variant.engine.save_checkpoint(folder, tag="t", asynchronous=True))
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        _variant.step()
        times.append(time.perf_counter() - start)
    _variant.engine.wait_for_checkpoint()
    return {"blocked": blocked["own_seconds"], "peak": blocked["peak"], "steps": times}


def steps(count: int) -> list[float]:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        _variant.step()
        times.append(time.perf_counter() - start)
    return times


def load(folder: str) -> dict[str, float]:
    return _timed(lambda: _variant.engine.load_checkpoint(folder, tag="t"))


def bytes_of(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
