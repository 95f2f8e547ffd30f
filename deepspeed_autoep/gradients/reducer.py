"""The TP rule of the family table, applied to many gradients at once.

Gradients that meet their TP peers go through one flat fp32 buffer: pack, one all-reduce, and one pass that applies each
piece's factor and writes it back in its own dtype; experts, which need no collective, are scaled in the same pass. Where
gradients already lie in one flat fp32 buffer, that is summed as it is. Large lists take several transfers through the
same buffers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from deepspeed_autoep.folding.families import GradientFamily
from deepspeed_autoep.folding.groups import FoldingGroupHandles
from deepspeed_autoep.gradients.buckets import TPRule, Transfer, plan_flat, plan_transfers
from deepspeed_autoep.gradients.lanes import LaneDeviation
from deepspeed_autoep.gradients.slices import FlatGradients, GradientSlice, ParameterInfo
from deepspeed_autoep.ops import IN_PLACE, Segments, choose_ops

# fp32 elements of one transfer, and transfers under way at a time: their buffers are the reducer's memory. Host: the
# processes of a machine that is busy anyway gain nothing from a second one (docs/benchmarks). GPU: large enough for the
# wire's full speed, and one is packed or written back beside another on the wire; not measured yet.
TRANSFER_ELEMENTS = {"cpu": 2 * 1024 * 1024, "gpu": 32 * 1024 * 1024}
TRANSFERS_UNDER_WAY = {"cpu": 1, "gpu": 2}


@dataclass(frozen=True)
class _Pass:
    """A transfer with what its ops derive from it."""

    transfer: Transfer
    segments: Segments


def _prepare(transfers: Sequence[Transfer]) -> tuple[_Pass, ...]:
    return tuple(
        _Pass(
            transfer,
            Segments(
                tuple(part.count for part in transfer.parts),
                tuple(IN_PLACE if part.offset is None else part.offset for part in transfer.parts),
                tuple(part.factor for part in transfer.parts),
            ),
        )
        for transfer in transfers
    )


class TPGradientReducer:
    """Corrects one rank's gradients over its TP group. Lanes must pass the same pieces in the same order."""

    def __init__(
        self,
        handles: FoldingGroupHandles,
        parameters: Sequence[ParameterInfo],
        device: torch.device,
        *,
        synchronize_replicated: bool = True,
        transfer_elements: int | None = None,
        under_way: int | None = None,
    ) -> None:
        self.handles = handles
        self.device = torch.device(device)  # of the gradients and the stage's collectives
        self.parameters = parameters  # of the whole model, in order
        self.rule = TPRule(handles.spec.tp_size, synchronize_replicated)
        kind = "cpu" if self.device.type == "cpu" else "gpu"
        self.transfer_elements = transfer_elements or TRANSFER_ELEMENTS[kind]
        self.under_way = under_way or TRANSFERS_UNDER_WAY[kind]
        self.ops = choose_ops(self.device)
        # Check the classification once, on the first finite gradients; they are averaged, whatever the rule says later.
        self.verify_next = handles.spec.tp_size > 1
        self._deviation: LaneDeviation | None = None
        self._plans: dict[tuple, tuple[_Pass, ...] | None] = {}
        self._ring: list[torch.Tensor] = []
        self._last_use = None  # event of the last pass over the ring, where streams exist

    @property
    def ring_bytes(self) -> int:
        """Memory that the reducer holds between steps."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._ring)

    @torch.no_grad()
    def correct(self, slices: Sequence[GradientSlice]) -> None:
        """Apply the TP rule to every piece, in place. Once for each gradient and optimizer step."""
        rule = self._rule_now()
        if rule.tp_size > 1:
            counts = tuple(piece.gradient.numel() for piece in slices)
            families = tuple(piece.parameter.family for piece in slices)
            key = (counts, families, rule)
            if key not in self._plans:
                self._plans[key] = _prepare(plan_transfers(counts, families, rule, self.transfer_elements))
            self._run(self._plans[key], slices, None)

    @torch.no_grad()
    def correct_flat(self, flat: FlatGradients, leave_factor: bool = False) -> float:
        """As :meth:`correct`, for pieces that are one fp32 buffer: without packing where all of them are summed.

        Returns what the buffer must still be multiplied by: 1, or with ``leave_factor`` a factor that the caller applies
        in a pass of its own (clipping), so that an average costs none here.
        """
        rule = self._rule_now()
        if rule.tp_size == 1:
            return 1.0
        counts = tuple(piece.gradient.numel() for piece in flat.pieces)
        families = tuple(piece.parameter.family for piece in flat.pieces)
        length = flat.buffer.numel()
        # One collective where nothing follows it. The check copies what it compares with, so it goes piece by piece.
        limit = length if leave_factor and self._deviation is None else self.transfer_elements
        key = (counts, families, flat.offsets(), length, rule, leave_factor, limit)
        if key not in self._plans:
            transfers = plan_flat(counts, families, flat.offsets(), length, rule, max(limit, 1), leave_factor)
            self._plans[key] = None if transfers is None else _prepare(transfers)
        if (passes := self._plans[key]) is None:
            self.correct(flat.pieces)
            return 1.0
        self._run(passes, flat.pieces, flat)
        return 1.0 / rule.tp_size if leave_factor else 1.0

    def finish_step(self) -> None:
        """After the last :meth:`correct` of an optimizer step. Raises :class:`RankMismatchError`, on every rank, if the first
        step's gradients show a parameter with a wrong family."""
        if self.verify_next:
            deviation = self._deviation or LaneDeviation(self.parameters, self.handles, self.device)
            self._deviation = None
            self.verify_next = not deviation.raise_if_any()

    def forget(self) -> None:
        """The gradients that were corrected since the last step are discarded."""
        self._deviation = None

    def _rule_now(self) -> TPRule:
        if not self.verify_next:
            return self.rule
        if self._deviation is None:
            self._deviation = LaneDeviation(self.parameters, self.handles, self.device)
        return TPRule(self.rule.tp_size)

    def _run(self, passes: Sequence[_Pass], pieces: Sequence[GradientSlice], flat: FlatGradients | None) -> None:
        self._wait_for_ring()
        under_way: deque = deque()
        for index, step in enumerate(passes):
            if len(under_way) == self.under_way:
                self._finish(*under_way.popleft(), pieces, flat)
            under_way.append(self._start(step, index % self.under_way, pieces, flat))
        while under_way:
            self._finish(*under_way.popleft(), pieces, flat)
        self._mark_ring()

    def _start(self, step: _Pass, slot: int, pieces: Sequence[GradientSlice], flat: FlatGradients | None):
        """Put one transfer on the wire: (pass, its tensors, what the collective works on, the lane's own values, work)."""
        transfer = step.transfer
        if flat is not None:
            buffer = flat.buffer[transfer.first : transfer.first + transfer.size]
            tensors = [flat.buffer[part.start : part.start + part.count] for part in transfer.parts]
            own = buffer.clone() if self._deviation is not None else None  # in the first step only
        else:
            buffer = self._buffer(slot, transfer.size)[: transfer.size]
            tensors = [_elements(pieces[part.piece].gradient, part.start, part.count) for part in transfer.parts]
            own = None
            if transfer.size:
                self.ops.pack(step.segments, tensors, buffer)
        work = dist.all_reduce(buffer, group=self.handles.tp_group, async_op=True) if transfer.size else None
        return step, tensors, buffer, own, work

    def _finish(self, step: _Pass, tensors, buffer, own, work, pieces: Sequence[GradientSlice], flat) -> None:
        if work is not None:
            work.wait()
        if self._deviation is not None and step.transfer.size:
            if flat is not None:
                self._compare_flat(step.transfer, buffer, own, flat)
            else:
                self._compare(step.transfer, buffer, tensors, pieces)
        if step.transfer.parts:
            self.ops.scale_unpack(step.segments, tensors, buffer)

    def _compare(self, transfer: Transfer, buffer: torch.Tensor, tensors, pieces: Sequence[GradientSlice]) -> None:
        for part, own in zip(transfer.parts, tensors, strict=True):
            piece = pieces[part.piece]
            if piece.parameter.family is GradientFamily.REPLICATED:
                summed = buffer[part.offset : part.offset + part.count]
                self._deviation.add(piece.parameter, own, summed, part.factor, piece.computed_in)

    def _compare_flat(self, transfer: Transfer, buffer: torch.Tensor, own: torch.Tensor, flat: FlatGradients) -> None:
        last = transfer.first + transfer.size
        factor = TPRule(self.rule.tp_size).factor(GradientFamily.REPLICATED)
        for piece, offset in zip(flat.pieces, flat.offsets(), strict=True):
            begin, end = max(transfer.first, offset) - transfer.first, min(last, offset + piece.gradient.numel()) - transfer.first
            if begin < end and piece.parameter.family is GradientFamily.REPLICATED:
                self._deviation.add(piece.parameter, own[begin:end], buffer[begin:end], factor, piece.computed_in)

    def _buffer(self, slot: int, size: int) -> torch.Tensor:
        """The slot's buffer with at least ``size`` elements; zeroed when made, so that gaps hold numbers."""
        while len(self._ring) <= slot:
            self._ring.append(torch.zeros(0, dtype=torch.float32, device=self.device))
        if self._ring[slot].numel() < size:
            self._ring[slot] = torch.zeros(size, dtype=torch.float32, device=self.device)
        return self._ring[slot]

    def _wait_for_ring(self) -> None:
        """The last pass may have run on another stream (a flush on the reduction stream, ``step()`` on the default one)."""
        if self._last_use is not None:
            torch.get_device_module(self.device).current_stream().wait_event(self._last_use)

    def _mark_ring(self) -> None:
        if self.device.type != "cpu":
            module = torch.get_device_module(self.device)
            self._last_use = self._last_use or module.Event()
            self._last_use.record(module.current_stream())


def _elements(gradient: torch.Tensor, start: int, count: int) -> torch.Tensor:
    return gradient if count == gradient.numel() else gradient.view(-1)[start : start + count]
