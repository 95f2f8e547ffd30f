"""The local experts' compute, forward and backward, with one thread: this package's backends and transformers' own.

    python -m tests.perf.bench_experts [--csv PATH]

Rows are sorted by expert and spread evenly, as after a balanced dispatch. Backends alternate, so that drift cancels.
The table in the docstring of ``deepspeed_autoep/moe/experts.py`` comes from here. Nothing here fails on a time.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable, Sequence

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import transformers

from deepspeed_autoep.moe.experts import RowCounts, run_experts
from deepspeed_autoep.moe.weight_layout import INTERFACE_FLAGS, describe_layout
from tests.perf.report import Report, hardware, load_average, table, today

# hidden, intermediate, local experts, rows, dtype
SHAPES = [
    (256, 512, 4, 256, torch.float32),
    (256, 512, 4, 256, torch.bfloat16),
    (512, 1024, 8, 2048, torch.float32),
    (512, 1024, 8, 2048, torch.bfloat16),
]
OURS = ("grouped_mm", "loop")
HF = ("eager", "grouped_mm", "batched_mm")
# batched_mm copies a weight for each row: 2048 rows of the larger shape would take 6 GB and minutes.
_MOST_BATCHED_ROWS = 256


def make_experts(hidden: int, intermediate: int, experts: int, dtype: torch.dtype) -> torch.nn.Module:
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = transformers.MixtralConfig(hidden_size=hidden, intermediate_size=intermediate, num_local_experts=experts)
    torch.manual_seed(0)
    module = MixtralExperts(config).to(dtype)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return module


def backends(module, rows: torch.Tensor, experts: int) -> dict[str, Callable[[], torch.Tensor]]:
    """Name -> forward on ``rows``, sorted by expert, the same number for each."""
    per_expert = rows.shape[0] // experts
    host = (per_expert,) * experts
    counts = RowCounts(host, torch.tensor(host).cumsum(0).to(torch.int32))
    layout = describe_layout(
        **{flag: getattr(module, flag) for flag in INTERFACE_FLAGS},
        shapes={name: tuple(parameter.shape) for name, parameter in module.named_parameters()},
    )
    index = torch.arange(experts).repeat_interleave(per_expert)[:, None]
    weights = torch.ones(rows.shape[0], 1, dtype=rows.dtype)

    def ours(backend: str):
        return lambda: run_experts(module, module.forward, layout, backend, rows, counts)

    def theirs(implementation: str):
        def forward() -> torch.Tensor:
            module.config._experts_implementation = implementation
            return module(rows, index, weights)

        return forward

    forwards = {name: ours(name) for name in OURS}
    for name in HF:
        if name != "batched_mm" or rows.shape[0] <= _MOST_BATCHED_ROWS:
            forwards[f"HF {name}"] = theirs(name)
    return forwards


def check_equal(forwards: dict[str, Callable[[], torch.Tensor]], dtype: torch.dtype) -> None:
    """All backends compute the same thing, to the rounding of ``dtype``: a time of anything else means nothing."""
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    with torch.no_grad():
        outputs = {name: forward().float() for name, forward in forwards.items()}
    right = outputs["HF eager"]
    for name, output in outputs.items():
        error = ((output - right).abs().max() / right.abs().max()).item()
        if error > tolerance:
            raise SystemExit(f"{name} differs from HF eager by {error:.1e} of the largest value")


def measure(forwards: dict[str, Callable[[], torch.Tensor]], rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Seconds of forward and backward; ``warmup`` further rounds are dropped."""
    samples: dict[str, list[float]] = {name: [] for name in forwards}
    for index in range(rounds + warmup):
        for name, forward in forwards.items():
            start = time.perf_counter()
            out = forward()
            out.backward(torch.ones_like(out))
            if index >= warmup:
                samples[name].append(time.perf_counter() - start)
    return samples


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--csv", nargs="?", const=f"docs/benchmarks/experts_{today()}.csv", help="default path: %(const)s"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)

    report = Report(
        {
            "date": today(),
            **hardware(),
            "load": load_average(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
    )
    columns = [*OURS, *(f"HF {name}" for name in HF)]
    lines = []
    for hidden, intermediate, experts, rows, dtype in SHAPES:
        place = f"{hidden}, {intermediate}, {experts}, {rows}, {str(dtype).removeprefix('torch.')}"
        module = make_experts(hidden, intermediate, experts, dtype)
        forwards = backends(module, torch.randn(rows, hidden, dtype=dtype, requires_grad=True), experts)
        check_equal(forwards, dtype)
        for name, samples in measure(forwards, options.rounds).items():
            report.add(name, "forward + backward", place, "s", samples)
        found = [report.find(name, "forward + backward", place) for name in columns]
        cells = ["-" if m is None else f"{m.median * 1e3:.1f} ({m.low * 1e3:.1f}-{m.high * 1e3:.1f})" for m in found]
        lines.append([place, *cells])
    print("\n".join(f"{key}: {value}" for key, value in report.context.items()) + "\n")
    print(table("forward + backward in ms, one thread: median (p10-p90)", ["H, I, E, R, dtype", *columns], lines))
    report.save(options.csv)


if __name__ == "__main__":
    main()
