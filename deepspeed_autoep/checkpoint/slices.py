"""Where a rank's elements lie in a logical tensor: boxes of it, and whether all ranks' boxes make it up. Pure.

A *logical tensor* is a parameter, or a state of its optimizer, as one process would hold it. What a rank holds of it is a
:class:`Cut`: along each dimension some runs of indices. ZeRO keeps a contiguous range of a rank's elements in C order, which is
a few boxes (:func:`flat_boxes`); each of these is a few boxes of the logical tensor (:meth:`Cut.boxes`). Files hold boxes.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from deepspeed_autoep.errors import CheckpointError

Box = tuple[tuple[int, int], ...]  # [start, stop) along each dimension; () is the one element of a scalar
Runs = tuple[tuple[int, int], ...]

# Ranks that hold the same elements write a part each from here on; smaller tensors are written by one of them whole.
SPLIT_FROM = 1 << 16
_PARTS_OF_A_SHARE = 8  # rows in a share at least: shares differ by one


@dataclass(frozen=True)
class Cut:
    """One rank's part of a logical tensor of ``shape``: along each dimension the runs of its indices that the rank holds, in order."""

    shape: tuple[int, ...]
    runs: tuple[Runs, ...]

    @staticmethod
    def along(shape: Sequence[int], cuts: Mapping[int, Runs] | None = None) -> Cut:
        """``cuts``: dimension -> its runs; the others are held whole."""
        cuts = cuts or {}
        return Cut(tuple(shape), tuple(tuple(cuts.get(dim, ((0, size),))) for dim, size in enumerate(shape)))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of the rank's own tensor."""
        return tuple(sum(stop - start for start, stop in runs) for runs in self.runs)

    @property
    def dimensions(self) -> tuple[int, ...]:
        """Those that are cut."""
        return tuple(dim for dim, size in enumerate(self.shape) if self.runs[dim] != ((0, size),))

    def boxes(self, local: Box) -> Iterator[tuple[Box, Box]]:
        """A box of the rank's own tensor, as pairs (box of the own tensor, the same elements as a box of the logical one)."""
        sides = []
        for runs, (start, stop) in zip(self.runs, local, strict=True):
            side, place = [], 0
            for first, last in runs:
                low, high = max(start, place), min(stop, place + last - first)
                if low < high:
                    side.append(((low, high), (low - place + first, high - place + first)))
                place += last - first
            sides.append(_joined(side))
        for combination in itertools.product(*sides):
            yield tuple(pair[0] for pair in combination), tuple(pair[1] for pair in combination)


def _joined(side: list[tuple[tuple[int, int], tuple[int, int]]]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Runs that follow each other in both tensors are one."""
    joined: list[tuple[tuple[int, int], tuple[int, int]]] = []
    for mine, logical in side:
        if joined and joined[-1][0][1] == mine[0] and joined[-1][1][1] == logical[0]:
            joined[-1] = (joined[-1][0][0], mine[1]), (joined[-1][1][0], logical[1])
        else:
            joined.append((mine, logical))
    return joined


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Elements ``[start, stop)`` in C order of a tensor of ``shape``, as boxes in that order: at most ``2 * dimensions - 1``."""
    if start >= stop:
        return []
    if not shape:
        return [()]
    inner = prod(shape[1:])
    first, last = start // inner, stop // inner  # whole rows are [first, last), after a beginning in the middle of one
    head, tail = start - first * inner, stop - last * inner
    if head and first == last:
        return [((first, first + 1), *box) for box in flat_boxes(shape[1:], head, tail)]
    boxes: list[Box] = []
    if head:
        boxes += [((first, first + 1), *box) for box in flat_boxes(shape[1:], head, inner)]
        first += 1
    if first < last:
        boxes.append(((first, last), *((0, size) for size in shape[1:])))
    return boxes + [((last, last + 1), *box) for box in flat_boxes(shape[1:], 0, tail)]


def flat_start(shape: Sequence[int], box: Box) -> int:
    """Place in C order of the first element of ``box``."""
    place = 0
    for size, (start, _) in zip(shape, box, strict=True):
        place = place * size + start
    return place


def share(shape: Sequence[int], start: int, stop: int, index: int, count: int, turn: int) -> tuple[int, int]:
    """Which of elements ``[start, stop)`` of a tensor of ``shape``, that ``count`` ranks hold alike, the ``index``-th of them writes: a part
    each, cut between rows (of as many dimensions as there are enough of); or all by one of them, by ``turn``, where they are few."""
    size = stop - start
    if count == 1:
        return start, stop
    if size < SPLIT_FROM * count:
        return (start, stop) if turn % count == index else (start, start)
    row = next((prod(shape[dim:]) for dim in range(1, len(shape)) if prod(shape[dim:]) * _PARTS_OF_A_SHARE * count <= size), 1)
    bounds = [start + size * position // count for position in (index, index + 1)]
    low, high = (bound if bound in (start, stop) else max(start, bound // row * row) for bound in bounds)
    return low, high


def check_union(name: str, shape: Sequence[int], pieces: Iterable[tuple[Box, int]]) -> None:
    """``pieces``: (box, rank that writes it). Raise :class:`CheckpointError` unless each element of the tensor is in exactly one."""
    pieces = list(pieces)
    for box, rank in pieces:
        if len(box) != len(shape) or any(not 0 <= start < stop <= size for (start, stop), size in zip(box, shape, strict=True)):
            raise CheckpointError(f"tensor {name!r} of shape {list(shape)}: rank {rank} has the slice {show(box)}, which is not in it")
    overlap = _first_overlap(shape, pieces)
    if overlap is not None:
        (first, one), (second, other) = overlap
        raise CheckpointError(f"tensor {name!r} of shape {list(shape)}: rank {one} has the slice {show(first)} and rank {other} {show(second)}, which overlap")
    held = sum(prod(box_shape(box)) for box, _ in pieces)
    if held != prod(shape):
        missing = _first_gap(shape, [box for box, _ in pieces])
        raise CheckpointError(
            f"tensor {name!r} of shape {list(shape)}: no rank has the slice {show(missing)}; {held} of {prod(shape)} elements are held, "
            f"by ranks {sorted({rank for _, rank in pieces})}"
        )


def show(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def _first_overlap(shape: Sequence[int], pieces: list[tuple[Box, int]]) -> tuple[tuple[Box, int], tuple[Box, int]] | None:
    """By a sweep along the dimension in which the boxes start at most places."""
    if len(pieces) < 2:
        return None
    if not shape:
        return pieces[0], pieces[1]
    sweep = max(range(len(shape)), key=lambda dim: len({box[dim][0] for box, _ in pieces}))
    active: list[tuple[int, int]] = []  # (where it ends, its position)
    order = sorted(range(len(pieces)), key=lambda position: pieces[position][0][sweep])
    for position in order:
        box = pieces[position][0]
        del active[: bisect_right(active, (box[sweep][0], len(pieces)))]
        for _, other in active:
            if _overlap(box, pieces[other][0]):
                return pieces[other], pieces[position]
        insort(active, (box[sweep][1], position))
    return None


def _overlap(one: Box, other: Box) -> bool:
    return all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True))


def _first_gap(shape: Sequence[int], boxes: list[Box]) -> Box:
    """A box that none of ``boxes``, which do not overlap, covers."""
    free: list[Box] = [tuple((0, size) for size in shape)]
    for box in boxes:
        free = [rest for piece in free for rest in _without(piece, box)]
    return free[0]


def _without(piece: Box, box: Box) -> list[Box]:
    if not _overlap(piece, box):
        return [piece]
    rest: list[Box] = []
    for dim, ((start, stop), (low, high)) in enumerate(zip(piece, box, strict=True)):
        for side in ((start, max(start, low)), (min(stop, high), stop)):
            if side[0] < side[1]:
                rest.append((*piece[:dim], side, *piece[dim + 1 :]))
        piece = (*piece[:dim], (max(start, low), min(stop, high)), *piece[dim + 1 :])
    return rest
