"""The engine: DeepSpeed's, with expert parallelism, the family table and the exact norm in its seams.

Here is what happens while it trains: checks of samples, backward passes that would be lost, the reduction of whole gradients
(ZeRO-0), the step, the statistics. :mod:`deepspeed_autoep.engine.construction` builds it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist

from deepspeed_autoep.engine.checkpointing import CheckpointingEngine
from deepspeed_autoep.engine.half import loss_scale_of
from deepspeed_autoep.engine.zero import FoldedZeroOptimizer
from deepspeed_autoep.errors import UnsupportedError
from deepspeed_autoep.folding.families import (
    FAMILY_RULES,
    clear_autoep_folding_gradient_corrected,
    is_autoep_folding_gradient_corrected,
    set_autoep_folding_gradient_corrected,
)
from deepspeed_autoep.gradients.norms import GradientStatistics
from deepspeed_autoep.moe.lane_check import assert_lanes_agree

logger = logging.getLogger("deepspeed_autoep")

# Forwards whose samples are compared over the lanes of each TP group, without validate_folding_routing.
INPUT_CHECKS = 2
# At most so many forwards are watched for reads of experts' weights around their module: it costs time in each operation.
WATCHED_FORWARDS = 100


class AutoEPEngine(CheckpointingEngine):
    """A DeepSpeedEngine whose model is folded. Built by :func:`deepspeed_autoep.initialize`."""

    _autoep_input_checks = INPUT_CHECKS
    _autoep_watched_forwards = 0

    def forward(self, *inputs, **kwargs):
        if self._autoep_input_checks or self.autoep.config.expert.validate_folding_routing:
            self._autoep_input_checks = max(0, self._autoep_input_checks - 1)
            self._check_samples(inputs, kwargs)
        if self._autoep_interface_check is None or self.is_compiled or _is_compiled(self.module):
            return super().forward(*inputs, **kwargs)
        with self._autoep_interface_check as check:
            output = super().forward(*inputs, **kwargs)
        self._autoep_watched_forwards += 1
        if not check.uncalled or self._autoep_watched_forwards == WATCHED_FORWARDS:
            self._watch_interface(None)
        return output

    def _check_samples(self, inputs, kwargs) -> None:
        handles = self.autoep.handles
        if handles.spec.tp_size > 1:
            tensors = [tensor.to(self.device) for tensor in _tensors((inputs, kwargs))]
            assert_lanes_agree(
                "samples",
                tensors,
                handles.spec,
                handles.stage_group,
                "Shard the data by data-parallel rank, not by global rank: engine.dp_world_size and "
                "engine.data_parallel_group say which (a DistributedSampler needs num_replicas and rank from them).",
            )

    def backward(self, loss, retain_graph=False, scale_wrt_gas=True):
        """As DeepSpeed's; under ZeRO-0 the fp16 loss scale is applied, which its wrapper divides out of the gradients."""
        self._refuse_lost_gradients()
        scale = loss_scale_of(self.optimizer)
        scaled = loss if scale == 1.0 else loss.float() * scale
        result = super().backward(scaled, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)
        return result if scale == 1.0 else result / scale

    def _backward_prologue_per_tensor(self, grad):
        """``loss.backward()`` without the engine: DeepSpeed divides the gradient of every output of the model by the accumulation
        steps, of logits and of an auxiliary loss too, though theirs comes from the loss's. Once in a backward pass here."""
        task = torch._C._current_graph_task_id()
        if task == self._autoep_divided_task:
            return grad
        divided = super()._backward_prologue_per_tensor(grad)
        if divided is not grad:
            self._autoep_divided_task = task
        return divided

    _autoep_divided_task = None
    _autoep_awaits_step = False

    def _refuse_lost_gradients(self) -> None:
        """ZeRO-1/2 keeps the last of several backward passes at an accumulation boundary; the others would be lost."""
        if not isinstance(self.optimizer, FoldedZeroOptimizer) or not self.managed_gradient_accumulation():
            return
        if self._autoep_awaits_step:
            raise UnsupportedError(
                f"backward() was called twice before step() with gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps()}: under ZeRO-{self.zero_optimization_stage()} the first one's gradients "
                "would be lost. Add the losses, set gradient_accumulation_steps, or call "
                "engine.set_gradient_accumulation_boundary(False) before all but the last; engine.zero_grad() discards a backward pass"
            )
        self._autoep_awaits_step = self.is_gradient_accumulation_boundary()

    def zero_grad(self):
        """As DeepSpeed's; the gradients of a backward pass since the last step are discarded."""
        super().zero_grad()
        if isinstance(self.optimizer, FoldedZeroOptimizer):
            self.optimizer.discard_gradients()
        self._autoep_awaits_step = False

    def scale(self, loss):
        """As DeepSpeed's, with the fp16 loss scale under ZeRO-0 too."""
        return super().scale(loss) * loss_scale_of(self.optimizer)

    def buffered_allreduce_fallback(self, grads=None, elements_per_buffer=500000000):
        """ZeRO-0 reduces in :meth:`step`, once: backward passes before it may add to each other or be discarded."""
        if grads is not None:
            raise UnsupportedError("buffered_allreduce_fallback(grads=...) is for pipeline parallelism, which is not supported")
        self._autoep_bucket_elements = elements_per_buffer

    _autoep_bucket_elements = 500000000

    def allreduce_bucket(self, bucket, dp_group, dp_world_size=None):
        """DeepSpeed reduces in one dtype; fp32 gradients of a mixed model in theirs."""
        if self.autoep.kept is None or bucket[0].dtype != torch.float32:
            return super().allreduce_bucket(bucket, dp_group, dp_world_size)
        configured = self._config.communication_data_type
        self.communication_data_type = torch.float32
        try:
            return super().allreduce_bucket(bucket, dp_group, dp_world_size)
        finally:
            self.communication_data_type = configured

    def get_gradient_statistics(self) -> GradientStatistics | None:
        """Of the last step's gradient, before clipping and without the loss scale; the same on every rank. None before it."""
        return self.autoep_sync.statistics.last

    def _reduce_whole_gradients(self) -> None:
        """Over data (dense over DP, experts over EDP, both divided by dp), then the TP rule."""
        handles, dp = self.autoep.handles, self.autoep.handles.spec.dp_size
        parameters = [p for p in self.autoep_families if not is_autoep_folding_gradient_corrected(p)]
        for parameter in parameters:
            if parameter.grad is None:  # a parameter unused on this rank only must not desert its peers
                parameter.grad = torch.zeros_like(parameter)
            elif not parameter.grad.is_contiguous():
                parameter.grad = parameter.grad.contiguous()
        for rule in dict.fromkeys(rule.data_group for rule in FAMILY_RULES.values()):
            members = [p for p in parameters if FAMILY_RULES[self.autoep_families[p].family].data_group == rule]
            group = handles.data_group(rule)
            for dtype in sorted({p.grad.dtype for p in members}, key=str):
                bucket = [p.grad for p in members if p.grad.dtype == dtype]
                if dist.get_world_size(group) == 1 and self.gradient_average:
                    torch._foreach_div_(bucket, dp)  # nothing to sum: spare DeepSpeed's copies
                else:
                    self.allreduce_no_retain(bucket, group, numel_per_bucket=self._autoep_bucket_elements, dp_world_size=dp)
        self.autoep_sync.correct([self.autoep_sync.slice_of(parameter.grad, parameter) for parameter in parameters])
        for parameter in parameters:
            set_autoep_folding_gradient_corrected(parameter)

    def _refuse_changed_parameters(self) -> None:
        """Parameters are placed once: one unfrozen or added later would train in vain or on its own rank only, one frozen later
        would still be decayed."""
        for name, parameter, trained in self._autoep_trained:
            if parameter.requires_grad != trained:
                raise UnsupportedError(
                    f"requires_grad of {name!r} is {parameter.requires_grad} and was {trained} at initialize: the optimizer's "
                    "parameters are chosen there. Set it before; a group with lr 0 and weight_decay 0 can be trained later"
                )
        if isinstance(self.optimizer, torch.optim.Optimizer):
            held = sum(len(group["params"]) for group in self.optimizer.param_groups)
            if held != len(self.autoep_families):
                raise UnsupportedError(
                    f"the optimizer holds {held} parameters and had {len(self.autoep_families)} at initialize: give all groups there"
                )

    def step(self, lr_kwargs=None):
        """As DeepSpeed's. Raises :class:`CheckpointError` after the step where an asynchronous save has failed since the last one."""
        super().step(lr_kwargs)
        self.autoep_saver.check()

    def _take_model_step(self, lr_kwargs):
        self._refuse_changed_parameters()
        if not isinstance(self.optimizer, FoldedZeroOptimizer):
            self._reduce_whole_gradients()
        if isinstance(self.optimizer, torch.optim.Optimizer):
            self._clip_or_skip()
        super()._take_model_step(lr_kwargs)
        self._write_statistics()
        self._autoep_awaits_step = False
        for parameter in self.autoep_families:
            clear_autoep_folding_gradient_corrected(parameter)

    def _write_statistics(self) -> None:
        """To DeepSpeed's monitor (TensorBoard, W&B, CSV), where one is enabled."""
        statistics = self.get_gradient_statistics()
        if self.monitor.enabled and self.global_rank == 0 and statistics is not None:
            values = {"gradient_norm": statistics.norm, "gradient_zeros": statistics.zeros}
            values |= {f"gradient_norm_{family}": norm for family, norm in statistics.family_norms.items()}
            values |= {f"gradient_norm_group{index}": norm for index, norm in enumerate(statistics.group_norms)}
            if statistics.parameter_norm is not None:
                values["parameter_norm"] = statistics.parameter_norm
            self.monitor.write_events(
                [(f"Train/Samples/{name}", value, self.global_samples) for name, value in values.items()]
            )

    def _clip_or_skip(self) -> None:
        """ZeRO-0 in fp32 steps the bare torch optimizer: norm, clipping and the skip of a non-finite step are ours."""
        sync = self.autoep_sync
        gradients = [sync.slice_of(p.grad, p) for p in self.autoep_families if p.grad is not None]
        masters = [sync.slice_of(p.detach(), p) for p in self.autoep_families] if sync.parameter_norm else None
        statistics = sync.finish(gradients, masters)
        self._global_grad_norm = statistics.norm if statistics.is_finite else float("inf")
        # DeepSpeed counts a skipped step, and holds the schedule, by this attribute of its wrappers.
        self.optimizer.overflow = not statistics.is_finite
        if not statistics.is_finite:
            self.zero_grad()  # a torch optimizer leaves parameters without a gradient alone
        elif (factor := statistics.clip_factor(self.gradient_clipping())) < 1.0:
            torch._foreach_mul_([piece.gradient for piece in gradients], factor)

    def clip_fp32_gradients(self):
        """Done in :meth:`_clip_or_skip`, with the norm that counts every element once."""

    def destroy(self) -> None:
        """As DeepSpeed's; also waits for a save under way, and gives DeepSpeed's group registry back its former content."""
        try:
            self.autoep_saver.close()
        finally:
            try:
                super().destroy()
            finally:
                self.autoep.binding.restore()


def _is_compiled(model: torch.nn.Module) -> bool:
    """Whether ``torch.compile`` or ``Module.compile`` was used on a part of it: traced code is not watched."""
    compiled = torch._dynamo.eval_frame.OptimizedModule if "torch._dynamo" in sys.modules else ()
    return any(module._compiled_call_impl is not None or isinstance(module, compiled) for module in model.modules())


def _tensors(structure) -> Iterable[torch.Tensor]:
    if isinstance(structure, torch.Tensor):
        yield structure
    elif isinstance(structure, dict):
        for key in sorted(structure, key=str):
            yield from _tensors(structure[key])
    elif isinstance(structure, (list, tuple)):
        for item in structure:
            yield from _tensors(item)
