"""Measurements as tables and CSV, with the hardware and versions that they belong to."""

from __future__ import annotations

import csv
import datetime
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.perf.processes import ROOT


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the sorted values; ``share`` in [0, 1]."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True)
class Measurement:
    """One quantity of one variant: all its samples."""

    variant: str
    measure: str
    place: str
    unit: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return percentile(self.values, 0.5)

    @property
    def low(self) -> float:
        return percentile(self.values, 0.1)

    @property
    def high(self) -> float:
        return percentile(self.values, 0.9)


@dataclass
class Report:
    """Everything that one run has measured; ``context`` is repeated in every CSV row, so that a row stands alone."""

    context: dict[str, str]
    measurements: list[Measurement] = field(default_factory=list)

    def add(self, variant: str, measure: str, place: str, unit: str, values: float | Iterable[float]) -> None:
        samples = (values,) if isinstance(values, (int, float)) else tuple(values)
        self.measurements.append(Measurement(variant, measure, place, unit, samples))

    def find(self, variant: str, measure: str, place: str) -> Measurement | None:
        wanted = (variant, measure, place)
        return next((m for m in self.measurements if (m.variant, m.measure, m.place) == wanted), None)

    def places(self, measure: str) -> list[str]:
        return list(dict.fromkeys(m.place for m in self.measurements if m.measure == measure))

    def write_csv(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["variant", "measure", "place", "unit", "median", "p10", "p90", "samples", *self.context])
            for m in self.measurements:
                numbers = [f"{value:.6g}" if isinstance(value, float) else value for value in (m.median, m.low, m.high)]
                writer.writerow(
                    [m.variant, m.measure, m.place, m.unit, *numbers, len(m.values), *self.context.values()]
                )


    def save(self, path: str | None) -> None:
        """What ``--csv`` asked for: nothing without it; a relative path is in the repository."""
        if path:
            self.write_csv(ROOT / path)
            print(f"written: {path}")


def hardware() -> dict[str, str]:
    """Processor, cores this process may use, and memory."""
    model = "unknown"
    with open("/proc/cpuinfo") as info:
        for line in info:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"cpu": model, "cores": str(len(os.sched_getaffinity(0))), "memory_gib": f"{memory:.0f}"}


def today() -> str:
    return datetime.date.today().isoformat()


def load_average() -> str:
    """Of the last minute: what else ran on the machine. Noise in a time starts here."""
    return f"{os.getloadavg()[0]:.2f}"


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Plain text; the first column to the left, the others to the right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]

    def render(line: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([title, render(lines[0]), rule, *(render(line) for line in lines[1:]), ""])
