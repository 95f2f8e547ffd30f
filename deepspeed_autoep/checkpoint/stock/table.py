"""The parameters of a stock checkpoint, first under stock's names, then as the Hugging Face model has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from deepspeed_autoep.checkpoint.stock.names import ExpertLayer, NameMap
from deepspeed_autoep.checkpoint.stock.sources import Joined, Source, Transposed
from deepspeed_autoep.errors import CheckpointError

MASTER = "master"  # the optimizer's own copy of a parameter
WEIGHT = "weight"  # the model's


@dataclass(frozen=True)
class StockTensor:
    """One parameter, whole: its ``states`` by name (:data:`MASTER`, :data:`WEIGHT`, the optimizer's)."""

    name: str
    states: dict[str, Source]
    trained: bool
    step: float | None = None  # of the optimizer, for this parameter

    @property
    def shape(self) -> tuple[int, ...]:
        return next(iter(self.states.values())).shape


@dataclass(frozen=True)
class StockGroup:
    """One parameter group of the optimizer, as stock had split it.

    ``names``: the model's names of its parameters, None where the files do not say (ZeRO-3 with several groups). ``options``: lr,
    weight_decay ...: numbers, texts, tuples; {} where they were not saved (``elastic_checkpoint``). ``is_expert``: split off by stock for parameters of experts.
    """

    names: tuple[str, ...] | None
    options: dict[str, Any] = field(default_factory=dict)
    is_expert: bool = False


def number(value: Any, path: Path) -> float | int:
    """A step count, which may be a tensor of one element."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"{path} has a {type(value).__name__} for the number of steps")
    return value


def logical_tensors(tensors: Iterable[StockTensor], names: NameMap, like: Mapping[str, Sequence[int]] | None, folder: Path) -> list[StockTensor]:
    """Under the model's names, gate and up in one stack again. ``like``: shapes of the model's parameters, where they are known.

    Raises :class:`CheckpointError` for halves of a stack that do not fit, or two parameters of one name.
    """
    given = {tensor.name: tensor for tensor in tensors}
    stacks = {stack: layer for layer in names.layers for stack in layer.stacks()}
    found: dict[str, StockTensor] = {}
    for name, tensor in given.items():
        if name not in stacks:
            new = names.logical(name)
            made = [] if new is None else [_renamed(tensor, new)]
        elif name == stacks[name].stacks()[0]:
            made = _experts(stacks[name], given, names, like or {}, folder)
        else:
            made = []  # made with the first of the layer's three
        for item in made:
            if item.name in found:
                raise CheckpointError(f"{folder} has two parameters that are {item.name!r} in the model; one is {name!r}")
            found[item.name] = item
    return list(found.values())


def _renamed(tensor: StockTensor, name: str) -> StockTensor:
    return StockTensor(name, tensor.states, tensor.trained, tensor.step)


def _experts(
    layer: ExpertLayer, given: Mapping[str, StockTensor], names: NameMap, like: Mapping[str, Sequence[int]], folder: Path
) -> list[StockTensor]:
    missing = [stack for stack in layer.stacks() if stack not in given]
    if missing:
        raise CheckpointError(f"{folder} lacks {missing} of the experts of {layer.block!r}")
    gate, down, up = (given[stack] for stack in layer.stacks())
    experts, inner, hidden = _expert_sizes(layer, gate, folder)
    for tensor, shape in ((up, (experts, inner, hidden)), (down, (experts, hidden, inner))):
        if tensor.shape != shape:
            raise CheckpointError(f"{folder}: {tensor.name!r} has the shape {list(tensor.shape)}, {list(shape)} is expected beside {gate.name!r}")
    if not names.fused:
        return [_renamed(tensor, names.stack(layer, part)) for tensor, part in ((gate, "w1"), (up, "w3"), (down, "w2"))]
    if (gate.states.keys(), gate.trained, gate.step) != (up.states.keys(), up.trained, up.step):
        raise CheckpointError(
            f"{folder}: {gate.name!r} and {up.name!r} are one parameter in the model, and here they differ: states {sorted(gate.states)} and "
            f"{sorted(up.states)}, steps {gate.step} and {up.step}, trained {gate.trained} and {up.trained}"
        )
    for state, source in gate.states.items():
        if source.dtype != up.states[state].dtype:
            raise CheckpointError(f"{folder}: {state!r} of {gate.name!r} is {source.dtype}, of {up.name!r} {up.states[state].dtype}")
    both_name, down_name = names.stack(layer, "w1"), names.stack(layer, "w2")
    both = StockTensor(both_name, {state: Joined((source, up.states[state]), 1) for state, source in gate.states.items()}, gate.trained, gate.step)
    down = _renamed(down, down_name)
    # Stock turns stacks [E, H, 2 I] round, and takes a square one for [E, 2 I, H]; only the model's own shapes tell.
    if _shape(like, both_name) == (experts, hidden, 2 * inner) and _shape(like, down_name) == (experts, inner, hidden) != down.shape:
        both, down = _turned(both), _turned(down)
    return [both, down]


def _expert_sizes(layer: ExpertLayer, gate: StockTensor, folder: Path) -> tuple[int, int, int]:
    if len(gate.shape) != 3 or gate.shape[0] != layer.num_experts:
        raise CheckpointError(f"{folder}: {gate.name!r} has the shape {list(gate.shape)}, [{layer.num_experts}, ., .] is expected")
    return gate.shape


def _shape(like: Mapping[str, Sequence[int]], name: str) -> tuple[int, ...] | None:
    return tuple(like[name]) if name in like else None


def _turned(tensor: StockTensor) -> StockTensor:
    return StockTensor(tensor.name, {state: Transposed(source) for state, source in tensor.states.items()}, tensor.trained, tensor.step)


def logical_groups(groups: Iterable[StockGroup], names: NameMap, folder: Path) -> tuple[StockGroup, ...]:
    """With the model's names; a parameter that stock has in two halves is in the group of the first.

    Raises :class:`CheckpointError` where the halves' groups differ in their options.
    """
    groups = list(groups)
    halves = {layer.stacks()[2]: layer.stacks()[0] for layer in names.layers} if names.fused else {}
    logical = {stack: names.stack(layer, part) for layer in names.layers for stack, part in zip(layer.stacks(), ("w1", "w2", "w3"), strict=True) if stack not in halves}
    options = {name: group.options for group in groups for name in group.names or ()}
    for up, gate in halves.items():
        if up in options and options[up] != options.get(gate):
            raise CheckpointError(f"{folder}: {gate!r} and {up!r} are one parameter in the model, and their groups have different options")
    made = []
    for group in groups:
        kept = None
        if group.names is not None:
            kept = tuple(filter(None, (logical.get(name) or names.logical(name) for name in group.names if name not in halves)))
        made.append(StockGroup(kept, group.options, group.is_expert))
    return tuple(made)
