"""Compile the Triton kernels for a GPU that need not be there, and print what the machine code looks like, as JSON.

Run as a process of its own (``python -m tests.unit.compile_kernels 80``): under the interpreter kernels are other objects.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from deepspeed_autoep.ops import triton_kernels as kernels

_TABLES = {"block_segment": "*i32", "block_number": "*i64", "address": "*i64", "kind": "*i32", "count": "*i64"}
SIGNATURES = {
    "pack_kernel": {**_TABLES, "offset": "*i64", "buffer": "*fp32"},
    "scale_unpack_kernel": {**_TABLES, "offset": "*i64", "factor": "*fp32", "buffer": "*fp32"},
    "block_sums_kernel": {**_TABLES, "squares": "*fp64", "zeros": "*fp64"},
    "block_checksums_kernel": {**_TABLES, "result": "*i64"},
    "segment_sums_kernel": {"first_block": "*i64", "squares": "*fp64", "zeros": "*fp64", "result": "*fp64", "segments": "i32"},
}
BLOCKS = {"segment_sums_kernel": 256}


def _tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def compiled(name: str, capability: int) -> dict:
    """Registers, spilled bytes and instruction counts of one kernel on sm_``capability``."""
    kernel = getattr(kernels, name)
    signature = {**SIGNATURES[name], "BLOCK": "constexpr"}
    # torch's allocations are aligned: what the launcher specializes on.
    pointers = [index for index, kind in enumerate(signature.values()) if kind.startswith("*")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={"BLOCK": BLOCKS.get(name, kernels.BLOCK)},
        attrs={(index,): [["tt.divisibility", 16]] for index in pointers},
    )
    options = {"num_warps": 2 if name in BLOCKS else kernels.NUM_WARPS}
    result = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(result.asm["cubin"])
        usage = subprocess.run([_tool("cuobjdump"), "-res-usage", str(cubin)], capture_output=True, text=True, check=True).stdout
        sass = subprocess.run([_tool("nvdisasm"), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    resources = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    opcodes = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ )?([A-Z][A-Z0-9_.]*)", sass, re.MULTILINE)
    counts: dict[str, int] = {}
    for opcode in opcodes:
        counts[opcode] = counts.get(opcode, 0) + 1
    return {"resources": resources, "opcodes": counts, "ptx": result.asm["ptx"]}


if __name__ == "__main__":
    print(json.dumps({name: compiled(name, int(sys.argv[1])) for name in SIGNATURES}))
