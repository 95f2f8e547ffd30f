"""Layout of TP transfers: which part of which gradient goes where in a flat buffer, and what it is multiplied by. Pure.

A list of gradient pieces becomes *transfers*: each is at most one all-reduce of one flat fp32 buffer and one pass that
scales and writes back. Pieces that need no collective (experts) ride along in the pass. All lanes of a TP group plan the
same pieces, so they agree on the size of every collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_autoep.folding.families import FAMILY_RULES, GradientFamily

# Every part starts at a multiple of this many elements of the buffer: 64 bytes of fp32, a cache line, four 16-byte loads.
ALIGNMENT = 16


@dataclass(frozen=True)
class TPRule:
    """What happens to the families over TP in one run: the table, and what the user chose for REPLICATED.

    ``synchronize_replicated=False`` leaves REPLICATED gradients alone: lanes compute the same ones.
    """

    tp_size: int
    synchronize_replicated: bool = True

    def meets(self, family: GradientFamily) -> bool:
        """Whether the family's gradients are summed over TP."""
        if self.tp_size == 1 or (family is GradientFamily.REPLICATED and not self.synchronize_replicated):
            return False
        return family.meets_tp_peers

    def factor(self, family: GradientFamily) -> float:
        """What a gradient is multiplied by, after the sum where there is one."""
        if family is GradientFamily.REPLICATED and not self.meets(family):
            return 1.0
        return FAMILY_RULES[family].tp_factor(self.tp_size)


@dataclass(frozen=True)
class Part:
    """``count`` elements of piece number ``piece``, from ``start``; at ``offset`` in the buffer, or None: in place."""

    piece: int
    start: int
    count: int
    offset: int | None
    factor: float


@dataclass(frozen=True)
class Transfer:
    """One pass. ``size``: elements that the collective sums, from ``first`` of the buffer; 0 where there is none."""

    parts: tuple[Part, ...]
    size: int
    first: int = 0


def _aligned(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


def plan_transfers(counts: Sequence[int], families: Sequence[GradientFamily], rule: TPRule, limit: int) -> tuple[Transfer, ...]:
    """Pack pieces of ``counts`` elements into transfers of at most ``limit`` buffer elements (rounded up to a part's
    alignment); a piece that does not fit is cut. Pieces that the rule leaves as they are do not appear."""
    if limit < 1:
        raise ValueError(f"limit={limit}: legal are numbers from 1")
    limit = _aligned(limit)
    transfers: list[Transfer] = []
    parts: list[Part] = []
    filled = 0

    def close() -> None:
        nonlocal parts, filled
        if parts:
            transfers.append(Transfer(tuple(parts), filled))
        parts, filled = [], 0

    for piece, (count, family) in enumerate(zip(counts, families, strict=True)):
        factor = rule.factor(family)
        if not rule.meets(family):
            if factor != 1.0 and count:
                parts.append(Part(piece, 0, count, None, factor))
            continue
        start = 0
        while start < count:
            if filled >= limit:
                close()
            taken = min(count - start, limit - filled)
            parts.append(Part(piece, start, taken, filled, factor))
            start += taken
            filled += _aligned(taken)
    close()
    return tuple(transfers)


def plan_flat(
    counts: Sequence[int],
    families: Sequence[GradientFamily],
    offsets: Sequence[int],
    length: int,
    rule: TPRule,
    limit: int,
    leave_factor: bool = False,
) -> tuple[Transfer, ...] | None:
    """Transfers that sum a flat fp32 buffer of ``length`` elements where it stands, ``limit`` elements at a time.

    Pieces lie at ascending ``offsets`` of the buffer itself, so nothing is packed. With ``leave_factor`` they become
    ``tp_size`` times what the rule says: an average is a plain sum then, which needs no pass over the buffer. None where
    the buffer cannot be summed as it is: some piece must not be. What lies between pieces is summed too and left so.
    """
    if any(count and not rule.meets(family) for count, family in zip(counts, families, strict=True)):
        return None
    if not any(counts):
        return ()
    transfers = []
    for first in range(0, length, limit):
        last = min(first + limit, length)
        parts = []
        for piece, (count, family, offset) in enumerate(zip(counts, families, offsets, strict=True)):
            begin, end = max(first, offset), min(last, offset + count)
            factor = rule.factor(family)
            if leave_factor:
                factor = 1.0 if factor != 1.0 else float(rule.tp_size)
            if begin < end and factor != 1.0:
                parts.append(Part(piece, begin - offset, end - begin, None, factor))
        transfers.append(Transfer(tuple(_joined(parts, offsets)), last - first, first))
    return tuple(transfers)


def _joined(parts: list[Part], offsets: Sequence[int]) -> list[Part]:
    """Neighbours in the flat buffer with the same factor as one part, in elements of the buffer (piece 0 at offset 0)."""
    joined: list[Part] = []
    for part in parts:
        place = offsets[part.piece] + part.start
        if joined and joined[-1].factor == part.factor and joined[-1].start + joined[-1].count == place:
            joined[-1] = Part(0, joined[-1].start, joined[-1].count + part.count, None, part.factor)
        else:
            joined.append(Part(0, place, part.count, None, part.factor))
    return joined
