"""Saving and loading: time, bytes and memory, ours beside stock DeepSpeed's at the same unfolded topology and a plain copy.

    python -m tests.perf.bench_checkpoint [--hidden 512] [--rounds 3] [--beside 5.17.0] [--csv PATH]

A Mixtral on four processes at tp 1, ep 4 (what stock can do), ZeRO-1, fp32, AdamW after two steps. ``ours`` syncs its files before
it returns, stock does not: ``stock synced`` adds a ``sync``. The limit is ``cp`` of our files, with a sync. Unique state is what one
process would hold: fp32 weights and two moments. Memory is the peak of anonymous memory (RssAnon) of the worst rank beyond that before
the call. The export runs as ``deepspeed-autoep export`` does, in a process of its own. ``inspect`` is the time to read and verify.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.perf.checkpoint_work import bytes_of
from tests.perf.processes import ROOT, WorkerGroup, transformers_beside
from tests.perf.report import Report, hardware, load_average, table, today
from tests.perf.workload import Workload

MODULE = "tests.perf.checkpoint_work"

_EXPORT = """
import sys, json, time
from deepspeed_autoep.cli.main import main
from tests.perf.memory import AnonymousPeak
import deepspeed_autoep.weights.export, deepspeed_autoep.cli.export, transformers.models.mixtral.modeling_mixtral
with AnonymousPeak() as held:
    start = time.perf_counter()
    assert main(sys.argv[1:]) == 0
    seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "peak": held.peak}))
"""


def call(group: WorkerGroup, function: str, *arguments) -> list:
    return group.call("call", (MODULE, function, arguments))


def copy(source: str, target: str) -> float:
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    os.sync()
    return time.perf_counter() - start


def measure(group: WorkerGroup, report: Report, name: str, folder: Path, rounds: int, variants: dict[str, tuple]) -> None:
    """``variants``: name of a way to save -> arguments of ``save`` after the folder."""
    for variant, arguments in variants.items():
        results = []
        for index in range(rounds):
            target = str(folder / f"{variant.replace(' ', '_')}{index}")
            results.append(call(group, "save", target, *arguments))
            if index:
                shutil.rmtree(target)
        report.add(variant, "save", "total", "s", [max(rank["seconds"] for rank in result) for result in results])
        report.add(variant, "save memory", "worst rank", "bytes", [max(rank["peak"] for rank in result) for result in results])
    first = str(folder / f"{next(iter(variants)).replace(' ', '_')}0")
    report.add(name, "bytes", "total", "bytes", float(bytes_of(first)))
    loads = [call(group, "load", first) for _ in range(rounds)]
    report.add(name, "load", "total", "s", [max(rank["seconds"] for rank in result) for result in loads])
    report.add(name, "load memory", "worst rank", "bytes", [max(rank["peak"] for rank in result) for result in loads])


def export(report: Report, checkpoint: Path, folder: Path, shard: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _EXPORT, "export", str(checkpoint), str(folder / "hf"), "--max-shard-size", f"{shard}MB", "--no-verify"]
    outcome = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=ROOT).stdout.splitlines()[-1])
    report.add("ours", "export", f"shards of {shard} MB", "s", outcome["seconds"])
    report.add("ours", "export memory", f"shards of {shard} MB", "bytes", float(outcome["peak"]))
    report.add("ours", "export bytes", f"shards of {shard} MB", "bytes", float(bytes_of(str(folder / "hf"))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512, help="hidden size; the experts' is twice that")
    parser.add_argument("--rounds", type=int, default=3, help="saves and loads of each way")
    parser.add_argument("--shard", type=int, default=50, help="MB of an exported file")
    parser.add_argument("--beside", default="5.17.0", metavar="VERSION", help="transformers of stock")
    parser.add_argument("--stock-pythonpath", metavar="PATH", help="folder that holds it, instead of one filled under build/")
    parser.add_argument("--csv")
    options = parser.parse_args()
    work = Workload(
        hidden=options.hidden, intermediate=2 * options.hidden, layers=4, experts=16, vocab=8192, world=4, tp=1, ep=4, zero=1, tokens=128
    )
    beside = transformers_beside(options.beside, options.stock_pythonpath)
    report = Report({"date": today(), "model": work.describe(), **hardware(), "load_average": load_average()})
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as name:
        folder = Path(name)
        with WorkerGroup("ours", work.world, keep_memory=False) as group:
            unique = call(group, "build", work, False, {})[0]["unique"]
            measure(group, report, "ours", folder, options.rounds, {"ours": ()})
            alone = call(group, "steps", 6)[0]
            beside_save = call(group, "save_beside", str(folder / "asynchronous"), 6)
            report.add("ours asynchronous", "save", "blocked", "s", max(rank["blocked"] for rank in beside_save))
            report.add("ours asynchronous", "save memory", "worst rank", "bytes", float(max(rank["peak"] for rank in beside_save)))
            report.add("ours asynchronous", "step", "while saving", "s", beside_save[0]["steps"])
            report.add("ours asynchronous", "step", "alone", "s", alone)
        with WorkerGroup("stock", work.world, beside, keep_memory=False) as group:
            call(group, "build", work, True, {})
            measure(group, report, "stock", folder, options.rounds, {"stock": (), "stock synced": (True,)})
        source = str(folder / "ours0")
        copies = []
        for index in range(options.rounds):
            copies.append(copy(source, str(folder / f"copy{index}")))
            shutil.rmtree(folder / f"copy{index}")
        report.add("limit", "save", "total", "s", copies)
        reads = []
        for _ in range(options.rounds):
            start = time.perf_counter()
            subprocess.run(f"cat {source}/t/tensors/* > /dev/null", shell=True, check=True)
            reads.append(time.perf_counter() - start)
        report.add("limit", "load", "total", "s", reads)
        export(report, Path(source) / "t", folder, options.shard)

    report.add("unique", "bytes", "total", "bytes", float(unique))
    rows = []
    for variant in ("ours", "ours asynchronous", "stock", "stock synced", "limit"):
        cells = [variant]
        for quantity, place, scale, digits in (
            ("save", "blocked" if variant == "ours asynchronous" else "total", 1, 2),
            ("save memory", "worst rank", 2**20, 0),
            ("load", "total", 1, 2),
            ("load memory", "worst rank", 2**20, 0),
            ("bytes", "total", unique, 4),
        ):
            found = report.find(variant, quantity, place)
            cells.append("" if found is None else f"{found.median / scale:.{digits}f}")
        rows.append(cells)
    print(table(work.describe(), ["way", "save s", "save memory MiB", "load s", "load memory MiB", "bytes / unique state"], rows))
    print(f"unique state {unique / 2**20:.0f} MiB, largest tensor {4 * 16 * 2 * work.intermediate * work.hidden / 2**20:.0f} MiB")
    for measure_name in ("export", "export memory", "export bytes"):
        found = report.find("ours", measure_name, f"shards of {options.shard} MB")
        print(f"{measure_name}: {found.median / (1 if found.unit == 's' else 2**20):.2f} {'s' if found.unit == 's' else 'MiB'}, shards of {options.shard} MB")
    for place in ("alone", "while saving"):
        found = report.find("ours asynchronous", "step", place)
        print(f"a step {place}: {found.median:.3f} s (p10 {found.low:.3f}, p90 {found.high:.3f})")
    report.save(options.csv)


if __name__ == "__main__":
    main()
