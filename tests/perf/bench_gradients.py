"""Gradient sync over TP and gradient statistics: ours, stock DeepSpeed's functions and the bare limits, side by side.

    python -m tests.perf.bench_gradients --csv              # everything, minutes
    python -m tests.perf.bench_gradients --parts sync       # one part

Parts: ``sync``: 600 gradients of one TP group, stock's way (one all-reduce each), ours, and one bare all-reduce of the
fp32 bytes; ``transfers``: ours with other transfer sizes; ``statistics``: the statistics pass against one read of the
gradients; ``memory``: what the reducer allocates; ``code``: what Triton compiles for sm_80 and sm_90; ``step``: bytes over TP for gradients in a whole training step, by either
place of correction, and stock's. Nothing here fails on a time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.perf.processes import ROOT, WorkerGroup, transformers_beside
from tests.perf.report import Report, hardware, load_average, table, today
from tests.perf.workload import Workload

PARTS = ("sync", "transfers", "statistics", "memory", "code", "step")
DTYPES = ("float32", "bfloat16")
WORK = "tests.perf.gradient_work"
BARE = "bare all_reduce"


def _slowest(by_rank: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Sample by sample the slowest rank's."""
    return {name: [max(values) for values in zip(*(rank[name] for rank in by_rank), strict=True)] for name in by_rank[0]}


def _times(report: Report, part: str, place: str, samples: dict[str, list[float]], limit: str) -> str:
    for name, values in samples.items():
        report.add(name, f"{part} time", place, "s", values)
    bound = report.find(limit, f"{part} time", place).median
    rows = []
    for name in samples:
        found = report.find(name, f"{part} time", place)
        report.add(name, f"{part}, ratio to {limit}", place, "", found.median / bound)
        cells = [f"{value * 1e3:.1f}" for value in (found.median, found.low, found.high)]
        rows.append([name, *cells, f"{found.median / bound:.2f}"])
    return table(f"{part}, {place}", ["", "median ms", "p10", "p90", f"x {limit}"], rows)


def sync(group: WorkerGroup, report: Report, rounds: int) -> None:
    for dtype in DTYPES:
        samples = _slowest(group.call("call", (WORK, "measure", (dtype, rounds))))
        print(_times(report, "sync", dtype, samples, BARE))
        stock = report.find("stock, one by one", "sync time", dtype).median
        for name in samples:
            if name.startswith("ours"):
                report.add(name, "sync, stock over this", dtype, "", stock / report.find(name, "sync time", dtype).median)
        print("stock / ours: " + ", ".join(f"{m.variant} {m.median:.1f}" for m in report.measurements if m.measure == "sync, stock over this" and m.place == dtype) + "\n")


def transfers(group: WorkerGroup, report: Report, rounds: int) -> None:
    sizes = [2**19, 2**20, 2**21, 2**22, 2**25]
    for dtype in DTYPES:
        samples = _slowest(group.call("call", (WORK, "transfer_sizes", (dtype, sizes, (1, 2), rounds))))
        print(_times(report, "transfers", dtype, samples, BARE))


def statistics(_: WorkerGroup, report: Report, rounds: int) -> None:
    """In processes that do not share cores: two on one core would measure the scheduler."""
    world = min(4, len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as folder, WorkerGroup("statistics", world) as group:
        library = str(Path(folder) / "bare_read.so")
        command = ["g++", "-O3", "-mavx2", "-shared", "-fPIC", "-o", library, str(ROOT / "tests/perf/bare_read.cpp")]
        subprocess.run(command, check=True)
        for dtype in DTYPES:
            samples = _slowest(group.call("call", (WORK, "statistics", (dtype, library, 3 * rounds))))
            print(_times(report, "statistics", dtype, samples, "one read"))


def memory(group: WorkerGroup, report: Report, rounds: int) -> None:
    rows = []
    for dtype in DTYPES:
        found = group.call("call", (WORK, "memory", (dtype,)))[0]
        for name, value in found.items():
            report.add("ours", f"memory: {name}", dtype, "bytes", value)
        rows.append([dtype, *(f"{value / 2**20:.1f}" for value in found.values())])
    print(table("memory of one correction, MiB", ["", *found], rows))


def step(report: Report, options) -> None:
    """Collectives that correct gradients over TP, of rank 0 in one step."""
    variants = {"ours, partition": "partition", "ours, bucket": "bucket", "stock": None}
    beside = transformers_beside(options.beside, options.stock_pythonpath)
    rows = []
    for zero in (1, 2):
        for name, place in variants.items():
            work = Workload(zero=zero, correction=place or "auto")
            with WorkerGroup(name, work.world, beside if place is None else None) as group:
                group.call("build", ("stock" if place is None else "ours", work))
                group.call("train", 2)
                found = group.call("record", None)[0]["collectives"]
            own = ("gradients/reducer.py", "auto_ep_folding.py", "tp_grad")
            chosen = [c for c in found if any(part in line for part in own for line in c.site)]
            report.add(name, "step: TP collectives for gradients", f"ZeRO-{zero}", "", len(chosen))
            report.add(name, "step: TP bytes for gradients", f"ZeRO-{zero}", "bytes", sum(c.bytes_in for c in chosen))
            rows.append([f"ZeRO-{zero}, {name}", str(len(chosen)), f"{sum(c.bytes_in for c in chosen) / 2**20:.2f}"])
    print(table(f"a step of {Workload().describe()}", ["", "TP collectives for gradients", "MiB"], rows))


def code(report: Report) -> None:
    """What Triton makes of the ops, without a GPU: registers, spills, and bytes moved by the 16-byte accesses of full blocks."""
    rows = []
    # Branches of full blocks in each kernel; a thread holds 8 elements.
    branches = {"pack_kernel": 3, "scale_unpack_kernel": 6, "block_sums_kernel": 3}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    for capability in ("80", "90"):
        command = [sys.executable, "-m", "tests.unit.compile_kernels", capability]
        found = json.loads(subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True).stdout)
        for kernel, count in branches.items():
            resources, opcodes = found[kernel]["resources"], found[kernel]["opcodes"]
            wide = sum(n for opcode, n in opcodes.items() if opcode.startswith(("LDG", "STG")) and opcode.endswith(".128"))
            each = wide * 16 / (count * 8)
            place = f"sm_{capability}"
            report.add(kernel, "code: registers", place, "", resources["REG"])
            report.add(kernel, "code: spilled bytes", place, "bytes", resources["STACK"] + resources["LOCAL"])
            report.add(kernel, "code: bytes an element, mean over dtypes", place, "bytes", each)
            rows.append([f"{place} {kernel}", str(resources["REG"]), str(resources["STACK"] + resources["LOCAL"]), f"{each:.2f}"])
    print(table("compiled code", ["", "registers", "spilled bytes", "bytes an element, mean over branches"], rows))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--beside", default="5.17.0", metavar="VERSION", help="transformers of stock")
    parser.add_argument("--stock-pythonpath", metavar="PATH", help="folder that holds it, instead of one under build/")
    parser.add_argument("--csv", nargs="?", const=f"docs/benchmarks/gradients_{today()}.csv", help="default path: %(const)s")
    options = parser.parse_args(arguments)

    with contextlib.ExitStack() as stack:
        group = stack.enter_context(WorkerGroup("gradients", options.world))
        versions = group.call("call", ("tests.perf.worker", "versions", ()))[0]
        context = {"date": today(), **hardware(), "load": load_average(), "world": str(options.world), **versions}
        report = Report(context)
        print("\n".join(f"{key}: {value}" for key, value in context.items()) + "\n")
        for part in (sync, transfers, statistics, memory):
            if part.__name__ in options.parts:
                part(group, report, options.rounds)
    if "code" in options.parts:
        code(report)
    if "step" in options.parts:
        step(report, options)
    report.save(options.csv)


if __name__ == "__main__":
    main()
