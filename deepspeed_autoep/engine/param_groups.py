"""Split optimizer parameter groups by where their gradients are reduced, keeping order and every option.

ZeRO partitions a group over one process group, so experts (EDP) need groups of their own; and replicated parameters
get theirs so that their partitions line up over the lanes of a TP group, whatever the sizes of the TP shards. And it
flattens a group into one tensor, so a group has one dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

import torch

from deepspeed_autoep.errors import ModelError
from deepspeed_autoep.folding.families import FAMILY_RULES, GradientFamily
from deepspeed_autoep.gradients.slices import ParameterInfo

Families = Mapping[torch.nn.Parameter, ParameterInfo]

ORIGIN_KEY = "autoep_origin"  # index of the user's group that a split group came from


def _kind(family: GradientFamily) -> str:
    """Of two parameters of one kind the gradients go the same way: "edp" and "expert_shared" are a rule's data groups."""
    if family.is_expert:
        return FAMILY_RULES[family].data_group
    return "replicated" if family.meets_tp_peers else "tp_sharded"


def as_groups(model_parameters: Iterable) -> list[dict]:
    """Parameters or parameter groups, as ``torch.optim`` takes them -> list of groups (copied, tensors shared).

    As there, items may be tensors, ``(name, tensor)`` pairs or dictionaries. Raises :class:`ModelError` for anything else.
    """
    items = as_list(model_parameters)
    if not any(isinstance(item, dict) for item in items):
        items = [{"params": items}] if items else []
    groups = []
    for origin, item in enumerate(items):
        if not isinstance(item, dict) or "params" not in item:
            raise ModelError(
                f"model_parameters[{origin}] is no parameter group (a dictionary with 'params'), got {type(item).__name__}: legal are "
                "tensors, (name, tensor) pairs, or parameter groups only"
            )
        groups.append(_named_apart({**item, "params": as_list(item["params"])}, origin))
    return groups


def as_list(params) -> list:
    if isinstance(params, set | frozenset):
        raise ModelError("model_parameters holds a set, whose order differs between ranks: give a list")
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _named_apart(group: dict, origin: int) -> dict:
    """``(name, tensor)`` pairs apart, as ``torch.optim`` keeps them."""
    pairs = [item for item in group["params"] if isinstance(item, tuple)]
    if pairs:
        if len(pairs) != len(group["params"]):
            raise ModelError(f"model_parameters: parameter group {origin} has names for {len(pairs)} of {len(group['params'])} parameters")
        group |= {"params": [tensor for _, tensor in pairs], "param_names": [name for name, _ in pairs]}
    for position, tensor in enumerate(group["params"]):
        if not isinstance(tensor, torch.Tensor):
            raise ModelError(f"model_parameters: item {position} of parameter group {origin} is a {type(tensor).__name__}, not a tensor")
    return group


def split_groups(groups: list[dict], families: Families, expert_group_names: Mapping[str, str]) -> list[dict]:
    """Split every group: TP shards, replicated, and experts by what they are reduced over (marked as DeepSpeed's MoE groups);
    and each of these by dtype.

    ``expert_group_names``: DeepSpeed's name of each group of ranks that an expert's gradient is reduced over.

    Frozen parameters leave the groups (they have no gradient rule); a group without trainable parameters goes.
    """
    result: list[dict] = []
    for origin, group in enumerate(groups):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        split: dict[str, list] = {kind: [] for kind in ("tp_sharded", "replicated", *expert_group_names)}
        names = dict(zip(group["params"], group.get("param_names", ()), strict=False))
        for parameter in group["params"]:
            info = families.get(parameter)
            if info is not None:
                split[_kind(info.family)].append(parameter)
        for kind, members in split.items():
            dtypes = sorted({parameter.dtype for parameter in members}, key=str)
            for dtype in dtypes:
                parameters = [parameter for parameter in members if parameter.dtype == dtype]
                # A tensor (a learning rate) is written to in place.
                own = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
                made = {**own, "params": parameters, ORIGIN_KEY: origin}
                if names:
                    made["param_names"] = [names[parameter] for parameter in parameters if parameter in names]
                if kind in expert_group_names:
                    made |= {"moe": True, "name": expert_group_names[kind]}
                else:
                    suffix = f"-{str(dtype).removeprefix('torch.')}" if len(dtypes) > 1 else ""
                    made["name"] = f"{options.get('name', f'group{origin}')}-{kind}{suffix}"
                result.append(made)
    return result


def split_optimizer(optimizer: torch.optim.Optimizer, families: Families, expert_group_names: Mapping[str, str]) -> list[int]:
    """Split the groups of a client's optimizer in place. Its tensors are the model's own: experts are cut in place.

    Returns, for each new group, the position of the group that it came from.
    """
    optimizer.param_groups[:] = split_groups(optimizer.param_groups, families, expert_group_names)
    return [group[ORIGIN_KEY] for group in optimizer.param_groups]


# Words in the names of a scheduler's lists that have one entry a group, and of those that have not, whatever their length
# (milestones): base_lrs, lr_lambdas, max_momentums, base_values against _milestones, lr_decay_steps.
_BY_GROUP = ("lr", "mom", "lambda", "base", "beta")
_BY_TIME = ("milestone", "step", "epoch", "schedul", "iter")


def is_by_group(name: str) -> bool:
    """Whether a list of this name in a scheduler has one entry a group."""
    return any(word in name for word in _BY_GROUP) and not any(word in name for word in _BY_TIME)


def split_scheduler(scheduler, origins: list[int], groups: int) -> None:
    """A scheduler built on the user's ``groups`` groups keeps lists with one entry a group: split them alike."""
    for inner in getattr(scheduler, "_schedulers", ()):
        split_scheduler(inner, origins, groups)
    for name, value in getattr(scheduler, "__dict__", {}).items():
        if is_by_group(name) and isinstance(value, list) and len(value) == groups:
            setattr(scheduler, name, [value[origin] for origin in origins])


# What a split group has for itself; all else it shares with its siblings.
OF_ONE_PART = ("params", "param_names", "name", "moe")


@contextlib.contextmanager
def users_groups(optimizer: torch.optim.Optimizer, groups: int):
    """Shows the optimizer with the user's ``groups`` groups, for a scheduler that is built on it: one learning rate, one
    function each. What it writes to a group goes to all parts. Gives, for each part, the group that it came from."""
    parts = list(optimizer.param_groups)
    first = {part[ORIGIN_KEY]: part for part in reversed(parts)}
    optimizer.param_groups[:] = [first.get(origin) or {**optimizer.defaults, "params": []} for origin in range(groups)]
    try:
        yield [part[ORIGIN_KEY] for part in parts]
    finally:
        optimizer.param_groups[:] = parts
        for part in parts:
            shared = {key: value for key, value in first[part[ORIGIN_KEY]].items() if key not in OF_ONE_PART}
            part.update({key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in shared.items()})
