"""What an export reads and writes, settled from names, shapes and dtypes: the same on every rank.

The model's configuration is held against the tensors: a model is built from it on the meta device, and a size that was cut, or
a tensor too few or too many, is an error before anything is read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from deepspeed_autoep.errors import ConfigError, ModelError
from deepspeed_autoep.moe.discovery import find_experts
from deepspeed_autoep.weights.reversal import FileTensor, ReverseGroup, plan_reversal, some_names
from deepspeed_autoep.weights.safetensors_writer import STORED_NAMES, split_into_files
from deepspeed_autoep.weights.stream import expert_layouts


class TensorSource(Protocol):
    """The whole tensors of a model, under the names that they have in it (transformers v5: experts stacked, ``[E, ...]``)."""

    def names(self) -> list[str]:
        """Of every parameter and of every buffer in the state dict. Tied weights may be there under one of their names or all."""

    def describe(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """The whole tensor's shape and dtype, as :meth:`read` gives it."""

    def read(self, name: str, expert: int | None = None) -> torch.Tensor:
        """The tensor, on the CPU, or row ``[1, ...]`` of stacked experts. Later calls must not change its values."""


@dataclass(frozen=True)
class ExportPlan:
    """``model``: built from the configuration, on the meta device. ``files``: name -> its tensors, in the order of writing.

    ``stored_as``: name of a saved tensor in the model -> in the source. ``tied``: the same -> other names that the source has for it.
    """

    model: nn.Module
    groups: tuple[ReverseGroup, ...]
    files: dict[str, tuple[FileTensor, ...]]
    stored_as: dict[str, str]
    tied: dict[str, tuple[str, ...]]

    @property
    def total_bytes(self) -> int:
        return sum(tensor.nbytes for tensors in self.files.values() for tensor in tensors)

    def steps(self) -> Iterator[tuple[ReverseGroup, int | None]]:
        """Groups, or experts of groups, in the order in which they are read, converted and written."""
        for group in self.groups:
            for expert in group.steps():
                yield group, expert

    def read(self, source: TensorSource, group: ReverseGroup, expert: int | None) -> dict[str, list[torch.Tensor]]:
        """What one step converts, by the converter's patterns.

        Raises :class:`ModelError`: a tensor is not as it was described, or two differ that the configuration ties.
        """
        return {pattern: [self._read(source, name, expert) for name in names] for pattern, names in group.sources.items()}

    def read_all(self, source: TensorSource) -> None:
        """All reads of an export, in its order: for ranks that do not write, where reading is a collective."""
        for group, expert in self.steps():
            self.read(source, group, expert)

    def _read(self, source: TensorSource, name: str, expert: int | None) -> torch.Tensor:
        value = _read_checked(source, self.stored_as[name], expert)
        for other in self.tied[name]:
            if not _same_bits(value, _read_checked(source, other, expert)):
                raise ModelError(
                    f"the configuration ties {self.stored_as[name]!r} and {other!r}, and their values differ: tie them, or set "
                    "tie_word_embeddings=False in the configuration"
                )
        return value


def plan_export(source: TensorSource, model: nn.Module, max_shard_bytes: int = 5 * 10**9) -> ExportPlan:
    """``model``: of the source's class, with the whole model's configuration; its tensors are not looked at, and may be cut.

    Raises :class:`ConfigError` for ``max_shard_bytes``, :class:`ModelError` for a model that is not transformers' or is quantized,
    for tensors that are missing, unknown, of another shape than the configuration says or of a dtype without a place in
    safetensors files, and for those that cannot be converted to published names.
    """
    if not isinstance(max_shard_bytes, int) or isinstance(max_shard_bytes, bool) or max_shard_bytes <= 0:
        raise ConfigError(f"max_shard_bytes={max_shard_bytes!r}: legal is a whole number of bytes, 1 or more")
    whole = _whole_model(model)
    tensors = whole.state_dict(keep_vars=True)
    names = _source_names(source, type(model).__name__, tensors)
    for name, others in names.items():
        for other in others:
            _check_described(other, *source.describe(other), tensors[name])
        # Some converters make what has the dtype of the model's parameter.
        shape, dtype = source.describe(others[0])
        tensors[name].data = torch.empty(shape, dtype=dtype, device="meta")

    saved = {name: tensors[name].detach() for name in _saved_names(whole, tensors)}
    groups = tuple(plan_reversal(whole, saved, _stacked_names(whole, tensors)))
    parts = split_into_files((tensor for group in groups for tensor in group.file_tensors()), max_shard_bytes)
    return ExportPlan(
        whole,
        groups,
        {_file_name(place, len(parts)): tuple(part) for place, part in enumerate(parts, start=1)},
        {name: names[name][0] for name in saved},
        {name: tuple(names[name][1:]) for name in saved},
    )


def _whole_model(model: nn.Module) -> nn.Module:
    """Its configuration's model, on the meta device."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise ModelError(f"{type(model).__name__} cannot be exported: legal is a transformers PreTrainedModel, which says what its files look like")
    if getattr(model.config, "quantization_config", None) is not None:
        raise ModelError(f"{type(model).__name__} cannot be exported: its config has a quantization_config. Legal are models without")
    with torch.device("meta"):
        whole = type(model)._from_config(copy.deepcopy(model.config), attn_implementation="eager")
    # None: a model that was not loaded from files, which goes by its family's conversions.
    whole._weight_conversions = getattr(model, "_weight_conversions", None)
    return whole.requires_grad_(False)


def _source_names(source: TensorSource, model: str, tensors: dict[str, torch.Tensor]) -> dict[str, list[str]]:
    """Name in the model -> names in the source of that tensor: its own first, then those that the model ties to it."""
    listed = list(source.names())
    unknown = [name for name in dict.fromkeys(listed) if name not in tensors]
    if unknown:
        raise ModelError(f"the source has tensors that {model} of this configuration does not have: {some_names(unknown)}")
    aliases: dict[int, list[str]] = {}
    for name in dict.fromkeys(listed):
        aliases.setdefault(id(tensors[name]), []).append(name)
    missing = [name for name, tensor in tensors.items() if id(tensor) not in aliases]
    if missing:
        raise ModelError(f"the source lacks tensors of {model}: {some_names(missing)} ({len(listed)} of {len(tensors)} are there)")
    return {name: sorted(aliases[id(tensor)], key=lambda other: other != name) for name, tensor in tensors.items()}


def _check_described(name: str, shape: tuple[int, ...], dtype: torch.dtype, expected: torch.Tensor) -> None:
    if tuple(shape) != tuple(expected.shape):
        raise ModelError(
            f"tensor {name!r} has the shape {list(shape)} in the source, the configuration makes it {list(expected.shape)}: legal are whole "
            "tensors and the whole model's configuration"
        )
    if dtype not in STORED_NAMES:
        raise ModelError(f"tensor {name!r} is {dtype}: legal are {', '.join(str(each) for each in STORED_NAMES)}")


def _saved_names(whole: nn.Module, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Those that save_pretrained writes: of tied weights the one that from_pretrained looks for."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    # It goes by memory, of which tensors on the meta device have none.
    memory = {id(tensor): torch.zeros(1) for tensor in tensors.values()}
    ignored = set(whole._keys_to_ignore_on_save or ())
    kept = {name: memory[id(tensor)] for name, tensor in tensors.items() if name not in ignored}
    try:
        return list(remove_tied_weights_from_state_dict(kept, whole))
    except RuntimeError as error:
        raise ModelError(f"{type(whole).__name__} has tied weights that cannot be told apart: {error}") from error


def _stacked_names(whole: nn.Module, tensors: dict[str, torch.Tensor]) -> set[str]:
    """Names of tensors with experts along dimension 0."""
    try:
        stacked = {id(tensors[name]) for name in expert_layouts(find_experts(whole)) if name in tensors}
    except ModelError:  # a dense model, or experts that are stored in an unknown way: none is read by rows
        return set()
    return {name for name, tensor in tensors.items() if id(tensor) in stacked}


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _read_checked(source: TensorSource, name: str, expert: int | None) -> torch.Tensor:
    shape, dtype = source.describe(name)
    wanted = tuple(shape) if expert is None else (1, *shape[1:])
    value = source.read(name, expert)
    if tuple(value.shape) != wanted or value.dtype != dtype or value.device.type != "cpu":
        raise ModelError(
            f"tensor {name!r}{'' if expert is None else f' of expert {expert}'} was read as {list(value.shape)} {value.dtype} on "
            f"{value.device}, described as {list(wanted)} {dtype} on cpu"
        )
    return value.detach()


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
