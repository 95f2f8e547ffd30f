"""Segments: a list of runs of gradient elements that one pass works on, each with its place in a flat buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

IN_PLACE = -1  # offset of a segment that has no place in the buffer
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LEGAL = frozenset(DTYPES)
# Multiplier of the checksum: 2**32 divided by the golden ratio, which spreads positions over all bits.
CHECKSUM_MIX = 0x9E3779B9


@dataclass(frozen=True)
class Segments:
    """Static part of a pass over ``len(counts)`` tensors; the tensors themselves change from step to step.

    ``counts``: elements. ``offsets``: first element in the flat fp32 buffer, or :data:`IN_PLACE`. ``factors``: what the
    elements are multiplied by, an fp32 number. ``derived`` keeps what an implementation computes from these once.
    """

    counts: tuple[int, ...]
    offsets: tuple[int, ...]
    factors: tuple[float, ...]
    derived: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not len(self.counts) == len(self.offsets) == len(self.factors):
            raise ValueError(f"{len(self.counts)} counts, {len(self.offsets)} offsets and {len(self.factors)} factors")

    @staticmethod
    def of(tensors: Sequence[torch.Tensor], offsets: Sequence[int] | None = None, factors: Sequence[float] | None = None) -> Segments:
        """Of whole tensors; without offsets and factors, in place and times one."""
        return Segments(
            tuple(tensor.numel() for tensor in tensors),
            tuple(offsets) if offsets is not None else (IN_PLACE,) * len(tensors),
            tuple(factors) if factors is not None else (1.0,) * len(tensors),
        )

    @cached_property
    def planned(self) -> list[int]:
        """``counts``, to be compared with a list."""
        return list(self.counts)

    @cached_property
    def extent(self) -> int:
        """Elements of the smallest buffer that holds all segments."""
        return max((offset + count for offset, count in zip(self.offsets, self.counts, strict=True) if offset >= 0), default=0)


def check(segments: Segments, tensors: Sequence[torch.Tensor], buffer: torch.Tensor | None) -> set[torch.dtype]:
    """The tensors' dtypes. Raises ``ValueError`` where a pass over raw memory would read or write outside of its tensors."""
    if len(tensors) != len(segments.counts):
        raise ValueError(f"{len(tensors)} tensors for {len(segments.counts)} segments")
    # The good case first, in few calls: it is on the way of every step.
    dtypes = {tensor.dtype for tensor in tensors}
    if not (
        dtypes <= _LEGAL
        and [tensor.numel() for tensor in tensors] == segments.planned
        and False not in [tensor.is_contiguous() for tensor in tensors]
    ):
        _refuse(segments, tensors)
    if buffer is not None and (buffer.dtype != torch.float32 or not buffer.is_contiguous() or buffer.numel() < segments.extent):
        raise ValueError(
            f"the buffer is {buffer.dtype} with {buffer.numel()} elements: it must be contiguous float32 with at least {segments.extent}"
        )
    return dtypes


def _refuse(segments: Segments, tensors: Sequence[torch.Tensor]) -> None:
    for index, (tensor, count) in enumerate(zip(tensors, segments.counts, strict=True)):
        if tensor.dtype not in DTYPES:
            raise ValueError(f"segment {index} is {tensor.dtype}: legal are {', '.join(map(str, DTYPES))}")
        if tensor.numel() != count:
            raise ValueError(f"segment {index} has {tensor.numel()} elements, {count} were planned")
        if not tensor.is_contiguous():
            raise ValueError(f"segment {index} of shape {list(tensor.shape)} is not contiguous (strides {tensor.stride()})")
