"""What a model's tensors become in files: transformers' loading conversions, undone for one group of tensors at a time.

transformers undoes them for a whole state dict at once (``revert_weight_conversion``). Here that function runs once, on tensors
without data, with converters that note what they are given and what they make; later each is run alone, on real tensors.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from deepspeed_autoep.errors import ModelError

_SHOWN = 5  # names in a message


@dataclass(frozen=True)
class FileTensor:
    """One tensor of the files, before it is there."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ReverseGroup:
    """Tensors of the model that are converted together.

    ``sources``: pattern of the converter -> names in the model. ``made``: the converter's name of a result -> its tensors in the
    files: one, or with ``by_expert == "listed"`` one an expert, in order. ``by_expert``: that the group can be converted for one
    expert (row ``[1, ...]`` of each source) at a time, into tensors of their own ("listed") or rows of one ("stacked").
    """

    sources: dict[str, tuple[str, ...]]
    made: dict[str, tuple[FileTensor, ...]]
    converter: object | None = None  # None: one tensor under another name
    layer_name: str = ""  # what the converter is told
    by_expert: Literal["listed", "stacked"] | None = None
    num_experts: int = 0

    @property
    def source_names(self) -> list[str]:
        return [name for names in self.sources.values() for name in names]

    def steps(self) -> Iterator[int | None]:
        """The experts to convert one after the other, or None once: all together."""
        yield from range(self.num_experts) if self.by_expert else (None,)

    def file_tensors(self) -> list[FileTensor]:
        """In the order in which :meth:`steps` complete them."""
        return [tensor for same_expert in zip(*self.made.values(), strict=True) for tensor in same_expert]

    def convert(self, tensors: dict[str, list[torch.Tensor]], model, expert: int | None) -> Iterator[tuple[FileTensor, int | None, torch.Tensor]]:
        """``tensors``: by pattern, all of the sources or one expert's row ``[1, ...]`` of each -> (tensor of the files, its row or
        None, value ``[...]`` or ``[1, ...]``). ``model`` has the whole model's ``config``."""
        for name, value in _run(self.converter, self.layer_name, tensors, model).items():
            files = self.made[name]
            yield files[expert if self.by_expert == "listed" else 0], expert if self.by_expert == "stacked" else None, value


def plan_reversal(model, tensors: dict[str, torch.Tensor], stacked: Collection[str]) -> list[ReverseGroup]:
    """``tensors``: those of ``model`` that are saved, by name, on the meta device. ``stacked``: names of those with experts along
    dimension 0.

    The conversions are those that ``from_pretrained`` noted on the model, else the family's. Raises :class:`ModelError`: a tensor
    cannot be converted back, or two would have one name.
    """
    from transformers.core_model_loading import revert_weight_conversion

    log: list[_Conversion] = []
    inputs = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    recorder = _Recorder(model, log)
    try:
        files = revert_weight_conversion(recorder, dict(inputs))
    except Exception as error:  # a converter's own, of any kind
        raise ModelError(f"{type(model).__name__} cannot be brought to the names it is published with: {error!r}") from error

    names = {id(tensor): name for name, tensor in inputs.items()}
    finals = {id(tensor): name for name, tensor in files.items()}
    groups = [_group(conversion, names, finals) for conversion in log]
    converted = {name for group in groups for name in group.source_names}
    lost = [name for name, tensor in inputs.items() if name not in converted and id(tensor) not in finals]
    if lost:
        raise ModelError(f"{type(model).__name__}: {some_names(lost)} would be saved under a name that another tensor has")
    for name, tensor in inputs.items():
        if name not in converted:
            made = FileTensor(finals[id(tensor)], tuple(tensor.shape), tensor.dtype)
            groups.append(ReverseGroup({name: (name,)}, {name: (made,)}, layer_name=name))
    order = {name: place for place, name in enumerate(inputs)}
    groups.sort(key=lambda group: min(order[name] for name in group.source_names))
    return [_by_expert(group, tensors, model) if all(name in stacked for name in group.source_names) else group for group in groups]


@dataclass(frozen=True)
class _Conversion:
    """One run of a converter, on tensors without data."""

    converter: object
    layer_name: str
    sources: dict[str, list[torch.Tensor]]
    made: dict[str, torch.Tensor]


class _Recorder:
    """Stands for a model in ``revert_weight_conversion``: its converters write to ``log`` what they do."""

    def __init__(self, model, log: list[_Conversion]) -> None:
        self.config, self._model = model.config, model
        self._weight_conversions = [_Recorded(each, log) for each in _conversions(model)]

    def get_parameter(self, name: str) -> torch.Tensor:
        return self._model.get_parameter(name)


def _conversions(model) -> list:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    noted = getattr(model, "_weight_conversions", None)
    if noted is None:
        # As save_pretrained: whether the files had a prefix is known of the ones that were loaded only.
        noted = [each for each in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(each, PrefixChange)]
    return copy.deepcopy(noted)  # reverse_transform changes lists of the transform's own


class _Recorded:
    """A conversion whose reverse takes notes."""

    def __init__(self, transform, log: list[_Conversion]) -> None:
        self._transform, self._log = transform, log

    def reverse_transform(self):
        from transformers.core_model_loading import WeightConverter

        reverse, log = self._transform.reverse_transform(), self._log
        if not isinstance(reverse, WeightConverter):
            return reverse
        kind = type(reverse)

        class Recording(kind):
            __slots__ = ()

            def convert(self, layer_name: str, *arguments, **options):
                sources = {pattern: list(tensors) for pattern, tensors in self.collected_tensors.items()}
                result = kind.convert(self, layer_name, *arguments, **options)
                made = {name: value[0] if isinstance(value, list) else value for name, value in result.items()}
                self.__class__ = kind  # the notes are complete: what it converts later is not to be kept
                log.append(_Conversion(self, layer_name, sources, made))
                return made

        reverse.__class__ = Recording
        return reverse


def _group(conversion: _Conversion, names: dict[int, str], finals: dict[int, str]) -> ReverseGroup:
    sources = {pattern: tuple(names[id(tensor)] for tensor in tensors) for pattern, tensors in conversion.sources.items()}
    lost = [name for name, value in conversion.made.items() if id(value) not in finals]
    if lost:
        raise ModelError(f"{some_names([name for some in sources.values() for name in some])}: {some_names(lost)} would be saved under a name that another tensor has")
    made = {name: (FileTensor(finals[id(value)], tuple(value.shape), value.dtype),) for name, value in conversion.made.items()}
    return ReverseGroup(sources, made, conversion.converter, conversion.layer_name)


def _run(converter, layer_name: str, tensors: dict[str, list[torch.Tensor]], model) -> dict[str, torch.Tensor]:
    if converter is None:
        return {layer_name: tensors[layer_name][0]}
    for pattern, values in tensors.items():
        for value in values:
            converter.add_tensor(layer_name, pattern, pattern, value)
    made = converter.convert(layer_name, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _by_expert(group: ReverseGroup, tensors: dict[str, torch.Tensor], model) -> ReverseGroup:
    """The group, to be converted one expert at a time where that gives the same; ``group``'s sources are stacked experts."""
    counts = {tensors[name].shape[0] for name in group.source_names}
    operations = getattr(group.converter, "operations", [])
    if len(counts) != 1:
        return group
    count = counts.pop()
    dims = min(tensors[name].dim() for name in group.source_names)
    listed = bool(operations) and type(operations[-1]).__name__ == "SplitModulelist" and operations[-1].dim == 0
    if not all(_keeps_experts_apart(operation, dims) for operation in (operations[:-1] if listed else operations)):
        return group
    rows = {pattern: [torch.empty_like(tensors[name][:1]) for name in names] for pattern, names in group.sources.items()}
    of_one = _run(group.converter, group.layer_name, rows, model)
    made = _made_by_expert(group.made, of_one, count) if listed else group.made
    if made is None or made.keys() != of_one.keys():
        return group
    for name, value in of_one.items():
        whole = (value.shape if listed else (count, *value.shape[1:]), value.dtype)
        if any((tensor.shape, tensor.dtype) != whole for tensor in made[name]):
            return group
    return replace(group, made=made, by_expert="listed" if listed else "stacked", num_experts=count)


def _keeps_experts_apart(operation, dims: int) -> bool:
    """Whether it does to each index of dimension 0, of ``dims`` or more, what it does to all."""
    kind = type(operation).__name__
    if kind == "Transpose":
        along = () if operation.check_dims else (operation.dim0, operation.dim1)  # it would compare shapes with the whole model's
    elif kind in ("Chunk", "Concatenate", "Interleave"):
        along = (operation.dim,)
    else:
        return False
    # A negative dimension means another one where tensors differ in number of dimensions; none does today.
    return bool(along) and all(0 < dim < dims for dim in along)


def _made_by_expert(made: dict[str, tuple[FileTensor, ...]], of_one: dict[str, torch.Tensor], count: int) -> dict[str, tuple[FileTensor, ...]] | None:
    """Results of a whole group, gathered for each of those of its first expert; None unless their names count the experts."""
    names = list(made)
    if len(names) != count * len(of_one):
        return None
    gathered = {first: names[place * count : (place + 1) * count] for place, first in enumerate(of_one)}
    for first, run in gathered.items():
        if any(name not in _numbered(first, expert) for expert, name in enumerate(run)):
            return None
    return {first: tuple(made[name][0] for name in run) for first, run in gathered.items()}


def _numbered(first: str, expert: int) -> set[str]:
    """``first``, the name of expert 0, with ``expert`` in the place of one of its components "0"."""
    parts = first.split(".")
    return {".".join([*parts[:place], str(expert), *parts[place + 1 :]]) for place, part in enumerate(parts) if part == "0"}


def some_names(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
