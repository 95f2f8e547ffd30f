"""The bucket ops in plain torch: what the others must equal, and what runs where nothing faster does."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepspeed_autoep.ops.segments import CHECKSUM_MIX, IN_PLACE, Segments, check

NAME = "reference"
# Elements whose squares are summed at a time: bounds the fp64 temporary.
_CHUNK = 1 << 20


@torch.no_grad()
def pack(segments: Segments, tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    """``buffer[offset : offset + count] = tensor`` in fp32 for every segment that has a place in the buffer.

    ``tensors``: contiguous, fp32, bf16 or fp16, any shape; ``buffer``: fp32 [>= extent].
    """
    check(segments, tensors, buffer)
    for tensor, count, offset in zip(tensors, segments.counts, segments.offsets, strict=True):
        if offset != IN_PLACE:
            buffer[offset : offset + count].copy_(tensor.view(-1))


@torch.no_grad()
def scale_unpack(segments: Segments, tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    """``tensor = buffer[offset : offset + count] * factor``, or ``tensor = tensor * factor`` for a segment in place.

    Products are fp32 and rounded to the tensor's dtype. Shapes as in :func:`pack`; the buffer is left as it is.
    """
    check(segments, tensors, buffer)
    for tensor, count, offset, factor in zip(tensors, segments.counts, segments.offsets, segments.factors, strict=True):
        source = tensor.view(-1) if offset == IN_PLACE else buffer[offset : offset + count]
        tensor.view(-1).copy_(source.to(torch.float32) * factor)


@torch.no_grad()
def squares_and_zeros(segments: Segments, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """fp64 [2, segments]: each segment's sum of squares and its count of zeros.

    Squares are fp64, in which no fp32 square overflows: a sum is finite exactly when all its elements are. Others may add
    up in fp32 for a while, to 1e-6 of the sum or better, with the same property.
    """
    check(segments, tensors, None)
    if not tensors:
        return torch.zeros(2, 0, dtype=torch.float64)
    device = tensors[0].device
    result = torch.zeros(2, len(tensors), dtype=torch.float64, device=device)
    for index, tensor in enumerate(tensors):
        for part in tensor.view(-1).split(_CHUNK):
            result[0, index] += part.double().square().sum()
            result[1, index] += (part == 0).sum()
    return result


@torch.no_grad()
def checksums(segments: Segments, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64 [segments]: sum over a segment's elements of their bits times an odd number made of their position, modulo 2**64.

    Changes when any one element does. Integers: the same in every implementation.
    """
    check(segments, tensors, None)
    result = torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device if tensors else None)
    for index, tensor in enumerate(tensors):
        width = tensor.element_size()
        bits = tensor.view(-1).view(torch.int32 if width == 4 else torch.int16)
        for start in range(0, bits.numel(), _CHUNK):
            part = bits[start : start + _CHUNK].to(torch.int64) & ((1 << 8 * width) - 1)
            position = torch.arange(start, start + part.numel(), dtype=torch.int64, device=bits.device)
            result[index] += (part * ((position * CHECKSUM_MIX & 0xFFFFFFFF) | 1)).sum()
    return result
