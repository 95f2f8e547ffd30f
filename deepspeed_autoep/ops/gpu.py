"""The bucket ops in Triton: tables of blocks and launches. See :mod:`deepspeed_autoep.ops.reference` for what they do.

On CPU tensors the kernels run under Triton's interpreter (``TRITON_INTERPRET=1``), for tests.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from deepspeed_autoep.ops import triton_kernels as kernels
from deepspeed_autoep.ops.segments import DTYPES, IN_PLACE, Segments, check

NAME = "triton"
# A segment's place in the buffer must be a multiple of this many elements to take the wide path.
_BUFFER_ALIGNMENT = 4  # fp32 elements in 16 bytes
_SUMS_BLOCK = 256  # blocks whose sums a program adds at a time


def is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


class _Tables:
    """Device tables of one :class:`Segments`: which block works where. Addresses are uploaded when they change."""

    def __init__(self, segments: Segments, device: torch.device) -> None:
        counts = torch.tensor(segments.counts, dtype=torch.int64)
        blocks = (counts + kernels.BLOCK - 1) // kernels.BLOCK
        first = torch.zeros(len(counts) + 1, dtype=torch.int64)
        first[1:] = blocks.cumsum(0)
        self.programs = int(first[-1])
        segment = torch.repeat_interleave(torch.arange(len(counts)), blocks)
        number = torch.arange(self.programs) - first[segment]
        self.first_block = first.to(device)
        self.block_segment = segment.to(torch.int32).to(device)
        self.block_number = number.to(device)
        self.counts = counts.to(device)
        self.offsets = torch.tensor(segments.offsets, dtype=torch.int64).to(device)
        self.factors = torch.tensor(segments.factors, dtype=torch.float32).to(device)
        self._in_place = [offset == IN_PLACE for offset in segments.offsets]
        self._offset_aligned = [offset % _BUFFER_ALIGNMENT == 0 for offset in segments.offsets]
        self._seen: tuple | None = None
        self._address_and_kind: tuple[torch.Tensor, torch.Tensor] | None = None

    def address_and_kind(self, tensors: Sequence[torch.Tensor], buffer: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        addresses = [tensor.data_ptr() for tensor in tensors]
        seen = (addresses, [tensor.dtype for tensor in tensors], buffer is None or buffer.data_ptr() % 16 == 0)
        if seen != self._seen:
            # The buffer is also what addresses are counted from: see triton_kernels._wide.
            wide = [
                seen[2] and address % 16 == 0 and (in_place or aligned)
                for address, in_place, aligned in zip(addresses, self._in_place, self._offset_aligned, strict=True)
            ]
            kinds = [
                DTYPES.index(tensor.dtype) | (kernels.ALIGNED if flag else 0)
                for tensor, flag in zip(tensors, wide, strict=True)
            ]
            device = self.counts.device
            self._address_and_kind = (_upload(addresses, torch.int64, device), _upload(kinds, torch.int32, device))
            self._seen = seen
        return self._address_and_kind


def _upload(values: list[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Without waiting for the device: from pinned memory, which torch keeps until the copy is done."""
    pinned = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=pinned)


def _tables(segments: Segments, device: torch.device) -> _Tables:
    key = (NAME, device)
    if key not in segments.derived:
        segments.derived[key] = _Tables(segments, device)
    return segments.derived[key]


def _launch(kernel, segments: Segments, tensors: Sequence[torch.Tensor], buffer: torch.Tensor | None, *arguments) -> None:
    """One program for each block of the segments; ``arguments`` follow the tables that every kernel takes."""
    tables = _tables(segments, tensors[0].device)
    address, kind = tables.address_and_kind(tensors, buffer)
    kernel[(tables.programs,)](
        tables.block_segment,
        tables.block_number,
        address,
        kind,
        tables.counts,
        *arguments,
        BLOCK=kernels.BLOCK,
        num_warps=kernels.NUM_WARPS,
    )


@torch.no_grad()
def pack(segments: Segments, tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    check(segments, tensors, buffer)
    tables = _tables(segments, buffer.device)
    if tables.programs:
        _launch(kernels.pack_kernel, segments, tensors, buffer, tables.offsets, buffer)


@torch.no_grad()
def scale_unpack(segments: Segments, tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    check(segments, tensors, buffer)
    tables = _tables(segments, buffer.device)
    if tables.programs:
        _launch(kernels.scale_unpack_kernel, segments, tensors, buffer, tables.offsets, tables.factors, buffer)


@torch.no_grad()
def squares_and_zeros(segments: Segments, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    check(segments, tensors, None)
    if not tensors:
        return torch.zeros(2, 0, dtype=torch.float64)
    device = tensors[0].device
    tables = _tables(segments, device)
    result = torch.zeros(2, len(tensors), dtype=torch.float64, device=device)
    if tables.programs:
        partial = torch.empty(2, tables.programs, dtype=torch.float64, device=device)
        _launch(kernels.block_sums_kernel, segments, tensors, None, partial[0], partial[1])
        kernels.segment_sums_kernel[(len(tensors),)](
            tables.first_block, partial[0], partial[1], result, len(tensors), BLOCK=_SUMS_BLOCK, num_warps=2
        )
    return result


@torch.no_grad()
def checksums(segments: Segments, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    check(segments, tensors, None)
    if not tensors:
        return torch.zeros(0, dtype=torch.int64)
    device = tensors[0].device
    tables = _tables(segments, device)
    result = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    if tables.programs:
        partial = torch.empty(tables.programs, dtype=torch.int64, device=device)
        _launch(kernels.block_checksums_kernel, segments, tensors, None, partial)
        result.index_add_(0, tables.block_segment, partial)  # integers: their order does not matter
    return result
