"""Which tensors of the files make up which tensors of the model. Reads names and headers only.

Files keep the names and layouts that a family was published with; transformers v5 stacks experts and renames while it
loads, by a list of renamings and converters for each family (its ``conversion_mapping``). Here the same list is
followed, one group of tensors at a time, and groups that stack experts can be converted for single experts.
"""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from deepspeed_autoep.errors import ModelError
from deepspeed_autoep.moe.weight_layout import ExpertTensor
from deepspeed_autoep.peft_adapters import is_wrapper
from deepspeed_autoep.weights.files import SafetensorsFolder

_SHOWN = 5  # names in a message


@dataclass(frozen=True)
class WeightGroup:
    """Tensors of the files that are converted together.

    ``sources``: pattern of the converter -> names in the files, in the order of the experts where these are tensors of their own.
    ``by_expert``: whether it can be read for one expert at a time, from tensors of their own ("listed") or rows of one ("stacked").
    """

    first_target: str
    targets: tuple[str, ...]
    sources: dict[str, tuple[str, ...]]
    converter: object | None  # None: one tensor under another name
    by_expert: Literal["listed", "stacked"] | None = None

    def read(self, folder: SafetensorsFolder, expert: int | None = None) -> dict[str, list[torch.Tensor]]:
        """Pattern -> tensors: all of the group, or those of one expert where :attr:`by_expert` says so."""
        if expert is None:
            return {pattern: [folder.read(name) for name in names] for pattern, names in self.sources.items()}
        if self.by_expert == "stacked":
            return {pattern: [folder.read(name, expert) for name in names] for pattern, names in self.sources.items()}
        return {pattern: [folder.read(names[expert])] for pattern, names in self.sources.items()}

    def convert(self, tensors: dict[str, list[torch.Tensor]], model: WholeModel) -> dict[str, torch.Tensor]:
        """``tensors``: as :meth:`read` gives them -> the model's tensors by name, of all experts or of one."""
        if self.converter is None:
            return {self.first_target: tensors[self.first_target][0]}
        converter = copy.deepcopy(self.converter)
        for pattern, values in tensors.items():
            for value in values:
                converter.add_tensor(self.first_target, pattern, pattern, value)
        made = converter.convert(self.first_target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class WholeModel:
    """What converters may ask of a model, as it was before it was cut: some decide by a parameter's shape."""

    def __init__(self, config, tensors: dict[str, torch.Tensor]) -> None:
        self.config, self._tensors = config, tensors

    @staticmethod
    def of(model: nn.Module) -> WholeModel:
        tensors = model.state_dict()
        return WholeModel(
            getattr(model, "config", None),
            {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()},
        )

    def with_one_expert(self, experts: Iterable[str]) -> WholeModel:
        """The same with one expert in each of the stacked tensors ``experts``."""
        return WholeModel(self.config, self._tensors | {name: self._tensors[name][:1] for name in experts})

    def get_parameter(self, name: str) -> torch.Tensor:
        return self._tensors[name]


@dataclass(frozen=True)
class WeightPlan:
    """How a model on the meta device gets its weights."""

    folder: SafetensorsFolder
    groups: tuple[WeightGroup, ...]
    unexpected: tuple[str, ...]  # in the files, and not the model's
    whole: WholeModel
    one_expert: WholeModel

    def convert(self, group: WeightGroup, expert: int | None = None) -> dict[str, torch.Tensor]:
        """Read and convert a group, or one expert of it: full name -> tensor, a view of the file perhaps."""
        return group.convert(group.read(self.folder, expert), self.whole if expert is None else self.one_expert)


def check_streamable(model: nn.Module) -> None:
    """Raise :class:`ModelError` for what would be lost or could not be filled in a model on the meta device."""
    for name, module in model.named_modules():
        if is_wrapper(module):
            raise ModelError(
                f"module {name!r} ({type(module).__name__}) is PEFT's, and its model is on the meta device: adapters have no weights to "
                "stream. Load the model with from_pretrained on every rank"
            )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ModelError(f"parameter {name!r} is on the meta device and has gradient hooks, which would be lost: register them after initialize")
        if weakref.getweakrefs(parameter):
            raise ModelError(
                f"parameter {name!r} is on the meta device and something holds a weak reference to it (a WeakKeyDictionary, say), with "
                "which its contents cannot be filled in place: make that after initialize"
            )


def plan_weights(model: nn.Module, folder: SafetensorsFolder, experts: dict[str, ExpertTensor]) -> WeightPlan:
    """``experts``: full name of each stacked tensor of an experts module -> its layout.

    Raises :class:`ModelError`: tensors that are missing in the files, of another shape, or quantized.
    """
    if getattr(getattr(model, "config", None), "quantization_config", None) is not None:
        raise ModelError(f"expert_parallel.initial_weights={folder.source!r}: the model's config has a quantization_config, and quantized weights cannot be streamed. Convert them first")
    wanted = model.state_dict(keep_vars=True)
    whole = WholeModel.of(model)
    plan = WeightPlan(folder, (), (), whole, whole.with_one_expert(experts))
    assigned, unexpected = _assign(model, folder, wanted)
    groups = tuple(_checked(group, plan, wanted, experts) for group in assigned)
    _check_complete(model, folder, wanted, {name for group in groups for name in group.targets})
    return replace(plan, groups=groups, unexpected=tuple(unexpected))


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


def _checked(group: WeightGroup, plan: WeightPlan, wanted: dict, experts: dict[str, ExpertTensor]) -> WeightGroup:
    """The group with all its targets and how it can be read, after a trial on the meta device."""
    folder = plan.folder
    by_expert = _by_expert(group, folder, experts)
    model = plan.whole if by_expert is None else plan.one_expert
    made = _trial(replace(group, by_expert=by_expert), folder, model)
    for name, value in made.items():
        if name not in wanted:
            raise ModelError(f"{_names(group)} of {folder.source} would become {name!r}, which the model does not have")
        expected = tuple(model.get_parameter(name).shape)
        if tuple(value.shape) != expected:
            raise ModelError(
                f"{_names(group)} of {folder.source} would give {name!r} the shape {list(value.shape)}, the model has "
                f"{list(expected)}: are these the weights of another configuration?"
            )
    return replace(group, targets=tuple(made), by_expert=by_expert)


# Converters' operations that do to every expert what they do to all: those that only merge, move and transpose.
_EXPERT_BY_EXPERT = ("MergeModulelist", "Concatenate", "Interleave", "Transpose")


def _by_expert(group: WeightGroup, folder: SafetensorsFolder, experts: dict[str, ExpertTensor]) -> str | None:
    """Whether the group can be read for one expert at a time."""
    if group.first_target not in experts:
        return None
    count = experts[group.first_target].shape[0]
    operations = getattr(group.converter, "operations", [])
    kinds = [type(operation).__name__ for operation in operations]
    if any(kind not in _EXPERT_BY_EXPERT for kind in kinds) or any(getattr(each, "dim", 1) == 0 for each in operations[1:]):
        return None
    shapes = [[folder.tensors[name].shape for name in names] for names in group.sources.values()]
    if kinds[:1] == ["MergeModulelist"]:
        listed = operations[0].dim == 0 and all(len(some) == count and len(set(some)) == 1 for some in shapes)
        return "listed" if listed else None
    along_experts = any(getattr(each, "dim", 1) == 0 or 0 in (getattr(each, "dim0", 1), getattr(each, "dim1", 1)) for each in operations)
    stacked = "MergeModulelist" not in kinds and all(len(some) == 1 and some[0][:1] == (count,) for some in shapes)
    return "stacked" if stacked and not along_experts else None


def _trial(group: WeightGroup, folder: SafetensorsFolder, model: WholeModel) -> dict[str, torch.Tensor]:
    """Convert tensors without data, of one expert where that will be the way."""
    tensors: dict[str, list[torch.Tensor]] = {}
    for pattern, names in group.sources.items():
        for name in names:
            stored = folder.tensors[name]
            if stored.dtype is None:
                raise ModelError(
                    f"tensor {name!r} of {stored.path} is stored as {stored.stored}: quantized weights cannot be streamed. Convert them first"
                )
        values = [torch.empty(folder.tensors[name].shape, dtype=folder.tensors[name].dtype, device="meta") for name in names]
        if group.by_expert == "listed":
            values = values[:1]
        elif group.by_expert == "stacked":
            values = [value[:1] for value in values]
        tensors[pattern] = values
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
