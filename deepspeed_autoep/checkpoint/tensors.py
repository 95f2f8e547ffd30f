"""What a rank holds of the tensors of a checkpoint, and which part of it the rank writes or reads.

A parameter ``w`` is in a checkpoint as ``model.w`` (its fp32 master where it has one) and ``optimizer.<state>.w``, all of the
parameter's own logical shape. The engine describes its tensors (:class:`LogicalTensor`); :func:`pieces_to_write` and
:func:`pieces_to_read` make views of them, each with its box of the logical tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import prod

import torch

from deepspeed_autoep.checkpoint.slices import Box, Cut, box_shape, flat_boxes, flat_start, share

WEIGHT = "model"  # the value of a tensor, beside the names of its optimizer's states


def key_of(name: str, state: str = WEIGHT) -> str:
    """Under which a tensor, or a state of its optimizer, is in the files."""
    return f"model.{name}" if state == WEIGHT else f"optimizer.{state}.{name}"


@dataclass(frozen=True)
class Held:
    """Elements ``[start, stop)`` in C order of a rank's part of a tensor: ``value`` is these, flat, or the whole part in its shape."""

    value: torch.Tensor
    start: int
    stop: int

    def boxes(self, shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[Box, torch.Tensor]]:
        """``[start, stop)`` as boxes of the part, of ``shape``, with views of them."""
        for box in flat_boxes(shape, start, stop):
            if tuple(self.value.shape) == shape:
                yield box, self.value[tuple(slice(*side) for side in box)]
            else:
                first = flat_start(shape, box) - self.start
                yield box, self.value[first : first + prod(box_shape(box))].view(box_shape(box))


@dataclass(frozen=True)
class LogicalTensor:
    """A parameter or buffer as a rank sees it.

    ``dtypes``: of its value and of each state, whatever this rank holds; ``held``: what it holds, by state: with ZeRO perhaps
    nothing. ``replica`` of ``replicas``: this rank's place among those that hold the same elements.
    """

    name: str
    cut: Cut
    dtypes: dict[str, torch.dtype]
    held: dict[str, Held] = field(default_factory=dict)
    replica: int = 0
    replicas: int = 1
    model_dtype: torch.dtype = torch.float32  # of the model's own tensor
    is_buffer: bool = False
    trained: bool = True
    aliases: tuple[str, ...] = ()  # other names of the same tensor in the model's state dict

    @property
    def weight_dtype(self) -> torch.dtype:
        return self.dtypes[WEIGHT]

    def weight_only(self) -> LogicalTensor:
        """Without the optimizer's states."""
        return self.only(WEIGHT)

    def only(self, state: str) -> LogicalTensor:
        """One of its states."""
        return replace(self, dtypes={state: self.dtypes[state]}, held={key: value for key, value in self.held.items() if key == state})

    @property
    def keys(self) -> dict[str, torch.dtype]:
        return {key_of(self.name, state): dtype for state, dtype in self.dtypes.items()}


@dataclass(frozen=True)
class Piece:
    """A box of a logical tensor and a view of this rank's memory for it."""

    key: str
    shape: tuple[int, ...]  # logical
    box: Box
    view: torch.Tensor


def _pieces(tensor: LogicalTensor, state: str, start: int, stop: int) -> Iterator[Piece]:
    held = tensor.held[state]
    for local, view in held.boxes(tensor.cut.local_shape, start, stop):
        for mine, logical in tensor.cut.boxes(local):
            inside = tuple(slice(low - base, high - base) for (low, high), (base, _) in zip(mine, local, strict=True))
            yield Piece(key_of(tensor.name, state), tensor.cut.shape, logical, view[inside])


def pieces_to_write(tensors: Iterable[LogicalTensor]) -> list[Piece]:
    """Each element of what several ranks hold alike is one rank's to write."""
    pieces = []
    for position, tensor in enumerate(tensors):
        for place, state in enumerate(tensor.dtypes):
            if state in tensor.held:
                held = tensor.held[state]
                turn = position + place
                part = share(tensor.cut.local_shape, held.start, held.stop, tensor.replica, tensor.replicas, turn)
                pieces += _pieces(tensor, state, *part)
    return pieces


def pieces_to_read(tensors: Iterable[LogicalTensor]) -> list[Piece]:
    """All that this rank holds."""
    return [
        piece
        for tensor in tensors
        for state in tensor.dtypes
        if state in tensor.held
        for piece in _pieces(tensor, state, tensor.held[state].start, tensor.held[state].stop)
    ]
