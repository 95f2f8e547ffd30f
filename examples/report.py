"""The run's folder: metrics as JSON lines, and the picture of the curves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from reference import Step


class Metrics:
    """``metrics.jsonl``: one object a line, written as the run goes. Kept in memory for the picture."""

    def __init__(self, folder: Path) -> None:
        self.training: list[dict] = []
        self.validation: list[dict] = []
        self._file = open(folder / "metrics.jsonl", "w", encoding="utf-8")  # noqa: SIM115  open for the whole run

    def add_step(self, **values: float) -> None:
        self.training.append(values)
        self._write(values)

    def add_validation(self, step: int, loss: float) -> None:
        self.validation.append({"step": step, "validation_loss": loss})
        self._write(self.validation[-1])

    def add_reference(self, steps: Sequence[Step]) -> None:
        for index, step in enumerate(steps, start=1):
            self._write({"step": index, "reference_loss": step.loss, "reference_grad_norm": step.grad_norm})

    def _write(self, entry: dict) -> None:
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def plot(path: Path, metrics: Metrics, reference: Sequence[Step], unigram_entropy: float, title: str) -> None:
    """Left the whole run; right, when there is a reference, its steps with ours over them: loss above norm."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure = pyplot.figure(figsize=(12, 5) if reference else (7, 5), layout="constrained")
    grid = figure.add_gridspec(2, 2 if reference else 1)
    whole = figure.add_subplot(grid[:, 0])
    whole.plot([e["step"] for e in metrics.training], [e["loss"] for e in metrics.training], label="training", lw=0.9)
    steps = [e["step"] for e in metrics.validation]
    whole.plot(steps, [e["validation_loss"] for e in metrics.validation], "o-", label="validation", ms=4)
    whole.axhline(unigram_entropy, color="gray", ls="--", label="unigram entropy")
    whole.set(title=title, xlabel="step", ylabel="loss, nats a byte")
    whole.legend()

    for row, (key, label) in enumerate((("loss", "loss"), ("grad_norm", "gradient norm")) if reference else ()):
        axes = figure.add_subplot(grid[row, 1])
        first = metrics.training[: len(reference)]
        places = [e["step"] for e in first]
        axes.plot(places, [getattr(step, key) for step in reference], lw=6, alpha=0.3, label="one plain process")
        axes.plot(places, [e[key] for e in first], "k.-", lw=1, label="this run")
        axes.set(ylabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if row == 0:
            axes.set_title("first steps, against one process")
            axes.legend()
        else:
            axes.set_xlabel("step")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
