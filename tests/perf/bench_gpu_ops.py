"""The bucket ops on a GPU: equal to the reference there, and how near they come to the memory's bandwidth.

    python -m tests.perf.bench_gpu_ops [--csv PATH]

Needs a GPU. Each op is compared bit for bit (sums: to 1e-12) with the reference on the device first. The limit is a plain
copy of as many bytes on the device, in the same run.
"""

from __future__ import annotations

import argparse
import platform
import random
from collections.abc import Callable, Sequence

import torch

from deepspeed_autoep.ops import IN_PLACE, Segments, choose_ops, reference
from tests.perf.gradient_work import SIZES
from tests.perf.report import Report, table, today

DTYPES = (torch.float32, torch.bfloat16)


def padded_offsets(counts: Sequence[int]) -> list[int]:
    offsets, end = [], 0
    for count in counts:
        offsets.append(end)
        end += -(-count // 16) * 16
    return offsets


def check(ops, device: torch.device, seed: int) -> None:
    """Random segments: sizes, dtypes, alignments, packed and in place, power-of-two factors."""
    draw = random.Random(seed)
    counts = [draw.choice([0, 1, 7, 2047, 2048, 2049, 10_000, 131_072]) for _ in range(40)]
    shifts = [draw.choice([0, 0, 0, 1, 4]) for _ in counts]
    dtypes = [draw.choice([torch.float32, torch.bfloat16, torch.float16]) for _ in counts]
    offsets = [IN_PLACE if draw.random() < 0.3 else place for place in padded_offsets(counts)]
    segments = Segments(tuple(counts), tuple(offsets), tuple(draw.choice([0.25, 0.5, 1.0]) for _ in counts))
    generator = torch.Generator(device=device).manual_seed(seed)

    def fresh() -> list[torch.Tensor]:
        return [
            torch.zeros(shift + count, dtype=dtype, device=device)[shift:]
            for shift, count, dtype in zip(shifts, counts, dtypes, strict=True)
        ]

    source = [torch.randn(count, device=device, generator=generator) for count in counts]
    outcomes = []
    for module in (ops, reference):
        tensors = fresh()
        for tensor, values in zip(tensors, source, strict=True):
            tensor.copy_(values)
        buffer = torch.zeros(max(segments.extent, 1), device=device)
        module.pack(segments, tensors, buffer)
        packed = buffer.clone()
        module.scale_unpack(segments, tensors, buffer.mul_(3.0))
        sums = module.squares_and_zeros(segments, tensors).to(device)
        outcomes.append((packed, tensors, sums, module.checksums(segments, tensors).to(device)))
    (packed, mine, sums, checksums), (right_packed, right, right_sums, right_checksums) = outcomes
    if not torch.equal(checksums, right_checksums):
        raise SystemExit(f"checksums differ from the reference (seed {seed})")
    if not torch.equal(packed, right_packed):
        raise SystemExit(f"pack differs from the reference (seed {seed})")
    if not all(torch.equal(*pair) for pair in zip(mine, right, strict=True)):
        raise SystemExit(f"scale_unpack differs from the reference (seed {seed})")
    if not (torch.equal(sums[1], right_sums[1]) and torch.allclose(sums[0], right_sums[0], rtol=1e-12, atol=0.0)):
        raise SystemExit(f"squares_and_zeros differs from the reference (seed {seed})")


def seconds(run: Callable[[], None], rounds: int) -> list[float]:
    """Device time of each call, by events."""
    for _ in range(5):
        run()
    samples = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / 1e3)
    return samples


def measure(ops, device: torch.device, rounds: int, report: Report) -> None:
    elements = sum(SIZES)
    rows = []
    for dtype in DTYPES:
        tensors = [torch.ones(size, dtype=dtype, device=device) for size in SIZES]
        segments = Segments.of(tensors, padded_offsets(SIZES), [0.5] * len(SIZES))
        in_place = Segments.of(tensors)
        buffer = torch.zeros(segments.extent, device=device)
        width = tensors[0].element_size()
        runs = {
            "pack": (lambda t=tensors, s=segments, b=buffer: ops.pack(s, t, b), 4 + width),
            "scale_unpack": (lambda t=tensors, s=segments, b=buffer: ops.scale_unpack(s, t, b), 4 + width),
            "squares_and_zeros": (lambda t=tensors, s=in_place: ops.squares_and_zeros(s, t), width),
            "checksums": (lambda t=tensors, s=in_place: ops.checksums(s, t), width),
            "reference scale_unpack": (lambda t=tensors, s=segments, b=buffer: reference.scale_unpack(s, t, b), 4 + width),
        }
        words = torch.zeros(elements * (4 + width) // 8, device=device)
        target = torch.empty_like(words)
        runs["copy of the same bytes"] = (lambda a=target, b=words: a.copy_(b), 4 + width)
        place = str(dtype).removeprefix("torch.")
        for name, (run, bytes_each) in runs.items():
            samples = seconds(run, rounds)
            report.add(name, "time", place, "s", samples)
            median = report.find(name, "time", place).median
            report.add(name, "bandwidth", place, "B/s", elements * bytes_each / median)
            rows.append([f"{place} {name}", f"{median * 1e6:.1f}", str(bytes_each), f"{elements * bytes_each / median / 1e9:.0f}"])
    print(table(f"{len(SIZES)} segments, {elements} elements", ["", "median us", "bytes an element", "GB/s"], rows))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--csv", nargs="?", const=f"docs/benchmarks/gpu_ops_{today()}.csv", help="default path: %(const)s")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here")
    import triton

    device = torch.device("cuda", torch.cuda.current_device())
    ops = choose_ops(device)
    if ops.NAME != "triton":
        raise SystemExit(f"the {ops.NAME} ops were chosen, not Triton's: the log says why")
    for seed in range(20):
        check(ops, device, seed)
    print("20 random lists of segments: all equal to the reference\n")
    context = {
        "date": today(),
        "gpu": torch.cuda.get_device_name(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    report = Report(context)
    print("\n".join(f"{key}: {value}" for key, value in context.items()) + "\n")
    measure(ops, device, options.rounds, report)
    report.save(options.csv)


if __name__ == "__main__":
    main()
