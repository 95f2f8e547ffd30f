"""Building the engine: DeepSpeedEngine's constructor with our seams in it.

In the order in which it calls them: convert experts (before AutoTP cuts the dense layers), mark partial gradients (after),
fill a model that is on the meta device, split parameter groups and swap the optimizer's class.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, replace

import torch
from deepspeed import DeepSpeedEngine

from deepspeed_autoep import compat
from deepspeed_autoep.config import FoldingConfig, check_optimizer
from deepspeed_autoep.engine.column_inputs import share_column_inputs
from deepspeed_autoep.engine.dense_extras import apply_dense_extras, whole_sizes
from deepspeed_autoep.engine.dtypes import KeptDtypes
from deepspeed_autoep.engine.half import fold_half_optimizer, is_half_wrapper, without_trial_step
from deepspeed_autoep.engine.param_groups import (
    ORIGIN_KEY,
    as_groups,
    split_groups,
    split_optimizer,
    split_scheduler,
    users_groups,
)
from deepspeed_autoep.engine.replicas import differing_tensors, first_uneven_parameter
from deepspeed_autoep.engine.user_optimizer import (
    check_elementwise,
    check_groups,
    check_optimizer_object,
    check_scheduler,
    groups_digest,
    listed,
)
from deepspeed_autoep.engine.zero import fold_zero_optimizer
from deepspeed_autoep.engine.zero_dtypes import MixedPrecision
from deepspeed_autoep.errors import ConfigError, RankMismatchError, UnsupportedError
from deepspeed_autoep.folding.families import (
    is_expert_parameter,
    is_tp_sharded_parameter,
    mark_tp_partial_parameter,
    resolve_family,
)
from deepspeed_autoep.folding.groups import FoldingGroupHandles, collectively, validate_folding_agreement
from deepspeed_autoep.folding.spec import ParallelFoldingSpec
from deepspeed_autoep.gradients.slices import ParameterInfo
from deepspeed_autoep.gradients.sync import GradientSync
from deepspeed_autoep.moe.discovery import ExpertsSite
from deepspeed_autoep.moe.interface_check import InterfaceCheck
from deepspeed_autoep.moe.layer import convert_experts
from deepspeed_autoep.peft_adapters import cut_expert_adapters, expert_adapters, hidden_weights
from deepspeed_autoep.quantization.experts import cut_expert_quantizers, is_quantized_site
from deepspeed_autoep.tensor_parallel import PartitionPlan, check_shares
from deepspeed_autoep.weights.plan import WeightPlan
from deepspeed_autoep.weights.stream import stream_weights

logger = logging.getLogger("deepspeed_autoep")


@dataclass(frozen=True)
class Decisions:
    """What each rank decides by itself, from the configuration and its own model."""

    spec: ParallelFoldingSpec
    sites: list[ExpertsSite]
    plan: PartitionPlan
    kept: KeptDtypes | None  # of a model of two dtypes
    weights: WeightPlan | None  # of a model on the meta device
    model_parameters: list | None  # the user's, its generators read
    structure: dict  # of a quantized model, before it is cut


@dataclass(frozen=True)
class EngineSetup(Decisions):
    """And what initialize() has made before the engine is built."""

    config: FoldingConfig
    handles: FoldingGroupHandles
    binding: compat.GroupBinding
    contiguous_gradients: bool


class FoldedConstruction(DeepSpeedEngine):
    """Builds a folded engine; :class:`deepspeed_autoep.engine.engine.AutoEPEngine` trains with it."""

    _autoep_groups = 0  # that the user gave to the optimizer

    def __init__(self, *args, autoep: EngineSetup, **kwargs) -> None:
        self.autoep = autoep
        self.autoep_families: dict[torch.nn.Parameter, ParameterInfo] = {}
        super().__init__(*args, **kwargs)

    def _configure_expert_parallel(self, model, collect_sources=None):
        for site in self.autoep.sites:
            # Of all ways to compute experts, the module's own forward alone calls their quantizers.
            backend = "model" if is_quantized_site(site) else self.autoep.config.expert_backend
            cut_expert_quantizers(site, self.autoep.handles)
            convert_experts(
                site,
                self.autoep.handles,
                backend=backend,
                validate_routing=self.autoep.config.expert.validate_folding_routing,
            )
            cut_expert_adapters(model, site, self.autoep.handles)
        return compat.ReplacementSourceMap()

    def _configure_tensor_parallel(self, model, tp_config):
        with whole_sizes(model) if self.autoep.plan.derived else contextlib.nullcontext(), hidden_weights(model):
            sources = super()._configure_tensor_parallel(model, tp_config)
        cuts = {name: compat.autotp_cut(parameter) for name, parameter in model.named_parameters() if name.endswith(".weight")}
        check_shares({name: cut for name, cut in cuts.items() if cut is not None}, self.autoep.handles.spec.tp_size)
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
        # PEFT's parametrization of adapted experts reads their weights right before it calls them.
        self._watch_interface(InterfaceCheck(site for site in self.autoep.sites if not expert_adapters(model, site)))
        self.num_experts = [site.layout.num_experts for site in self.autoep.sites]
        # DeepSpeed asks this to decide on expert groups; without trainable experts there are none.
        self.has_moe_layers = any(info.family.is_expert for info in self.autoep_families.values())

    def _watch_interface(self, check: InterfaceCheck | None) -> None:
        self._autoep_interface_check = check
        for site in self.autoep.sites:
            site.module.autoep_check = check

    def _stream_weights(self, model: torch.nn.Module) -> None:
        """Each rank reads its own part. What all hold whole must be the same, or their files differ; parts are not compared."""
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
            check_scheduler(self.client_lr_scheduler, client_optimizer)
        reason = check_elementwise(client_optimizer)
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
