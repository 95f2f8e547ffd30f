"""One rank of one variant: builds its engine, then answers the commands of ``bench_step`` over a socket.

Started as ``python -m tests.perf.worker FD`` with torchrun's environment; between commands it waits without using the CPU.
"""

from __future__ import annotations

import contextlib
import cProfile
import importlib
import itertools
import logging
import os
import platform
import pstats
import resource
import sys
import time
import traceback
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from tests.perf.collectives import CollectiveRecorder, Replay
from tests.perf.memory import LiveTensors, release_free_memory, reset_resident_peak, resident_bytes, tensor_bytes
from tests.perf.workload import Workload, build_engine, make_batch, reference

PHASES = ("forward", "backward", "step")


class EngineVariant:
    """Training steps of an engine, ours or stock's."""

    def __init__(self, work: Workload, *, stock: bool) -> None:
        self.work, self.step_index = work, 0
        self.engine = build_engine(work, stock=stock)

    def step(self, mark=lambda phase: None) -> tuple[float, float]:
        """One step; ``mark`` is called as each phase begins. Returns this rank's loss and the reported norm."""
        share = make_batch(self.work, self.step_index).chunk(self.work.dp)[dist.get_rank() // self.work.tp]
        self.step_index += 1
        dist.barrier()
        mark("forward")
        loss = self.engine(input_ids=share, labels=share).loss
        mark("backward")
        self.engine.backward(loss)
        mark("step")
        self.engine.step()
        mark("end")
        norm = self.engine.get_global_grad_norm()
        return loss.item(), float("nan") if norm is None else float(norm)

    def held(self) -> dict[str, int]:
        """Bytes of what lives from step to step."""
        optimizer = getattr(self.engine.optimizer, "optimizer", self.engine.optimizer)
        states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
        masters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return {
            "parameters": tensor_bytes(self.engine.module.parameters()),
            "optimizer": tensor_bytes([*states, *masters]),
        }


class ReplayVariant:
    """The bare collectives of a recorded step: what communication alone costs here."""

    def __init__(self, recordings) -> None:
        self.replay = Replay(recordings, dist.get_rank())

    def step(self, mark=lambda phase: None) -> tuple[float, float]:
        dist.barrier()
        for phase in PHASES:
            mark(phase)
            self.replay(phase)
        mark("end")
        return float("nan"), float("nan")

    def held(self) -> dict[str, int]:
        return {}


def _clocks() -> tuple[float, float, int]:
    """Seconds elapsed, seconds of CPU in all threads of this process, minor page faults."""
    return time.perf_counter(), time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def timed_steps(variant, count: int) -> list[list[list[float]]]:
    """[step][clock][phase]: what each of :func:`_clocks` advanced in each phase of ``count`` steps, on this rank."""
    result = []
    for _ in range(count):
        stamps: list[tuple] = []
        variant.step(lambda phase, stamps=stamps: stamps.append(_clocks()))
        by_clock = zip(*stamps, strict=True)
        result.append([[after - before for before, after in itertools.pairwise(clock)] for clock in by_clock])
    return result


def recorded_step(variant) -> dict:
    """The collectives of one step, then the tensor peak of another (two modes at once would count each other)."""
    recorder, active = CollectiveRecorder(), contextlib.ExitStack()

    def mark(phase: str) -> None:
        if phase == "forward":
            active.enter_context(recorder)
        recorder.phase = phase
        if phase == "end":
            active.close()

    variant.step(mark)
    recorder.check()
    with LiveTensors() as live:
        variant.step()
    return {"collectives": recorder.collectives, "tensor_peak": live.peak, "held": variant.held()}


def profiled_steps(variant, count: int, rows: int = 20) -> str:
    """Operators by their own elapsed time, waits included; then Python functions by their own CPU time, waits left out."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(count):
            variant.step()
    parts = [profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=rows, max_name_column_width=50)]

    profiles: dict[str, cProfile.Profile] = {phase: cProfile.Profile(time.thread_time) for phase in PHASES}
    for _ in range(count):
        with contextlib.ExitStack() as active:

            def mark(phase: str, active=active) -> None:
                active.close()
                if phase in profiles:
                    active.enter_context(profiles[phase])

            variant.step(mark)
    for phase, profile in profiles.items():
        stats = pstats.Stats(profile)
        entries = sorted(stats.stats.items(), key=lambda entry: -entry[1][2])[:rows]
        parts.append(f"{phase}: {stats.total_tt / count * 1e3:.1f} ms of CPU a step; own ms, calls and function:")
        for (path, line, function), (_, calls, own, *_) in entries:
            place = "" if path == "~" else f"{path.split('site-packages/')[-1]}:{line} "
            parts.append(f"{own / count * 1e3:8.2f} {calls / count:7.0f}  {place}{function}")
    return "\n".join(parts)


def versions() -> dict[str, str]:
    import deepspeed
    import transformers

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "transformers": transformers.__version__,
    }


def _build(kind: str, argument):
    if kind == "limit":
        return ReplayVariant(argument)
    variant = EngineVariant(argument, stock=kind == "stock")
    release_free_memory()
    reset_resident_peak()
    return variant


def serve(connection: Connection) -> None:
    """``(command, argument)`` -> result, until ``None``."""
    variant, resident = None, 0
    while (task := connection.recv()) is not None:
        command, argument = task
        if command == "reference":
            result = reference(*argument)
        elif command == "build":
            variant = _build(*argument)
            resident = resident_bytes()
            result = versions()
        elif command == "train":
            result = [variant.step() for _ in range(argument)]
        elif command == "measure":
            result = timed_steps(variant, argument)
        elif command == "memory":
            peak = resident_bytes("VmHWM")
            result = {"peak": peak, "increase": peak - resident}
        elif command == "record":
            result = recorded_step(variant)
        elif command == "profile":
            result = profiled_steps(variant, argument)
        elif command == "call":
            module, function, arguments = argument
            result = getattr(importlib.import_module(module), function)(*arguments)
        else:
            raise ValueError(f"unknown command {command!r}")
        connection.send(("ok", result))


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    try:
        if int(os.environ["WORLD_SIZE"]) > 1:
            import deepspeed

            deepspeed.init_distributed("gloo", verbose=False)
        serve(connection)
    except BaseException:
        connection.send(("error", traceback.format_exc()))
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
