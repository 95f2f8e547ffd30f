"""Which tensors of the files make up which tensors of the model. Reads names and headers only.

Files keep the names and layouts that a family was published with; transformers v5 stacks experts and renames while it
loads, by a list of renamings and converters for each family (its ``conversion_mapping``). Here the same list is
followed, one group of tensors at a time, and groups that stack experts can be converted for single experts.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass

import torch
from torch import nn

from deepspeed_autoep.errors import ModelError
from deepspeed_autoep.moe.weight_layout import ExpertTensor
from deepspeed_autoep.weights.files import SafetensorsFolder

_SHOWN = 5  # names in a message


@dataclass(frozen=True)
class WeightGroup:
    """Tensors of the files that are converted together.

    ``sources``: pattern of the converter -> names in the files, in the order of the experts where they are stacked.
    ``by_expert``: the number of experts, where the group can be read for one expert at a time.
    """

    first_target: str
    targets: tuple[str, ...]
    sources: dict[str, tuple[str, ...]]
    converter: object | None  # None: one tensor under another name
    by_expert: int | None = None

    def convert(self, tensors: dict[str, list[torch.Tensor]], model: nn.Module) -> dict[str, torch.Tensor]:
        """``tensors``: pattern -> tensors -> the model's tensors by name."""
        if self.converter is None:
            return {self.first_target: tensors[self.first_target][0]}
        converter = copy.deepcopy(self.converter)
        for pattern, values in tensors.items():
            for value in values:
                converter.add_tensor(self.first_target, pattern, pattern, value)
        made = converter.convert(self.first_target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


@dataclass(frozen=True)
class WeightPlan:
    """How a model on the meta device gets its weights."""

    folder: SafetensorsFolder
    groups: tuple[WeightGroup, ...]
    unexpected: tuple[str, ...]  # in the files, and not the model's


def plan_weights(model: nn.Module, folder: SafetensorsFolder, experts: dict[str, ExpertTensor]) -> WeightPlan:
    """``experts``: full name of each stacked tensor of an experts module -> its layout.

    Raises :class:`ModelError`: tensors that are missing in the files, of another shape, or quantized.
    """
    if getattr(getattr(model, "config", None), "quantization_config", None) is not None:
        raise ModelError(f"expert_parallel.initial_weights={folder.source!r}: the model's config has a quantization_config, and quantized weights cannot be streamed. Convert them first")
    wanted = model.state_dict(keep_vars=True)
    assigned, unexpected = _assign(model, folder, wanted)
    groups = tuple(_checked(group, model, folder, wanted, experts) for group in assigned)
    _check_complete(model, folder, wanted, {name for group in groups for name in group.targets})
    return WeightPlan(folder, groups, tuple(unexpected))


def _assign(model: nn.Module, folder: SafetensorsFolder, wanted: dict) -> tuple[list[WeightGroup], list[str]]:
    """Follow the family's renamings and converters, as ``convert_and_load_state_dict_in_model`` of transformers does."""
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(model) if isinstance(model, PreTrainedModel) else []
    prefix = getattr(model, "base_model_prefix", None) or None
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}

    found: dict[str, tuple[object | None, dict[str, list[str]]]] = {}
    unexpected: list[str] = []
    for source in sorted(folder.tensors, key=dot_natural_key):
        name, pattern = rename_source_key(source, renamings, converters, prefix, wanted)
        if name not in wanted and source in wanted:
            name, pattern = source, None
        if name not in wanted:
            unexpected.append(source)
            continue
        converter = by_pattern[pattern] if pattern is not None else None
        _, sources = found.setdefault(name, (converter, {}))
        sources.setdefault(name if pattern is None else pattern, []).append(source)
    ignored = _patterns(model, "_keys_to_ignore_on_load_unexpected")
    groups = [
        WeightGroup(name, (name,), {pattern: tuple(names) for pattern, names in sources.items()}, converter)
        for name, (converter, sources) in found.items()
    ]
    return groups, [name for name in unexpected if not ignored or not ignored.search(name)]


def _patterns(model: nn.Module, attribute: str) -> re.Pattern | None:
    patterns = getattr(model, attribute, None)
    return re.compile("|".join(f"({pattern})" for pattern in patterns)) if patterns else None


def _checked(group: WeightGroup, model, folder: SafetensorsFolder, wanted: dict, experts: dict[str, ExpertTensor]) -> WeightGroup:
    """The group with all its targets and how it can be read, after a trial on the meta device."""
    by_expert = _experts_in(group, folder, experts)
    made = _trial(group, model, folder, by_expert)
    for name, value in made.items():
        if name not in wanted:
            raise ModelError(f"{_names(group)} of {folder.source} would become {name!r}, which the model does not have")
        expected = tuple(wanted[name].shape)
        if by_expert is not None:
            expected = (1, *expected[1:])
        if tuple(value.shape) != expected:
            raise ModelError(f"{_names(group)} of {folder.source} would give {name!r} the shape {list(value.shape)}, the model has {list(expected)}: are these the weights of another configuration?")
    return WeightGroup(group.first_target, tuple(made), group.sources, group.converter, by_expert)


def _experts_in(group: WeightGroup, folder: SafetensorsFolder, experts: dict[str, ExpertTensor]) -> int | None:
    """How many experts the group stacks, if it does so by single tensors of equal shapes, or is a stack in the file already."""
    if group.first_target not in experts:
        return None
    count = experts[group.first_target].shape[0]
    if group.converter is None:
        return count
    from transformers.core_model_loading import MergeModulelist

    merge = group.converter.operations[0]
    one_by_one = isinstance(merge, MergeModulelist) and merge.dim == 0
    alike = all(
        len(names) == count and len({folder.tensors[name].shape for name in names}) == 1 for names in group.sources.values()
    )
    return count if one_by_one and alike else None


def _trial(group: WeightGroup, model, folder: SafetensorsFolder, by_expert: int | None) -> dict[str, torch.Tensor]:
    """Convert tensors without data, of one expert where that will be the way."""
    tensors: dict[str, list[torch.Tensor]] = {}
    for pattern, names in group.sources.items():
        for name in names:
            stored = folder.tensors[name]
            if stored.dtype is None:
                raise ModelError(f"tensor {name!r} of {stored.path} is stored as {stored.stored}: quantized weights cannot be streamed. Convert them first")
        used = names[:1] if by_expert is not None else names
        tensors[pattern] = [torch.empty(folder.tensors[name].shape, dtype=folder.tensors[name].dtype, device="meta") for name in used]
    if by_expert is not None and group.converter is None:
        tensors = {pattern: [value[:1] for value in values] for pattern, values in tensors.items()}
    try:
        return group.convert(tensors, model)
    except Exception as error:  # a converter's own, of any kind
        raise ModelError(f"{_names(group)} of {folder.source} cannot be converted to {group.first_target!r}: {error}") from error


def _names(group: WeightGroup) -> str:
    names = [name for some in group.sources.values() for name in some]
    return f"tensor {names[0]!r}" + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


def _check_complete(model: nn.Module, folder: SafetensorsFolder, wanted: dict, given: set[str]) -> None:
    """Every parameter under one of its names, as tied weights have several, and every buffer that is saved."""
    loaded = {id(wanted[name]) for name in given}
    ignored = _patterns(model, "_keys_to_ignore_on_load_missing")
    missing = [
        name
        for name, tensor in wanted.items()
        if id(tensor) not in loaded and (isinstance(tensor, nn.Parameter) or not (ignored and ignored.search(name)))
    ]
    if missing:
        raise ModelError(
            f"expert_parallel.initial_weights={folder.source!r} lacks {len(missing)} of the model's {len(wanted)} tensors: "
            f"{', '.join(missing[:_SHOWN])}{', ...' if len(missing) > _SHOWN else ''}"
        )
