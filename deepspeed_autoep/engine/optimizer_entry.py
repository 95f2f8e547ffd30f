"""An engine's optimizer in ``checkpoint.json``: the user's groups, step counts; and back, under another topology."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed_autoep.checkpoint.metadata import (
    GroupEntry,
    Manifest,
    OptimizerEntry,
    decode,
    dtype_name,
    dtype_of,
    encode,
)
from deepspeed_autoep.engine.master_state import MasterState
from deepspeed_autoep.engine.param_groups import OF_ONE_PART, ORIGIN_KEY
from deepspeed_autoep.errors import CheckpointError
from deepspeed_autoep.gradients.slices import ParameterInfo

_OWN_KEYS = (*OF_ONE_PART, ORIGIN_KEY)
# How torch's optimizers compute, not what: the engine's own choice.
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


def describe_optimizer(masters: MasterState, families: dict[torch.Tensor, ParameterInfo], groups: int, with_states: bool) -> OptimizerEntry:
    """``families``: every parameter that the optimizer holds; ``groups``: how many groups the user gave. Raises :class:`CheckpointError`."""
    members: list[list[str]] = [[] for _ in range(groups)]
    for info in families.values():
        members[info.group].append(info.name)
    first_parts = {part[ORIGIN_KEY]: part for part in reversed(masters.base.param_groups)}
    names = {parameter: info.name for parameter, info in families.items()}
    return OptimizerEntry(
        type=type(masters.base).__name__,
        has_states=with_states,
        groups=tuple(
            GroupEntry(
                parameters=tuple(members[origin]),
                options={
                    key: encode(value, f"option {key!r} of the optimizer's group {origin}")
                    for key, value in first_parts.get(origin, {}).items()
                    if key not in (*_OWN_KEYS, *_IMPLEMENTATION)
                },
            )
            for origin in range(groups)
        ),
        states={names[p]: {state: dtype_name(dtype) for state, dtype in masters.state_dtypes(p).items()} if with_states else {} for p in families},
        values={
            names[p]: {state: encode(value, f"the optimizer's state {state!r} of {names[p]!r}") for state, value in masters.values(p).items()}
            if with_states
            else {}
            for p in families
        },
    )


def check_optimizer_entry(entry: OptimizerEntry, masters: MasterState, families: dict[torch.Tensor, ParameterInfo], groups: int) -> None:
    """Raise :class:`CheckpointError` where the engine's optimizer cannot go on from what is saved. Local; nothing is changed."""
    remedy = "load_optimizer_states=False leaves the optimizer as it is, load_module_only=True loads weights and nothing else"
    if entry.type != type(masters.base).__name__:
        raise CheckpointError(f"the checkpoint's optimizer is {entry.type!r}, the engine's {type(masters.base).__name__!r}: {remedy}")
    if len(entry.groups) != groups:
        raise CheckpointError(f"the checkpoint's optimizer has {len(entry.groups)} parameter groups, the engine's was given {groups}: {remedy}")
    saved = {name: origin for origin, group in enumerate(entry.groups) for name in group.parameters}
    own = {info.name: info.group for info in families.values()}
    for name in (*own, *saved):
        if saved.get(name) != own.get(name):
            raise CheckpointError(
                f"parameter {name!r} is {_place(saved.get(name))} of the checkpoint's optimizer and {_place(own.get(name))} of the engine's: {remedy}"
            )
    _check_shared_states(entry, masters, families)


def _place(group: int | None) -> str:
    return "in no group" if group is None else f"in group {group}"


def _check_shared_states(entry: OptimizerEntry, masters: MasterState, families: dict[torch.Tensor, ParameterInfo]) -> None:
    """ZeRO steps a group as one tensor: its parameters have the same states and step counts."""
    first: dict[int, str] = {}
    for parameter, info in families.items():
        other = first.setdefault(id(masters.owners[parameter]), info.name)
        if entry.states[info.name].keys() != entry.states[other].keys() or entry.values[info.name] != entry.values[other]:
            raise CheckpointError(
                f"parameters {other!r} and {info.name!r} were stepped differently ({entry.values[other]} and {entry.values[info.name]}), and this "
                "engine steps them as one tensor: load under zero_optimization.stage 0"
            )


def prepare_states(manifest: Manifest, masters: MasterState, families: dict[torch.Tensor, ParameterInfo]) -> None:
    """Forget the optimizer's states but those that the checkpoint has, and make what of these is missing, to be read into: in the dtype of
    the engine's masters where the saved one was that of its, else as saved."""
    kept: dict[torch.Tensor, set[str]] = {}
    for parameter, info in families.items():
        kept.setdefault(masters.owners[parameter], set()).update(manifest.optimizer.states[info.name])
    masters.forget(kept)
    for parameter, info in families.items():
        saved = manifest.tensors[info.name].dtype if info.name in manifest.tensors else None
        states = manifest.optimizer.states[info.name].items()
        masters.prepare(parameter, {state: None if dtype == saved else dtype_of(dtype) for state, dtype in states})


def restore_optimizer(entry: OptimizerEntry, masters: MasterState, families: dict[torch.Tensor, ParameterInfo]) -> None:
    """Step counts and the options of every group."""
    for parameter, info in families.items():
        for state, value in entry.values[info.name].items():
            masters.set_value(parameter, state, decode(value))
    for part in masters.base.param_groups:
        saved = entry.groups[part[ORIGIN_KEY]].options
        options = {key: decode(value) for key, value in saved.items() if key not in _IMPLEMENTATION}
        for key, value in options.items():
            current = part.get(key)
            part[key] = value.to(current.device) if isinstance(value, torch.Tensor) and isinstance(current, torch.Tensor) else value


# A scheduler keeps lists with one entry for each of the optimizer's groups, which another topology splits otherwise.


def joined_scheduler_state(state: Any, origins: list[int], groups: int, is_by_group) -> Any:
    """With one entry for each of the user's groups. ``origins``: of each group that the optimizer has now."""

    def join(values: list) -> list:
        first = dict(reversed(list(zip(origins, values, strict=True))))
        return [first.get(origin) for origin in range(groups)]

    return _mapped(state, len(origins), is_by_group, join)


def split_scheduler_state(state: Any, origins: list[int], groups: int, is_by_group) -> Any:
    """The reverse."""
    return _mapped(state, groups, is_by_group, lambda values: [values[origin] for origin in origins])


def _mapped(state: Any, length: int, is_by_group, change) -> Any:
    if not isinstance(state, dict):
        return state
    changed = {}
    for key, value in state.items():
        if key == "_schedulers" and isinstance(value, list):
            changed[key] = [_mapped(inner, length, is_by_group, change) for inner in value]
        elif isinstance(value, list) and len(value) == length and is_by_group(key):
            changed[key] = change(value)
        else:
            changed[key] = value
    return changed
