"""Fill a model that was cut on the meta device: each rank reads what it keeps, and holds one more tensor at a time."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import nn

from deepspeed_autoep.compat import TensorParallel_Layer, without_debug_names
from deepspeed_autoep.errors import ModelError
from deepspeed_autoep.folding.groups import FoldingGroupHandles
from deepspeed_autoep.moe.cutting import cut_expert_tensor
from deepspeed_autoep.moe.layer import AutoEPMoELayer
from deepspeed_autoep.moe.weight_layout import ExpertShard, ExpertTensor
from deepspeed_autoep.tensor_parallel import PartitionPlan
from deepspeed_autoep.weights.plan import WeightGroup, WeightPlan

logger = logging.getLogger("deepspeed_autoep")


def initialise_buffers(model: nn.Module, device: torch.device) -> None:
    """Give buffers on the meta device their storage, and the values that the model computes for them (rotary frequencies).

    Parameters stay on meta, where initialisation does nothing.
    """
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    if hasattr(model, "initialize_weights"):  # transformers'
        with torch.no_grad():
            model.initialize_weights()


@torch.no_grad()
def stream_weights(model: nn.Module, plan: WeightPlan, partition: PartitionPlan, handles: FoldingGroupHandles, device: torch.device) -> None:
    """Read every tensor of ``plan``. ``model`` has been cut already; its ``Parameter`` objects stay the same. Local: no collective."""
    stream = _Stream(model, plan, partition, handles, device)
    with without_debug_names(model):
        for group in plan.groups:
            stream.load(group)
    plan.folder.close()
    left = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    if left:
        raise ModelError(f"{len(left)} tensors are still on the meta device after reading {plan.folder.source!r}, first {left[0]!r}")


class _Stream:
    def __init__(self, model, plan: WeightPlan, partition: PartitionPlan, handles: FoldingGroupHandles, device) -> None:
        self.plan, self.handles, self.device = plan, handles, device
        self.tensors: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
        self.cut_vectors = set(partition.cut_parameters)
        self.experts: dict[torch.Tensor, tuple[AutoEPMoELayer, ExpertTensor]] = {}
        self.layers: dict[torch.Tensor, TensorParallel_Layer] = {}
        for module in model.modules():
            if isinstance(module, AutoEPMoELayer):
                self.experts |= {getattr(module, tensor.name): (module, tensor) for tensor in module.autoep.layout.tensors}
            elif isinstance(module, TensorParallel_Layer):
                self.layers |= dict.fromkeys(module.parameters(recurse=False), module)

    def load(self, group: WeightGroup) -> None:
        wanted = [name for name in group.targets if self.tensors[name].is_meta or not isinstance(self.tensors[name], nn.Parameter)]
        if not wanted:  # a tied weight that the files hold twice
            return
        if group.by_expert is not None:
            self._load_experts(group)
        else:
            for name, value in self.plan.convert(group).items():
                self._store(name, value)

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
        return cut_expert_tensor(value, tensor, ExpertShard(0, 1, module.autoep.shard.etp_size, module.autoep.shard.etp_rank))

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


def _fill(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """``parameter.data = value`` where the two devices are of different kinds: the object and its marks stay."""
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        raise ModelError("a parameter on the meta device has gradient hooks, which would be lost: register them after initialize")
    filled = nn.Parameter(value, requires_grad=parameter.requires_grad)
    filled.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, filled)


def parameters_of_weights(sites: Iterable) -> dict[str, ExpertTensor]:
    """Full name -> layout of every stacked tensor of the experts modules."""
    return {f"{site.name}.{tensor.name}": tensor for site in sites for tensor in site.layout.tensors}
