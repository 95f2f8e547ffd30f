"""One training step, ours and stock DeepSpeed's side by side: time, collectives, bytes by kind, memory.

    python -m tests.perf.bench_step --csv step.csv             # the full measurement, about ten minutes on 2 cores
    python -m tests.perf.bench_step --rounds 1 --steps 3       # a quick look
    python -m tests.perf.bench_step --list --variants ours     # every collective of a step, in order

Variants: ``ours`` on the installed transformers; ``ours-beside`` and ``stock`` on the older transformers that stock
DeepSpeed 0.19.8 needs (its AutoEP fails on 5.24); ``limit``, the collectives of ``ours`` replayed without compute.
All workers live through the whole run and wait without using the CPU while another variant is measured, so that rounds
alternate and drift cancels. A time is the largest over the ranks, from a barrier on. Nothing here fails on a time.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Iterable, Sequence

from tests.perf.collectives import Collective, summarize
from tests.perf.processes import WorkerGroup, transformers_beside
from tests.perf.report import Measurement, Report, hardware, load_average, table, today
from tests.perf.workload import Workload

PHASES = ("forward", "backward", "step")
VARIANTS = ("ours", "ours-beside", "stock", "limit")
# Elapsed: from a barrier to the end of the slowest rank. CPU: of all ranks, which other jobs on the machine disturb less.
# Page faults explain a difference between the two.
CLOCKS = {"time": (max, "s"), "cpu time": (sum, "s"), "page faults": (sum, "")}
KINDS = "count and bytes (in + out, mean over ranks) of a step's collectives"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    work = Workload()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in "hidden intermediate layers experts top_k heads vocab sequence world tp ep zero".split():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(work, name))
    parser.add_argument("--tokens", type=int, default=work.tokens, help="of each TP group in a step")
    parser.add_argument("--shard-head", action="store_true", help="cut lm_head by columns, as HF's plan does")
    parser.add_argument("--fused-adam", action="store_true", help="torch's fused AdamW in all variants")
    parser.add_argument("--correction", choices=("auto", "partition", "bucket"), default=work.correction, help="ours: where over TP")
    parser.add_argument("--default-malloc", action="store_true", help="let glibc return freed memory to the kernel")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each variant in a round")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--csv", nargs="?", const=f"docs/benchmarks/step_{today()}.csv", help="default path: %(const)s")
    parser.add_argument("--beside", default="5.17.0", metavar="VERSION", help="transformers of stock and ours-beside")
    parser.add_argument(
        "--stock-pythonpath", metavar="PATH", help="folder that holds it, instead of one filled under build/"
    )
    parser.add_argument("--list", action="store_true", help="print every collective of a step of rank 0")
    parser.add_argument("--profile", action="store_true", help="print the most expensive operators of rank 0")
    return parser.parse_args(arguments)


def workload_of(options: argparse.Namespace) -> Workload:
    return Workload(**{name: getattr(options, name) for name in Workload.__dataclass_fields__})


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class Comparison:
    """The workers of all variants, and the report that they fill."""

    def __init__(self, options: argparse.Namespace, stack: contextlib.ExitStack) -> None:
        self.options, self.stack, self.work = options, stack, workload_of(options)
        self.groups: dict[str, WorkerGroup] = {}
        self.versions: dict[str, dict[str, str]] = {}
        self.recordings: dict[str, list[list[Collective]]] = {}
        self.report = Report({})

    def start(self, name: str, argument, beside: str | None = None) -> None:
        group = self.stack.enter_context(WorkerGroup(name, self.work.world, beside, not self.options.default_malloc))
        self.versions[name] = group.call("build", ("ours" if name.startswith("ours") else name, argument))[0]
        self.groups[name] = group

    def start_engines(self) -> None:
        """Build every engine, warm it up, compare its first steps with one process, record a step."""
        others = {"ours-beside", "stock"} & set(self.options.variants)
        beside = transformers_beside(self.options.beside, self.options.stock_pythonpath) if others else None
        with WorkerGroup("reference", 1) as single:
            right = single.call("reference", (self.work, max(1, self.options.warmup)))[0]
        self._add_training("one process", right["losses"], right["norms"])

        engines = [name for name in VARIANTS if name != "limit" and name in self.options.variants]
        if "limit" in self.options.variants and "ours" not in engines:
            engines.insert(0, "ours")
        for name in engines:
            print(f"building {name}", file=sys.stderr)
            self.start(name, self.work, beside if name in others else None)
            per_rank = self.groups[name].call("train", max(1, self.options.warmup))
            losses = [_mean([rank[step][0] for rank in per_rank]) for step in range(len(per_rank[0]))]
            self._add_training(name, losses, [norm for _, norm in per_rank[0]])
            self._check_loss(name, losses[0], right["losses"][0])
            self._record(name)
        if "limit" in self.options.variants:
            self.start("limit", self.recordings["ours"])
            self.groups["limit"].call("train", max(1, self.options.warmup))

    def _check_loss(self, name: str, loss: float, right: float) -> None:
        """A fast step that computes something else is not worth a line. (The norm is reported, stock's is known to be off.)"""
        if abs(loss - right) > 1e-4 * abs(right):
            raise SystemExit(f"{name}: the loss of the first step is {loss}, one process has {right}")

    def _add_training(self, name: str, losses: list[float], norms: list[float]) -> None:
        self.report.add(name, "loss", "first step", "", losses[0])
        self.report.add(name, "loss", f"step {len(losses)}", "", losses[-1])
        self.report.add(name, "gradient norm", "first step", "", norms[0])
        self.report.add(name, "gradient norm", f"step {len(norms)}", "", norms[-1])

    def _record(self, name: str) -> None:
        ranks = self.groups[name].call("record")
        self.recordings[name] = [rank["collectives"] for rank in ranks]
        counts = {len(recording) for recording in self.recordings[name]}
        if len(counts) > 1:
            raise SystemExit(f"{name}: ranks differ in their number of collectives: {sorted(counts)}")

        def kind(collective: Collective) -> str:
            return collective.kind + (" (one rank)" if len(collective.ranks) == 1 else "")

        for key in (kind, lambda collective: collective.phase):
            per_rank = [summarize(recording, key) for recording in self.recordings[name]]
            for place in per_rank[0]:
                if place == "total" and key is not kind:
                    continue
                for quantity, unit in (("count", ""), ("bytes", "B"), ("sent", "B")):
                    values = [rank.get(place, {}).get(quantity, 0) for rank in per_rank]
                    self.report.add(name, f"collectives {quantity}", place, unit, _mean(values))
        self.report.add(name, "memory", "tensor peak over the step", "B", max(rank["tensor_peak"] for rank in ranks))
        for what in ranks[0]["held"]:
            self.report.add(name, "memory", f"held: {what}", "B", max(rank["held"][what] for rank in ranks))

    def measure(self) -> None:
        """Rounds of timed steps, every variant in each, then the peaks of memory."""
        samples: dict[str, list[list]] = {name: [] for name in self.groups}
        for index in range(self.options.rounds):
            order = list(self.groups) if index % 2 == 0 else list(reversed(self.groups))
            for name in order:
                print(f"round {index + 1}/{self.options.rounds}: {name} (load {load_average()})", file=sys.stderr)
                self.groups[name].call("train", 1)
                samples[name].append(self.groups[name].call("measure", self.options.steps))
        for name, rounds in samples.items():
            steps = [ranks for by_rank in rounds for ranks in zip(*by_rank, strict=True)]  # [step][rank][clock][phase]
            for clock, (measure, (over_ranks, unit)) in enumerate(CLOCKS.items()):
                totals = [over_ranks(sum(rank[clock]) for rank in step) for step in steps]
                self.report.add(name, measure, "total", unit, totals)
                for position, phase in enumerate(PHASES):
                    values = [over_ranks(rank[clock][position] for rank in step) for step in steps]
                    self.report.add(name, measure, phase, unit, values)
            memory = self.groups[name].call("memory")
            for what in ("peak", "increase"):
                self.report.add(name, "memory", f"resident {what}", "B", max(rank[what] for rank in memory))

    def context(self) -> dict[str, str]:
        any_versions = next(iter(self.versions.values()))
        transformers = " ".join(
            f"{name}={found['transformers']}" for name, found in self.versions.items() if name != "limit"
        )
        return {
            "date": today(),
            **hardware(),
            "load": load_average(),
            "malloc": "default" if self.options.default_malloc else "keeps freed memory",
            "processes": f"{self.work.world} with one thread each, Gloo",
            **{name: any_versions[name] for name in ("python", "torch", "deepspeed")},
            "transformers": transformers,
            "workload": self.work.describe(),
        }


def _rows(report: Report, measure: str, names: Sequence[str], show) -> Iterable[list[str]]:
    for place in report.places(measure):
        found = [report.find(name, measure, place) for name in names]
        if any(found):
            yield [place, *("-" if m is None else show(m) for m in found)]


def _spread(m: Measurement) -> str:
    scale, digits = (1e3, 1) if m.unit == "s" else (1, 0)
    median, low, high = (f"{value * scale:.{digits}f}" for value in (m.median, m.low, m.high))
    return f"{median} ({low}-{high})"


def render(report: Report, names: Sequence[str]) -> str:
    """All tables as text."""
    lines = [f"{key}: {value}" for key, value in report.context.items()]
    parts = ["\n".join(lines) + "\n"]
    trained = ["one process", *(name for name in names if name != "limit")]

    def against(measure: str):
        def show(m) -> str:
            right = report.find("one process", measure, m.place).median
            return f"{m.median:.6f} ({m.median / right - 1:+.1e})" if math.isfinite(m.median) else "none reported"

        return show

    for measure in ("loss", "gradient norm"):
        parts.append(
            table(
                f"{measure} (error against one process)",
                [measure, *trained],
                _rows(report, measure, trained, against(measure)),
            )
        )
    engines = [name for name in names if name != "limit"]
    counted = []
    for place in report.places("collectives count"):
        row = [place]
        for name in engines:
            count, size = (report.find(name, f"collectives {what}", place) for what in ("count", "bytes"))
            row.append("-" if count is None else f"{count.median:.0f}  {size.median:11,.0f} B")
        counted.append(row)
    parts.append(table(KINDS, ["kind, then place", *engines], counted))
    sent = _rows(report, "collectives sent", engines, lambda m: f"{m.median / 1e6:.3f} MB")
    parts.append(table("of which must leave a rank (ring algorithms)", ["kind, then place", *engines], sent))
    if report.places("time"):
        for measure, (over_ranks, unit) in CLOCKS.items():
            title = f"{measure} of a step{' in ms' if unit else ''}, {over_ranks.__name__} over ranks: median (p10-p90)"
            parts.append(table(title, ["", *names], _rows(report, measure, names, _spread)))
        parts += _ratios(report, names)
    memory = _rows(report, "memory", names, lambda m: f"{m.median / 2**20:.1f}")
    parts.append(table("MiB, largest over ranks", ["memory", *names], memory))
    return "\n".join(parts)


def _ratios(report: Report, names: Sequence[str]) -> list[str]:
    lines = []
    for name in ("ours", "ours-beside"):
        if name in names and "stock" in names:
            time, cpu = (
                report.find("stock", measure, "total").median / report.find(name, measure, "total").median
                for measure in ("time", "cpu time")
            )
            lines.append(f"median step of stock / of {name}: {time:.2f} in time, {cpu:.2f} in cpu time")
    return [*lines, ""]


def listing(recording: Iterable[Collective]) -> str:
    """Every collective in order, with the innermost call sites."""
    lines = []
    for index, collective in enumerate(recording):
        shapes = " ".join(str(list(shape)) for shape in collective.shapes_in[:2])
        head = f"{index:3d} {collective.phase:8s} {collective.kind:14s} {len(collective.ranks)} ranks {collective.bytes:>10d} B"
        lines.append(f"{head}  {collective.dtype} {shapes}  {' < '.join(collective.site[:3])}")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    with contextlib.ExitStack() as stack:
        comparison = Comparison(options, stack)
        comparison.start_engines()
        if options.rounds and options.steps:
            comparison.measure()
        comparison.report.context = comparison.context()
        names = list(comparison.groups)
        print(render(comparison.report, names))
        for name in comparison.recordings if options.list else ():
            print(f"collectives of {name}, rank 0\n{listing(comparison.recordings[name][0])}")
        for name in names if options.profile else ():
            print(f"operators of {name}, rank 0, 5 steps\n{comparison.groups[name].call('profile', 5)[0]}")
    comparison.report.save(options.csv)


if __name__ == "__main__":
    main()
