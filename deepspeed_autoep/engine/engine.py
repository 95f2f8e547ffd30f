"""The engine: DeepSpeed's, with expert parallelism, the family table and the exact norm in its seams.

What is overridden, in the order in which DeepSpeed calls it: convert experts (before AutoTP cuts the dense layers), mark
partial gradients (after), split parameter groups and swap the optimizer's class, reduce gradients (ZeRO-0), step.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine

from deepspeed_autoep import compat
from deepspeed_autoep.config import FoldingConfig, check_optimizer
from deepspeed_autoep.engine.column_inputs import share_column_inputs
from deepspeed_autoep.engine.dense_extras import apply_dense_extras, whole_sizes
from deepspeed_autoep.engine.dtypes import KeptDtypes
from deepspeed_autoep.engine.half import fold_half_optimizer, is_half_wrapper, loss_scale_of, without_trial_step
from deepspeed_autoep.engine.param_groups import (
    ORIGIN_KEY,
    as_groups,
    split_groups,
    split_optimizer,
    split_scheduler,
    users_groups,
)
from deepspeed_autoep.engine.replicas import differing_tensors, first_uneven_parameter
from deepspeed_autoep.engine.user_optimizer import check_groups, check_optimizer_object, groups_digest, listed, untried
from deepspeed_autoep.engine.zero import FoldedZeroOptimizer, fold_zero_optimizer
from deepspeed_autoep.engine.zero_dtypes import MixedPrecision
from deepspeed_autoep.errors import ConfigError, RankMismatchError, UnsupportedError
from deepspeed_autoep.folding.families import (
    FAMILY_RULES,
    clear_autoep_folding_gradient_corrected,
    is_autoep_folding_gradient_corrected,
    is_expert_parameter,
    is_tp_sharded_parameter,
    mark_tp_partial_parameter,
    resolve_family,
    set_autoep_folding_gradient_corrected,
)
from deepspeed_autoep.folding.groups import FoldingGroupHandles, collectively, validate_folding_agreement
from deepspeed_autoep.gradients.norms import GradientStatistics
from deepspeed_autoep.gradients.slices import ParameterInfo
from deepspeed_autoep.gradients.sync import GradientSync
from deepspeed_autoep.moe.discovery import ExpertsSite
from deepspeed_autoep.moe.interface_check import InterfaceCheck
from deepspeed_autoep.moe.lane_check import assert_lanes_agree
from deepspeed_autoep.moe.layer import convert_experts
from deepspeed_autoep.peft_adapters import cut_expert_adapters, hidden_weights
from deepspeed_autoep.tensor_parallel import PartitionPlan
from deepspeed_autoep.weights.plan import WeightPlan
from deepspeed_autoep.weights.stream import stream_weights

logger = logging.getLogger("deepspeed_autoep")

# Forwards whose samples are compared over the lanes of each TP group, without validate_folding_routing.
INPUT_CHECKS = 2
_NO_CHECKPOINT = (
    "{} does not know folded models yet: DeepSpeed's files would hold one rank's experts in the place of all. "
    "deepspeed_autoep.consolidated_state_dict(engine) gathers the whole model on rank 0, for save_pretrained(state_dict=...)"
)


@dataclass
class EngineSetup:
    """What initialize() has decided before the engine is built."""

    config: FoldingConfig
    handles: FoldingGroupHandles
    sites: list[ExpertsSite]
    plan: PartitionPlan
    binding: compat.GroupBinding
    contiguous_gradients: bool
    weights: WeightPlan | None  # of a model on the meta device
    kept: KeptDtypes | None = None


class AutoEPEngine(DeepSpeedEngine):
    """A DeepSpeedEngine whose model is folded. Built by :func:`deepspeed_autoep.initialize`."""

    def __init__(self, *args, autoep: EngineSetup, **kwargs) -> None:
        self.autoep = autoep
        self.autoep_families: dict[torch.nn.Parameter, ParameterInfo] = {}
        self._autoep_input_checks = INPUT_CHECKS
        super().__init__(*args, **kwargs)

    # Building

    def _configure_expert_parallel(self, model, collect_sources=None):
        for site in self.autoep.sites:
            convert_experts(
                site,
                self.autoep.handles,
                backend=self.autoep.config.expert_backend,
                validate_routing=self.autoep.config.expert.validate_folding_routing,
            )
            cut_expert_adapters(model, site, self.autoep.handles)
        return compat.ReplacementSourceMap()

    def _configure_tensor_parallel(self, model, tp_config):
        with whole_sizes(model) if self.autoep.plan.derived else contextlib.nullcontext(), hidden_weights(model):
            sources = super()._configure_tensor_parallel(model, tp_config)
        # DeepSpeed's own sample check raises on the ranks of one TP group only and leaves the others waiting.
        self.first_dataloader_check.remove()
        share_column_inputs(model, self.autoep.handles.tp_group)
        apply_dense_extras(model, self.autoep.plan, self.autoep.handles)
        for name, parameter in model.named_parameters():
            if self.autoep.plan.is_partial(name):
                mark_tp_partial_parameter(parameter)
        return sources

    def _configure_distributed_model(self, model):
        if self.autoep.weights is not None:
            self._stream_weights(model)
        super()._configure_distributed_model(model)
        spec = self.autoep.handles.spec
        trainable = ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
        self.autoep_families = {
            parameter: ParameterInfo(index, name, resolve_family(parameter, spec, name), group=None)
            for index, (name, parameter) in enumerate(trainable)
        }
        self._watch_interface(InterfaceCheck(self.autoep.sites))
        self.num_experts = [site.layout.num_experts for site in self.autoep.sites]
        # DeepSpeed asks this to decide on expert groups; without trainable experts there are none.
        self.has_moe_layers = any(info.family.is_expert for info in self.autoep_families.values())

    def _stream_weights(self, model: torch.nn.Module) -> None:
        """Each rank reads its own part; what all hold whole must be the same, or their files differ."""
        handles = self.autoep.handles
        collectively(lambda: stream_weights(model, self.autoep.weights, self.autoep.plan, handles, self.device))
        whole = [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if not is_tp_sharded_parameter(parameter) and not is_expert_parameter(parameter)
        ]
        differing = differing_tensors([*whole, *model.named_buffers()], handles, self.device)
        if differing:
            raise RankMismatchError(
                f"{len(differing)} tensors that ranks read from {self.autoep.weights.folder.source!r} differ between them, first "
                f"{differing[0][0]!r}: give every rank the same files"
            )

    def _cast_module_mixed_precision(self, param_dtype, buffer_dtype, is_zero_init_model, keep_pattern=None):
        """A mixed model keeps its dtypes. Buffers are cast as the configuration says, where it names them."""
        if self.autoep.kept is not None:
            param_dtype = None
            if not isinstance(self._config.keep_in_fp32_modules, list):
                keep_pattern = None
        super()._cast_module_mixed_precision(param_dtype, buffer_dtype, is_zero_init_model, keep_pattern)

    def _configure_optimizer(self, client_optimizer, model_parameters):
        handles = self.autoep.handles
        made, users = collectively(lambda: self._users_optimizer(client_optimizer, model_parameters), handles.stage_group)
        groups = self._autoep_groups = len(users)
        if made is None:
            parts = split_groups(users, self.autoep_families, handles.expert_group_names())
        else:
            origins = split_optimizer(made, self.autoep_families, handles.expert_group_names())
            if not callable(self.client_lr_scheduler):
                split_scheduler(self.client_lr_scheduler, origins, groups)
            parts = made.param_groups
        self._note_groups(parts)
        names = {parameter: info.name for parameter, info in self.autoep_families.items()}
        kind = self.optimizer_name() if made is None else type(made).__name__
        validate_folding_agreement(handles.spec, groups_digest(parts, names, kind), handles.stage_group)
        super()._configure_optimizer(made, parts)
        check_optimizer(type(self.basic_optimizer).__name__)

        expert = self.autoep.config.expert
        self.autoep_sync = GradientSync(
            self.autoep.handles,
            self.autoep_families,
            self.device,
            groups,
            replicated=expert.replicated_gradient_sync,
            verify_interval=expert.replicated_gradient_verify_interval,
            parameter_norm=expert.parameter_norm,
            computed_in=None if self.autoep.kept is None else self.autoep.kept.low,
        )
        place = expert.tp_gradient_correction
        if isinstance(self.optimizer, torch.optim.Optimizer) or is_half_wrapper(self.optimizer):
            if place != "auto":
                raise ConfigError(
                    f"expert_parallel.tp_gradient_correction={place!r} needs zero_optimization.stage 1 or 2, and it is "
                    f"{self.zero_optimization_stage()}: remove the key"
                )
            if is_half_wrapper(self.optimizer):
                fold_half_optimizer(self.optimizer, self.autoep_sync)
        else:
            if place != "partition":
                place = self._place_of_correction(place)
            fold_zero_optimizer(self.optimizer, self.autoep_sync, place, self.autoep.contiguous_gradients, self._mixed_precision())

    def _mixed_precision(self) -> MixedPrecision | None:
        kept = self.autoep.kept
        return MixedPrecision(kept.low, compat.make_loss_scaler(self, kept.low)) if kept is not None and kept.fp32 else None

    def _users_optimizer(self, client_optimizer, model_parameters) -> tuple[torch.optim.Optimizer | None, list[dict]]:
        """The client's optimizer, if any (built here by a callable, from what the user gave), and the user's groups. Local."""
        if client_optimizer is None:
            groups = as_groups(model_parameters)
            check_groups(self.module, groups, "model_parameters")
            return None, groups
        if not isinstance(client_optimizer, torch.optim.Optimizer):
            client_optimizer = client_optimizer(model_parameters)
            check_optimizer_object(self.module, client_optimizer)
        reason = untried(client_optimizer)
        if reason is not None and self.global_rank == 0:
            logger.warning(
                "optimizer %s must update each element by itself, and this could not be tried: %s", type(client_optimizer).__name__, reason
            )
        return client_optimizer, list(client_optimizer.param_groups)

    def _note_groups(self, groups: list[dict]) -> None:
        """Only what the optimizer holds has a gradient to reduce and counts in the norm, whatever the ZeRO stage."""
        origin = {parameter: group[ORIGIN_KEY] for group in groups for parameter in group["params"]}
        missing = [info.name for parameter, info in self.autoep_families.items() if parameter not in origin]
        if missing and self.global_rank == 0:
            logger.warning(
                "%d trainable parameters are in no group of the optimizer and will not be trained: %s. requires_grad_(False) says "
                "that this is meant",
                len(missing),
                listed(missing),
            )
        held = [(parameter, info) for parameter, info in self.autoep_families.items() if parameter in origin]
        self.autoep_families = {
            parameter: replace(info, index=index, group=origin[parameter]) for index, (parameter, info) in enumerate(held)
        }
        self.has_moe_layers = any(info.family.is_expert for info in self.autoep_families.values())
        self._autoep_trained = [(name, parameter, parameter.requires_grad) for name, parameter in self.module.named_parameters()]

    def _configure_lr_scheduler(self):
        if self.client_lr_scheduler and not callable(self.client_lr_scheduler):
            super()._configure_lr_scheduler()  # an object, split with its optimizer
            return
        with users_groups(self.basic_optimizer, self._autoep_groups) as origins:
            collectively(super()._configure_lr_scheduler, self.autoep.handles.stage_group)
        if self.lr_scheduler is not None:
            split_scheduler(self.lr_scheduler, origins, self._autoep_groups)

    def _place_of_correction(self, wanted: str) -> str:
        """Buckets must be the same on all lanes, so TP shards must be of equal sizes. Collective over the stage."""
        if wanted == "auto" and (self.autoep.handles.spec.tp_size == 1 or not self.zero_overlap_comm()):
            return "partition"
        if wanted == "bucket" and self.zero_optimization_stage() == 2 and self.gradient_accumulation_steps() > 1 and self.global_rank == 0:
            logger.warning(
                "expert_parallel.tp_gradient_correction='bucket' runs on the partition under ZeRO-2 with "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps()}: buckets are flushed in every backward pass"
            )
        uneven = first_uneven_parameter(self.autoep_families, self.autoep.handles, self.device)
        if uneven is None:
            return "bucket"
        if wanted == "auto":
            return "partition"
        raise UnsupportedError(
            f"expert_parallel.tp_gradient_correction='bucket' needs the same shapes on all lanes, and {uneven!r} is cut "
            "unevenly over tensor_parallel.autotp_size: use 'partition'"
        )

    def _configure_fp16_optimizer(self, optimizer, low_precision_dtype):
        with without_trial_step(optimizer):
            return super()._configure_fp16_optimizer(optimizer, low_precision_dtype)

    def _configure_bf16_optimizer(self, optimizer):
        """bf16 parameters with fp32 gradient accumulation under ZeRO-1: the ZeRO optimizer does that too."""
        return self._configure_zero_optimizer(optimizer)

    def zero_contiguous_gradients(self):
        """True while DeepSpeed builds ZeRO-2 (it asserts so for MoE); the optimizer then gets the user's value."""
        return True if self.zero_optimization_stage() == 2 else super().zero_contiguous_gradients()

    # Training

    def forward(self, *inputs, **kwargs):
        if self._autoep_input_checks or self.autoep.config.expert.validate_folding_routing:
            self._autoep_input_checks = max(0, self._autoep_input_checks - 1)
            self._check_samples(inputs, kwargs)
        if self._autoep_interface_check is None or self.is_compiled:
            return super().forward(*inputs, **kwargs)
        with self._autoep_interface_check:
            output = super().forward(*inputs, **kwargs)
        if not self._autoep_interface_check.uncalled:
            self._watch_interface(None)
        return output

    def _watch_interface(self, check: InterfaceCheck | None) -> None:
        self._autoep_interface_check = check
        for site in self.autoep.sites:
            site.module.autoep_check = check

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

    # Saving

    def save_checkpoint(self, *args, **kwargs):
        raise UnsupportedError(_NO_CHECKPOINT.format("save_checkpoint"))

    def load_checkpoint(self, *args, **kwargs):
        raise UnsupportedError(_NO_CHECKPOINT.format("load_checkpoint"))

    def save_16bit_model(self, *args, **kwargs):
        raise UnsupportedError(_NO_CHECKPOINT.format("save_16bit_model"))

    def destroy(self) -> None:
        """As DeepSpeed's; also gives DeepSpeed's group registry back its former content."""
        super().destroy()
        self.autoep.binding.restore()


def _tensors(structure) -> Iterable[torch.Tensor]:
    if isinstance(structure, torch.Tensor):
        yield structure
    elif isinstance(structure, dict):
        for key in sorted(structure, key=str):
            yield from _tensors(structure[key])
    elif isinstance(structure, (list, tuple)):
        for item in structure:
            yield from _tensors(item)
