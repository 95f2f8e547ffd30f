"""Where the entries of a quantizer's buffer lie in the tensor that it quantizes, and which of them a rank holds. Pure.

A quantizer keeps one value (a scalar), one for each index of some dimensions (rows of a weight, features of an input), or one
for each block of a dimension. So each dimension of the tensor has a number of entries, 1, its size, or its number of blocks,
and a buffer is cut where the tensor is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from deepspeed_autoep.moe.weight_layout import ExpertShard, ExpertTensor

Runs = tuple[tuple[int, int], ...]  # ranges [start, stop) of one dimension, in order


@dataclass(frozen=True)
class Extent:
    """One dimension of what a quantizer sees, in the whole model."""

    size: int
    over_experts: bool = False  # EP cuts it into blocks of experts
    tensor: ExpertTensor | None = None  # expert TP cuts it as this tensor's intermediate dimension

    def held(self, shard: ExpertShard) -> Runs:
        if self.over_experts:
            return ((shard.first, shard.last),)
        if self.tensor is not None and shard.etp_size > 1:
            return self.tensor.runs(shard.etp_size, shard.etp_rank)
        return ((0, self.size),)


@dataclass(frozen=True)
class BufferLayout:
    """A buffer of the whole model by dimension of the quantized tensor.

    ``shape``: entries along each dimension. ``block``: indices that share an entry, 1 where each has its own or all share one.
    ``flat``: the quantizer keeps all entries in dimension 0; else blocked dimensions are followed by one of size 1.
    """

    shape: tuple[int, ...]
    extents: tuple[Extent | None, ...]  # None: not cut
    block: tuple[int, ...]
    flat: bool = False

    def runs(self, shard: ExpertShard) -> tuple[Runs, ...]:
        """Ranges of each dimension of ``shape`` that the rank holds. Raises ``ValueError`` with the numbers where the cut runs
        through a block."""
        return tuple(
            ((0, count),) if extent is None else _runs_of_entries(extent, block, shard)
            for count, extent, block in zip(self.shape, self.extents, self.block, strict=True)
        )

    def local_shape(self, shard: ExpertShard) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop in runs) for runs in self.runs(shard))

    def stored_shape(self, shape: tuple[int, ...], trailing: int) -> tuple[int, ...]:
        """As the quantizer keeps entries of this shape; ``trailing``: dimensions of size 1 behind flat ones."""
        if self.flat:
            return (math.prod(shape), *[1] * trailing)
        kept: list[int] = []
        for count, block in zip(shape, self.block, strict=True):
            kept += [count, 1] if block > 1 else [count]
        return tuple(kept)


def _runs_of_entries(extent: Extent, block: int, shard: ExpertShard) -> Runs:
    found = []
    for start, stop in extent.held(shard):
        if start % block or (stop % block and stop != extent.size):
            raise ValueError(
                f"a rank holds [{start}, {stop}) of a dimension of size {extent.size}, and that is no whole number of its blocks of {block}"
            )
        found.append((start // block, -(-stop // block)))
    return tuple(found)


def layout_of_buffer(stored: tuple[int, ...], extents: tuple[Extent, ...], blocks: Mapping[int, int] | None) -> BufferLayout:
    """The layout of a buffer of shape ``stored`` of a quantizer that sees a tensor of ``extents``.

    ``blocks``: dimension (not negative) -> indices that share an entry, of a static block quantizer. Raises ``ValueError``
    when the shape fits neither them, nor the dimensions, nor a scalar.
    """
    if math.prod(stored) == 1:
        return BufferLayout(stored, (None,) * len(stored), (1,) * len(stored))
    sizes = tuple(extent.size for extent in extents)
    if blocks:
        block = tuple(blocks.get(dim, 1) for dim in range(len(sizes)))
        shape = tuple(-(-size // step) for size, step in zip(sizes, block, strict=True))
        for flat in (True, False):
            layout = BufferLayout(shape, extents, block, flat)
            if layout.stored_shape(shape, len(stored) - 1) == stored:
                return layout
    elif len(stored) == len(sizes) and all(count in (1, size) for count, size in zip(stored, sizes, strict=True)):
        cut = tuple(extent if count == extent.size else None for count, extent in zip(stored, extents, strict=True))
        return BufferLayout(stored, cut, (1,) * len(stored))
    raise ValueError(f"its shape {list(stored)} is neither that of a scalar nor fits the tensor {list(sizes)} in blocks {dict(blocks or {})}")


def layout_of_input_buffer(stored: tuple[int, ...], features: Extent) -> BufferLayout:
    """Of a quantizer of rows of ``features``: a scalar, or a value for each feature. Raises ``ValueError`` for another shape."""
    if math.prod(stored) == 1:
        return BufferLayout(stored, (None,) * len(stored), (1,) * len(stored))
    if math.prod(stored) == stored[-1] == features.size:
        return BufferLayout(stored, (*(None,) * (len(stored) - 1), features), (1,) * len(stored))
    raise ValueError(f"its shape {list(stored)} is neither that of a scalar nor one value for each of {features.size} features")
