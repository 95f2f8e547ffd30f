"""One backward all-reduce for the column-parallel layers that read the same tensor.

AutoTP's column-parallel layer all-reduces the gradient of its own input, so q, k and v (or gate and up) send three (two)
tensors of which upstream needs the sum. Here siblings share the entrance to the tensor-parallel region: autograd adds
their gradients first, and the sum travels once (the function ``f`` of Megatron-LM, Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch import nn

from deepspeed_autoep.compat import GatherFromTensorParallelRegion, LinearLayer
from deepspeed_autoep.peft_adapters import is_wrapper, unwrapped


class EnterTensorParallelRegion(torch.autograd.Function):
    """Identity; backward: sum over the lanes."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Entrance:
    """Shared by the column-parallel children of one module: the same input object enters once."""

    def __init__(self, group) -> None:
        self.group = group
        self.clear()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        recorded = torch.is_grad_enabled()
        if self._source is None or self._source() is not x or self._recorded != recorded:
            self._source, self._recorded = weakref.ref(x), recorded
            self._entered = EnterTensorParallelRegion.apply(x, self.group)
        return self._entered

    def clear(self) -> None:
        """Forget the last input, so that it is not kept alive beyond its module's forward."""
        self._source = self._entered = self._recorded = None


class SharedInputLinear(LinearLayer):
    """AutoTP's column-parallel layer behind a shared entrance; made by :func:`share_column_inputs`."""

    autoep_entrance: _Entrance

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in], the same on every lane -> [..., out / tp], or [..., out] when the output is gathered."""
        output = nn.functional.linear(self.autoep_entrance(x), self.weight, self.bias)
        if self.gather_output:
            output = GatherFromTensorParallelRegion.apply(self.mp_group, output, self._partition_sizes)
        return output


def share_column_inputs(model: nn.Module, tp_group) -> None:
    """Give the column-parallel children of each module one entrance. AutoTP's overlapped variant is left as it is."""
    if LinearLayer.tp_overlap_comm:
        return
    for parent in model.modules():
        # A layer that PEFT wraps is its grandparent's; LoRA's own matrices read tensors that nobody else does.
        if is_wrapper(parent) or isinstance(parent, nn.ModuleDict):
            continue
        columns = [layer for child in parent.children() if type(layer := unwrapped(child)) is LinearLayer]
        if not columns:
            continue
        entrance = _Entrance(tp_group)
        for child in columns:
            child.__class__ = SharedInputLinear
            child.autoep_entrance = entrance
        # Also when forward is left by an exception: recomputation under checkpointing stops early by one.
        parent.register_forward_hook(lambda *_, entrance=entrance: entrance.clear(), always_call=True)
