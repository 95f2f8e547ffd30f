"""ZeRO-0 in fp16 and bf16: DeepSpeed's two wrappers with the exact norm.

Both are built as they are, but for one thing, and get a class with another ``step()``. DeepSpeed's own differ from it in
four ways: they leave experts out of the norm or count replicas, ranks can disagree on an overflow, the loss scale may
grow between the backward pass and the unscaling of its gradients, and their construction takes an optimizer step, which
applies weight decay and leaves Adam's bias correction one step ahead. Gradients arrive reduced over data and corrected
over TP.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from deepspeed_autoep.compat import FP16_Optimizer, FP16_UnfusedOptimizer
from deepspeed_autoep.errors import UnsupportedError
from deepspeed_autoep.gradients.slices import GradientSlice
from deepspeed_autoep.gradients.sync import GradientSync


class _FoldedHalfOptimizer:
    """``step()`` for both wrappers; the hooks say where the fp32 masters are."""

    autoep_sync: GradientSync

    def step(self, closure=None):
        sync = self.autoep_sync
        gradients = [
            sync.slice_of(parameter.grad, parameter)
            for group in self.fp16_groups
            for parameter in group
            if parameter.grad is not None
        ]
        scale = loss_scale_of(self)  # the one the backward pass used: it may change only after this step
        masters = list(self._autoep_masters()) if sync.parameter_norm else None
        self.overflow = not sync.finish(gradients, masters, scale).is_finite
        if self.overflow:
            return self._skip_invalid_grad_norm()

        statistics = sync.statistics.last
        self._global_grad_norm = statistics.norm
        self._autoep_fill_masters(statistics.clip_factor(self.clip_grad) / scale)
        self.optimizer.step()
        self._autoep_publish_masters()
        self._update_scale(False)
        return self.overflow


class FoldedUnfusedOptimizer(_FoldedHalfOptimizer, FP16_UnfusedOptimizer):
    """One fp32 master for each parameter."""

    def _autoep_masters(self) -> Iterator[GradientSlice]:
        for masters, parameters in zip(self.fp32_groups, self.fp16_groups, strict=True):
            for master, parameter in zip(masters, parameters, strict=True):
                yield self.autoep_sync.slice_of(master.detach(), parameter)

    def _autoep_fill_masters(self, factor: float) -> None:
        for masters, parameters in zip(self.fp32_groups, self.fp16_groups, strict=True):
            for master, parameter in zip(masters, parameters, strict=True):
                gradient = torch.zeros_like(master) if parameter.grad is None else parameter.grad.to(master.dtype)
                master.grad = gradient.mul_(factor) if gradient is not parameter.grad else gradient * factor

    def _autoep_publish_masters(self) -> None:
        for masters, parameters in zip(self.fp32_groups, self.fp16_groups, strict=True):
            for master, parameter in zip(masters, parameters, strict=True):
                master.grad = None
                parameter.data.copy_(master.data)


class FoldedFusedOptimizer(_FoldedHalfOptimizer, FP16_Optimizer):
    """One flat fp32 master for each group, for fused Adam."""

    def _autoep_masters(self) -> Iterator[GradientSlice]:
        for flat, parameters in zip(self.fp32_groups_flat, self.fp16_groups, strict=True):
            for parameter, part in zip(parameters, flat.detach().split([p.numel() for p in parameters]), strict=True):
                yield self.autoep_sync.slice_of(part, parameter)

    def _autoep_fill_masters(self, factor: float) -> None:
        for flat, parameters in zip(self.fp32_groups_flat, self.fp16_groups, strict=True):
            parts = [
                (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).reshape(-1).to(flat.dtype)
                for parameter in parameters
            ]
            flat.grad = torch.cat(parts).mul_(factor)

    def _autoep_publish_masters(self) -> None:
        for flat, parameters in zip(self.fp32_groups_flat, self.fp16_groups, strict=True):
            flat.grad = None
            for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                parameter.data.copy_(part.view(parameter.shape))


@contextlib.contextmanager
def without_trial_step(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """While the wrapper around ``optimizer`` is built, its ``step()`` does nothing: state is made at the first real one."""
    own = optimizer.__dict__.get("step")  # a scheduler made before may have put one on the instance
    optimizer.step = lambda *_, **__: None
    try:
        yield
    finally:
        del optimizer.step
        if own is not None:
            optimizer.step = own


_FOLDED = {FP16_Optimizer: FoldedFusedOptimizer, FP16_UnfusedOptimizer: FoldedUnfusedOptimizer}


def is_half_wrapper(optimizer) -> bool:
    """Whether DeepSpeed built one of its two fp16/bf16 wrappers."""
    return type(optimizer) in _FOLDED


def loss_scale_of(optimizer) -> float:
    """Factor by which the loss must be scaled before backward; DeepSpeed 0.19.8 forgets it under ZeRO-0."""
    scale = optimizer.loss_scale if isinstance(optimizer, _FoldedHalfOptimizer) else 1.0
    return 1.0 if scale is None else scale  # None: the flat wrapper in bf16


def fold_half_optimizer(optimizer, sync: GradientSync) -> None:
    """Swap the class of a freshly built fp16/bf16 wrapper. Raises :class:`UnsupportedError` for its legacy modes."""
    for legacy in ("fused_adam_legacy", "fused_lamb_legacy"):
        if getattr(optimizer, legacy, False):
            raise UnsupportedError(f"{legacy}=true is not supported: remove optimizer.legacy_fusion from the configuration")
    optimizer.__class__ = _FOLDED[type(optimizer)]
    optimizer.autoep_sync = sync
