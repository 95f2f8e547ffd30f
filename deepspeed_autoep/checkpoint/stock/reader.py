"""Open a stock checkpoint and read its tensors by the names of the Hugging Face model. No process group, no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from deepspeed_autoep.checkpoint.slices import Box, box_shape, show
from deepspeed_autoep.checkpoint.stock.expert_files import ExpertFiles
from deepspeed_autoep.checkpoint.stock.files import StockFiles
from deepspeed_autoep.checkpoint.stock.kinds import EXPERT_FILE, ZERO_FILE, StockKind, conversion, detect, numbered
from deepspeed_autoep.checkpoint.stock.model_files import ModelFiles
from deepspeed_autoep.checkpoint.stock.names import NameMap
from deepspeed_autoep.checkpoint.stock.shards import ZeroShards
from deepspeed_autoep.checkpoint.stock.sources import Source, whole
from deepspeed_autoep.checkpoint.stock.table import (
    MASTER,
    WEIGHT,
    StockGroup,
    StockTensor,
    logical_groups,
    logical_tensors,
)
from deepspeed_autoep.checkpoint.stock.universal import universal_optimizer, universal_tensors
from deepspeed_autoep.compat import stock_keys
from deepspeed_autoep.errors import CheckpointError

_PLAIN = (bool, int, float, str, type(None))
_SHOWN = 5


class StockReader:
    """A stock checkpoint as the unmodified Hugging Face model has it. Made by :func:`open_stock`; nothing in it changes.

    ``kind``, ``folder``; ``dp_size``, ``tp_size``, ``ep_size``: of the run that saved it. ``aliases``: further names in the model's
    state dict -> the parameter that they are (known with ZeRO only). ``trained``: names of what the optimizer trains, None where
    the files do not say (ZeRO-0). ``states_missing``: why there are no optimizer states, None where there are. ``step_counts``: the
    optimizer's steps by parameter. ``groups``: see :class:`StockGroup`. ``global_steps``, ``global_samples``, ``skipped_steps``,
    ``client_state``, ``lr_scheduler`` (its state dict or None), ``ds_config``: as saved. ``loss_scale``: ``cur_scale`` and
    what else a dynamic scale needs, None where there is none.
    """

    def __init__(self, folder: Path, *, like: Mapping[str, Sequence[int]] | None = None, trust_files: bool = False) -> None:
        self.folder = Path(folder)
        kind = detect(self.folder)
        if kind is None:
            raise CheckpointError(
                f"{self.folder} holds no checkpoint of DeepSpeed: a folder of mp_rank_*_model_states.pt is legal, as save_checkpoint writes it under its tag"
            )
        self.kind: StockKind = kind
        self._files = StockFiles(self.folder, trust_files)
        self._model = model = ModelFiles(self._files)
        if kind is not StockKind.UNIVERSAL:
            self._refuse_unread()
        self._experts = ExpertFiles(self._files)
        self._stacks = {stack: layer for layer in model.layers for stack in layer.stacks()}
        self._name_map = NameMap(model.layers, model.ds_config, model.module_names, model.paths[0])
        self._check_expert_bias()

        self.states_missing: str | None = None
        trained, scaler = self._trained()
        tensors = logical_tensors(self._with_weights(trained), self._name_map, like, self.folder)
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self.aliases = {self._logical(alias): self._logical(name) for alias, name in model.aliases.items() if self._logical(alias)}
        self._buffers = {self._logical(name): model.buffer(name) for name in sorted(model.buffer_names & set(model.module_names)) if self._logical(name)}

        self.trained: frozenset[str] | None = None if trained is None else frozenset(t.name for t in tensors if t.trained)
        self.step_counts = {tensor.name: tensor.step for tensor in tensors if tensor.step is not None}
        self.groups: tuple[StockGroup, ...] = self._groups()
        self.loss_scale: dict[str, Any] | None = _loss_scale(scaler)
        self.dp_size, self.tp_size = model.dp_size, model.tp_size
        self.ep_size = model.layers[0].ep_size if model.layers else 1
        self.global_steps = model.counters["global_steps"]
        self.global_samples = model.counters["global_samples"]
        self.skipped_steps = model.counters["skipped_steps"]
        self.client_state, self.lr_scheduler, self.ds_config = model.client_state, model.lr_scheduler, model.ds_config

    def names(self) -> list[str]:
        """The model's parameters. Tied ones under their first name, where that is known: see ``aliases``."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole parameter. Raises :class:`CheckpointError` for a name that is not in :meth:`names`."""
        return self._tensor(name).shape

    def states(self, name: str) -> dict[str, torch.dtype]:
        """What is stored of a parameter, and its dtype there: ``master`` (the optimizer's own copy), the optimizer's states as it
        calls them (``exp_avg``, ``exp_avg_sq`` ...), and ``weight`` (the model's own value; all there is of a frozen parameter).
        All have the parameter's shape. ``master`` or ``weight`` is always there."""
        return {state: source.dtype for state, source in self._tensor(name).states.items()}

    def read(self, name: str, state: str = MASTER, box: Box | None = None) -> torch.Tensor:
        """A state of a parameter, whole or the elements of ``box`` (a ``(start, stop)`` for each dimension): on the CPU, contiguous,
        in the stored dtype, and the caller's own.

        Raises :class:`CheckpointError` for a name, state or box that is not there, and for files that changed since they were opened.
        """
        sources = self._tensor(name).states
        if state not in sources:
            raise CheckpointError(f"{self.folder} has no {state!r} of {name!r}: legal are {sorted(sources)}{f' ({self.states_missing})' if self.states_missing else ''}")
        return self._read(name, sources[state], box)

    def buffers(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The model's persistent buffers: shape and dtype."""
        return {name: (source.shape, source.dtype) for name, source in self._buffers.items()}

    def read_buffer(self, name: str, box: Box | None = None) -> torch.Tensor:
        """As :meth:`read`."""
        if name not in self._buffers:
            raise CheckpointError(f"{self.folder} has no buffer {name!r}: legal are {sorted(self._buffers)[:_SHOWN]}")
        return self._read(name, self._buffers[name], box)

    def _tensor(self, name: str) -> StockTensor:
        if name not in self._tensors:
            raise CheckpointError(f"{self.folder} has no parameter {name!r}; it has {len(self._tensors)}, the first of them {list(self._tensors)[:_SHOWN]}")
        return self._tensors[name]

    def _read(self, name: str, source: Source, box: Box | None) -> torch.Tensor:
        box = whole(source.shape) if box is None else tuple(tuple(side) for side in box)
        if len(box) != len(source.shape) or any(not 0 <= start <= stop <= size for (start, stop), size in zip(box, source.shape, strict=True)):
            raise CheckpointError(f"{name!r} has the shape {list(source.shape)}: the slice {show(box)} is not in it")
        value = source.read(self._files, box)
        if tuple(value.shape) != box_shape(box):
            raise CheckpointError(f"{name!r} in {self.folder} gave a tensor of shape {list(value.shape)} for the slice {show(box)}")
        return value.clone(memory_format=torch.contiguous_format)

    def _refuse_unread(self) -> None:
        model = self._model
        if model.is_stage3:
            raise CheckpointError(f"{model.paths[0]} is of ZeRO-3, whose partitions are not read. {conversion(self.folder)}")
        if self.kind is StockKind.AUTOEP and not model.layers:
            path = next(iter(numbered(self.folder, EXPERT_FILE).values()))
            raise CheckpointError(
                f"{path} is of deepspeed.moe.layer.MoE, a layer of DeepSpeed's own and no experts of a Hugging Face model ({model.paths[0].name} has no "
                f"{stock_keys.AUTOEP_LAYERS_KEY!r}): that is not read"
            )
        if self.kind is StockKind.SHARDED and model.layers:
            raise CheckpointError(f"{self.folder} lacks layer_0_expert_0_mp_rank_00_model_states.pt: {model.paths[0].name} was saved with files of single experts")

    def _check_expert_bias(self) -> None:
        """A bias that older versions of stock add to the router's scores has no place in the model: without it other experts are chosen."""
        for layer in self._model.layers:
            name = f"{layer.block}.expert_bias"
            if name in self._model.module_names and self._files.load(self._model.paths[0])["module"][name].any():
                raise CheckpointError(f"{self._model.paths[0]} has a {name!r} that is not zero (load_balance_coeff): the model has no such bias, so it would compute something else")

    def _trained(self) -> tuple[dict[str, StockTensor] | None, Any]:
        """What the optimizer trains, under stock's names, None where the files do not say; and where the loss scale stands."""
        model, files = self._model, self._files
        if self.kind is StockKind.UNIVERSAL:
            tensors = {tensor.name: tensor for tensor in universal_tensors(files, model)}
            self._optimizer_path, optimizer = universal_optimizer(files)
            self._options = optimizer[stock_keys.PARAM_GROUPS]
            return tensors, optimizer.get(stock_keys.LOSS_SCALER)
        if model.param_shapes is None and not numbered(self.folder, ZERO_FILE):
            self.states_missing = (
                "it was saved without ZeRO: its optimizer's states are numbered in the order in which the optimizer got the parameters, which no file says"
            )
            self._options = None
            return None, files.load(model.paths[0]).get("optimizer")
        shards = ZeroShards(files, model, self._experts)
        tensors = {tensor.name: tensor for tensor in shards.tensors()}
        path = next(iter(shards.paths.values()))
        self._optimizer_path = path
        self._options = [group.options for group in shards.base(path)]
        self._group_names = _group_names(shards, path, len(self._options))
        return tensors, shards.first().get(stock_keys.LOSS_SCALER)

    def _with_weights(self, trained: dict[str, StockTensor] | None) -> list[StockTensor]:
        """All parameters under stock's names, in the model files' order, with the model's own values."""
        model, trained = self._model, trained or {}
        found: list[StockTensor] = []
        for name in model.module_names if not model.is_stage3 else ():
            if name in model.buffer_names or name in model.aliases or self._logical(name) is None:
                continue
            found.append(self._weighted(name, trained, self._weight_or_none(name, required=name not in trained)))
        if model.is_stage3:
            frozen = self._files.load(model.paths[0]).get(stock_keys.FROZEN_PARAM_SHAPES) or {}
            found += [self._weighted(name, trained, model.weight(name)) for name in frozen if name not in trained]
        for name, layer in self._stacks.items():
            source = None if self.kind is StockKind.UNIVERSAL else self._experts.stacks(layer)[name]
            if source is None and name not in trained:
                raise CheckpointError(
                    f"{self.folder} lacks {name!r}: frozen experts are not in universal checkpoints. Read the checkpoint that it was converted from"
                )
            found.append(self._weighted(name, trained, source))
        have = {tensor.name for tensor in found}
        return found + [tensor for name, tensor in trained.items() if name not in have]

    def _weighted(self, name: str, trained: dict[str, StockTensor], weight: Source | None) -> StockTensor:
        tensor = trained.get(name)
        if tensor is None:
            return StockTensor(name, {WEIGHT: weight}, trained=False)
        if weight is None:
            return tensor
        if weight.shape != tensor.shape:
            raise CheckpointError(f"{self.folder}: {name!r} has the shape {list(weight.shape)} in the model's files and {list(tensor.shape)} in the optimizer's")
        return StockTensor(name, {**tensor.states, WEIGHT: weight}, tensor.trained, tensor.step)

    def _weight_or_none(self, name: str, required: bool) -> Source | None:
        """Of a universal checkpoint with TP the model files may not say how a weight was cut: then its master is what is read."""
        try:
            return self._model.weight(name)
        except CheckpointError:
            if required or self.kind is not StockKind.UNIVERSAL:
                raise
            return None

    def _logical(self, name: str) -> str | None:
        return name if name in self._stacks else self._name_map.logical(name)

    def _groups(self) -> tuple[StockGroup, ...]:
        if self._options is None:
            return ()
        names: list[tuple[str, ...] | None]
        if self.kind is StockKind.UNIVERSAL:
            shapes = self._model.param_shapes or []
            if len(shapes) == len(self._options):
                names = [tuple(group) for group in shapes]
            elif self._model.is_stage3:  # which cuts a group into several, and does not say how
                names = [None] * len(self._options) if len(self._options) > 1 else [tuple(name for group in shapes for name in group)]
            else:
                raise CheckpointError(f"{self._optimizer_path} has {len(self._options)} parameter groups, {self._model.paths[0].name} {len(shapes)}")
        else:
            names = list(self._group_names)
        groups = [
            StockGroup(group, _options(options), any(name in self._stacks for name in group or ())) for group, options in zip(names, self._options, strict=True)
        ]
        return logical_groups(groups, self._name_map, self.folder)


def _group_names(shards: ZeroShards, first: Path, count: int) -> list[tuple[str, ...]]:
    """Of each parameter group all names, whichever ranks' partitions hold them."""
    found: list[dict[str, None]] = [{} for _ in range(count)]
    for shard in shards.shards.values():
        for name, part in shard.parts.items():
            if part.group >= count:
                raise CheckpointError(f"{shard.path} has a group {part.group}, {first.name} has {count} groups")
            found[part.group][name] = None
    return [tuple(names) for names in found]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers, texts and tuples of a parameter group; tensors of one element as numbers."""
    found = {}
    for key, value in group.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, list | tuple) and all(isinstance(item, _PLAIN) for item in value):
            value = tuple(value)
        elif not isinstance(value, _PLAIN):
            continue
        if key not in ("params", "moe", "name", "step"):
            found[key] = value
    return found


def _loss_scale(holder: Any) -> dict[str, Any] | None:
    """Of a loss scaler, or of the dictionary that ZeRO-0's wrappers write."""
    values = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
    if "cur_scale" not in values:
        return None
    return {key: value for key, value in values.items() if isinstance(value, _PLAIN)}


def open_stock(folder: Path, *, like: Mapping[str, Sequence[int]] | None = None, trust_files: bool = False) -> StockReader:
    """Open the stock checkpoint in the tag folder ``folder``; every file of it is opened and checked, no tensor is read.

    ``like``: shapes of the Hugging Face model's parameters by name, needed only where the model stores experts as
    ``[E, H, 2 I]``, which stock turns round. ``trust_files``: read files that hold instances of any class, whose code then runs.

    Raises :class:`CheckpointError` that names the file at fault and what was found: missing, damaged, of a wrong shape, left of
    another checkpoint, or of a layout that is not read (ZeRO-3, pipelines, states swapped to NVMe, DeepSpeed's own MoE layers), and
    then how to convert it.
    """
    return StockReader(folder, like=like, trust_files=trust_files)
