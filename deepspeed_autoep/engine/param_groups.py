"""Split optimizer parameter groups by where their gradients are reduced, keeping order and every option.

ZeRO partitions a group over one process group, so experts (EDP) need groups of their own; and replicated parameters
get theirs so that their partitions line up over the lanes of a TP group, whatever the sizes of the TP shards. And it
flattens a group into one tensor, so a group has one dtype.
"""

from __future__ import annotations

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

    As there, items may be tensors, ``(name, tensor)`` pairs or dictionaries.
    """
    items = list(model_parameters)
    if items and isinstance(items[0], dict):
        return [{**group, "params": _as_list(group["params"])} for group in items]
    return [{"params": items}] if items else []


def _as_list(params) -> list:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _parameter_of(item) -> torch.nn.Parameter:
    return item[1] if isinstance(item, tuple) else item


def split_groups(groups: list[dict], families: Families, expert_group_names: Mapping[str, str]) -> list[dict]:
    """Split every group: TP shards, replicated, and experts by what they are reduced over (marked as DeepSpeed's MoE groups);
    and each of these by dtype.

    ``expert_group_names``: DeepSpeed's name of each group of ranks that an expert's gradient is reduced over.

    Frozen parameters leave the groups (they have no gradient rule); a group without trainable parameters goes.
    Raises :class:`ModelError` for parameters that the model does not have: they would train in vain.
    """
    result: list[dict] = []
    for origin, group in enumerate(groups):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        split: dict[str, list] = {kind: [] for kind in ("tp_sharded", "replicated", *expert_group_names)}
        names = dict(zip(map(_parameter_of, group["params"]), group.get("param_names", ()), strict=False))
        for parameter in map(_parameter_of, group["params"]):
            info = families.get(parameter)
            if info is None and parameter.requires_grad:
                raise ModelError(
                    f"the optimizer's parameter group {origin} holds a parameter of shape {list(parameter.shape)} that the "
                    "model does not have: build the optimizer on model.parameters() of the model given to initialize"
                )
            if info is not None:
                split[_kind(info.family)].append(parameter)
        for kind, members in split.items():
            dtypes = sorted({parameter.dtype for parameter in members}, key=str)
            for dtype in dtypes:
                parameters = [parameter for parameter in members if parameter.dtype == dtype]
                made = {**options, "params": parameters, ORIGIN_KEY: origin}
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
    if any(state for state in optimizer.state.values()):
        raise ModelError(
            "the client optimizer has state already (from steps that it took): its shapes are the whole model's. Pass a fresh "
            "optimizer, or declare it in the DeepSpeed configuration"
        )
    optimizer.param_groups[:] = split_groups(optimizer.param_groups, families, expert_group_names)
    return [group[ORIGIN_KEY] for group in optimizer.param_groups]


def split_scheduler(scheduler, origins: list[int]) -> None:
    """A torch scheduler built on the client's optimizer keeps lists with one entry a group: split them alike."""
    if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        return
    for inner in getattr(scheduler, "_schedulers", ()):
        split_scheduler(inner, origins)
    before = len(getattr(scheduler, "base_lrs", ()))
    for name, value in vars(scheduler).items():
        if isinstance(value, list) and name != "_schedulers" and len(value) == before > 0:
            setattr(scheduler, name, [value[origin] for origin in origins])
