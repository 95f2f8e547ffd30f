"""The machine code that Triton makes of the bucket ops for sm_80 and sm_90, compiled here without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
CAPABILITIES = [80, 90]


def child_environment() -> dict[str, str]:
    """Of a process in which kernels compile: the test session interprets them."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


@cache
def compiled(capability: int) -> dict:
    child = subprocess.run(
        [sys.executable, "-m", "tests.unit.compile_kernels", str(capability)],
        cwd=ROOT,
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


every_capability = pytest.mark.parametrize("capability", CAPABILITIES)
KERNELS = ["pack_kernel", "scale_unpack_kernel", "block_sums_kernel", "segment_sums_kernel", "block_checksums_kernel"]
every_kernel = pytest.mark.parametrize("kernel", KERNELS)


@every_capability
@every_kernel
def test_nothing_spills(kernel, capability):
    resources = compiled(capability)[kernel]["resources"]
    assert resources["STACK"] == 0 and resources["LOCAL"] == 0
    assert 0 < resources["REG"] <= 64  # 8 warps of 32 lanes: four programs share a multiprocessor's 65,536 registers
    assert not any(opcode.startswith(("LDL", "STL")) for opcode in compiled(capability)[kernel]["opcodes"])


# Of a full block each thread holds 8 elements. 16 bytes wide: fp32 is two accesses, bf16 and fp16 are one.
WIDE = {
    # fp32 read twice, bf16 and fp16 once; fp32 written twice in each of the three
    "pack_kernel": (2 + 1 + 1, 3 * 2),
    # from the buffer 2 in each of three, in place 2 + 1 + 1; written 2 + 1 + 1 for both
    "scale_unpack_kernel": (3 * 2 + 4, 2 * 4),
    "block_sums_kernel": (2 + 1 + 1, 0),
    "block_checksums_kernel": (2 + 1, 0),  # 32-bit and 16-bit elements
}


@every_capability
@pytest.mark.parametrize("kernel", WIDE)
def test_full_blocks_move_sixteen_bytes_at_a_time(kernel, capability):
    opcodes = compiled(capability)[kernel]["opcodes"]
    loads = sum(count for opcode, count in opcodes.items() if opcode.startswith("LDG") and opcode.endswith(".128"))
    stores = sum(count for opcode, count in opcodes.items() if opcode.startswith("STG") and opcode.endswith(".128"))
    assert (loads, stores) == WIDE[kernel]


@every_capability
def test_writing_back_rounds_to_nearest(capability):
    kernel = compiled(capability)["scale_unpack_kernel"]
    # 8 elements, two at a time, from the buffer and in place, full and masked
    for kind in ("bf16x2", "f16x2"):
        assert kernel["ptx"].count(f"cvt.rn.{kind}.f32") + kernel["ptx"].count(f"cvt.rn.{kind.removesuffix('x2')}.f32") >= 16
    for rounding in ("rz", "rm", "rp"):
        assert f"cvt.{rounding}.bf16" not in kernel["ptx"] and f"cvt.{rounding}.f16" not in kernel["ptx"]
    assert sum(count for opcode, count in kernel["opcodes"].items() if opcode.startswith("F2FP")) >= 16


@every_capability
def test_squares_are_summed_in_fp64_without_atomics(capability):
    """Atomics would add in another order in every run."""
    for name in ("block_sums_kernel", "segment_sums_kernel"):
        opcodes = compiled(capability)[name]["opcodes"]
        assert not any(opcode.startswith(("ATOM", "RED.")) for opcode in opcodes)
    assert compiled(capability)["block_sums_kernel"]["opcodes"]["DFMA"] >= 8


@pytest.mark.gpu
def test_on_a_gpu():
    """The kernels themselves against the reference on the device, and their bandwidth."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    command = [sys.executable, "-m", "tests.perf.bench_gpu_ops"]
    child = subprocess.run(command, cwd=ROOT, env=child_environment(), capture_output=True, text=True, timeout=600)
    print(child.stdout)
    assert child.returncode == 0, child.stderr
    assert "all equal" in child.stdout
