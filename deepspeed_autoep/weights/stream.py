"""Fill a model that was cut on the meta device: each rank reads what it keeps, and holds one more tensor at a time."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from deepspeed_autoep.compat import TensorParallel_Layer, without_debug_names
from deepspeed_autoep.errors import ModelError
from deepspeed_autoep.folding.groups import FoldingGroupHandles
from deepspeed_autoep.moe.cutting import cut_expert_tensor
from deepspeed_autoep.moe.layer import AutoEPMoELayer
from deepspeed_autoep.moe.weight_layout import ExpertTensor
from deepspeed_autoep.tensor_parallel import PartitionPlan
from deepspeed_autoep.weights.plan import WeightGroup, WeightPlan


def initialize_buffers(model: nn.Module, plan: WeightPlan, device: torch.device) -> None:
    """Give buffers on the meta device their storage, and the values that the model computes for them (rotary frequencies).

    Parameters stay on meta, where initialisation does nothing. Raises :class:`ModelError` for a buffer that neither the model's
    ``_init_weights`` nor the files fill: transformers would leave it as memory happened to be.
    """
    made: dict[int, torch.Tensor] = {}  # of a meta buffer, which modules may share
    places: list[tuple[str, nn.Module, str, torch.Tensor, int]] = []
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                if id(buffer) not in made:
                    made[id(buffer)] = torch.zeros_like(buffer, device=device)
                    if buffer.is_floating_point():
                        made[id(buffer)].fill_(torch.nan)
                module._buffers[name] = fresh = made[id(buffer)]
                places.append((f"{prefix}.{name}" if prefix else name, module, name, fresh, fresh._version))
    if hasattr(model, "initialize_weights"):  # transformers'
        with torch.no_grad():
            model.initialize_weights()
    given = {name for group in plan.groups for name in group.targets}
    for full_name, module, name, fresh, version in places:
        # By .data a buffer is written to without a new version.
        written = module._buffers[name] is not fresh or fresh._version != version or not _is_untouched(fresh)
        if full_name not in given and not written:
            raise ModelError(
                f"buffer {full_name!r} is on the meta device, and neither the model's _init_weights nor {plan.folder.source!r} gives its "
                "values: fill it in _init_weights, or make it persistent and save it"
            )


def _is_untouched(buffer: torch.Tensor) -> bool:
    return bool(buffer.isnan().all()) if buffer.is_floating_point() else not buffer.any()


@torch.no_grad()
def stream_weights(model: nn.Module, plan: WeightPlan, partition: PartitionPlan, handles: FoldingGroupHandles, device: torch.device) -> None:
    """Read every tensor of ``plan``. ``model`` has been cut already; its ``Parameter`` objects stay the same. Local: no collective."""
    stream = _Stream(model, plan, partition, handles, device)
    try:
        with without_debug_names(model):
            for group in plan.groups:
                stream.load(group)
                _return_free_memory()
    finally:
        plan.folder.close()
    left = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    if left:
        raise ModelError(f"{len(left)} tensors are still on the meta device after reading {plan.folder.source!r}, first {left[0]!r}")


class _Stream:
    def __init__(self, model, plan: WeightPlan, partition: PartitionPlan, handles: FoldingGroupHandles, device) -> None:
        self.plan, self.handles, self.device = plan, handles, device
        self.tensors: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
        self.filled: dict[int, WeightGroup] = {}  # tensor -> where it came from
        self.cut_vectors = set(partition.cut_parameters)
        self.experts: dict[torch.Tensor, tuple[AutoEPMoELayer, ExpertTensor]] = {}
        self.layers: dict[torch.Tensor, TensorParallel_Layer] = {}
        for module in model.modules():
            if isinstance(module, AutoEPMoELayer):
                self.experts |= {getattr(module, tensor.name): (module, tensor) for tensor in module.autoep.layout.tensors}
            elif isinstance(module, TensorParallel_Layer):
                self.layers |= dict.fromkeys(module.parameters(recurse=False), module)

    def load(self, group: WeightGroup) -> None:
        before = [self.filled[id(self.tensors[name])] for name in group.targets if id(self.tensors[name]) in self.filled]
        if before:
            self._check_tied(group, before[0])
            return
        if group.by_expert is not None:
            self._load_experts(group)
        else:
            for name, value in self.plan.convert(group).items():
                self._store(name, value)
        self.filled |= dict.fromkeys((id(self.tensors[name]) for name in group.targets), group)

    def _check_tied(self, group: WeightGroup, before: WeightGroup) -> None:
        """The files hold a tensor of the model twice, under two names that the model ties."""
        first, second = self.plan.convert(before), self.plan.convert(group)
        for name in group.targets:
            other = next(each for each in before.targets if self.tensors[each] is self.tensors[name])
            if not torch.equal(first[other], second[name]):
                raise ModelError(
                    f"the model ties {name!r} and {other!r}, and {self.plan.folder.source!r} holds two different tensors for them: build the "
                    "model untied (tie_word_embeddings=False in its configuration)"
                )

    def _load_experts(self, group: WeightGroup) -> None:
        """This rank's experts, one at a time."""
        module, _ = self.experts[self.tensors[group.targets[0]]]
        shard = module.autoep.shard
        parts = {name: self._empty(self.tensors[name]) for name in group.targets}
        for place, expert in enumerate(range(shard.first, shard.last)):
            for name, value in self.plan.convert(group, expert).items():
                parts[name][place : place + 1].copy_(self._of_one_expert(name, value))
        for name, part in parts.items():
            _fill(self.tensors[name], part)

    def _of_one_expert(self, name: str, value: torch.Tensor) -> torch.Tensor:
        module, tensor = self.experts[self.tensors[name]]
        return cut_expert_tensor(value, tensor, replace(module.autoep.shard, first=0, last=1))

    def _store(self, name: str, value: torch.Tensor) -> None:
        """``value``: the whole tensor, a view of the file perhaps."""
        target = self.tensors[name]
        if not isinstance(target, nn.Parameter):
            target.copy_(value)
        elif target in self.experts:
            module, tensor = self.experts[target]
            _fill(target, self._empty(target).copy_(cut_expert_tensor(value, tensor, module.autoep.shard)))
        elif name in self.cut_vectors:
            _fill(target, self._empty(target).copy_(value.chunk(self.handles.spec.tp_size)[self.handles.tp_rank]))
        else:
            _fill(target, torch.empty(value.shape, dtype=target.dtype, device=self.device).copy_(value))
            if target in self.layers:
                self._cut(self.layers[target])

    def _cut(self, layer: TensorParallel_Layer) -> None:
        """As its constructor does, once its weight and its bias are there: a bias's cut follows the weight's."""
        own = [layer.weight, layer.bias]
        if all(parameter is None or not parameter.is_meta for parameter in own):
            layer._tp_partition(own)

    def _empty(self, target: torch.Tensor) -> torch.Tensor:
        return torch.empty(target.shape, dtype=target.dtype, device=self.device)


def _return_free_memory() -> None:
    """To the kernel, where the C library is glibc: it keeps blocks below 32 MiB, and several tensors' worth would add up."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _fill(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """``parameter.data = value`` where the two devices are of different kinds: the object and its marks stay."""
    filled = nn.Parameter(value, requires_grad=parameter.requires_grad)
    filled.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, filled)


def expert_layouts(sites: Iterable) -> dict[str, ExpertTensor]:
    """Full name -> layout of every stacked tensor of the experts modules."""
    return {f"{site.name}.{tensor.name}": tensor for site in sites for tensor in site.layout.tensors}
