"""Every private symbol of DeepSpeed that this package touches, and why. Checked on DeepSpeed 0.19.8.

The seams themselves (methods overridden in subclasses of DeepSpeed's engine and optimizers) stand in ``engine/``. Nothing
else in the package imports from ``deepspeed.runtime``, ``deepspeed.module_inject`` or ``deepspeed.utils``.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import deepspeed

# Keys and file names of DeepSpeed's own checkpoints. (0.19.8)
from deepspeed.checkpoint import constants as stock_keys

# How DeepSpeed's checkpoints say which part of a parameter a rank of AutoTP's group holds, and how a scaled part's optimizer
# states follow. (0.19.8)
from deepspeed.checkpoint.affine import AFFINE_MAP_FORMAT_VERSION, SCALE_POWER_BY_STATE, ParamAffineMap

# The attribute in which AutoTP notes how it cut a parameter. (0.19.8)
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META as _DS_AUTOTP_UC_META

# Instances of it stand in universal checkpoints of models with fused weights. (0.19.8)
from deepspeed.checkpoint.universal_checkpoint import SubparamShape as _SubparamShape
from deepspeed.module_inject import set_autotp_mode as _set_autotp_mode

# Empty map returned by our _configure_expert_parallel: parameters are cut in place, so nothing needs re-pointing. (0.19.8)
from deepspeed.module_inject.auto_ep_layer import ReplacementSourceMap

# What its AutoEP calls the modules of the families that it knows, which it renames. (0.19.8)
from deepspeed.module_inject.auto_ep_presets.registry import PRESET_MODELS as _PRESET_MODELS

# Its presets by name: an unknown one would be ignored. (0.19.8)
from deepspeed.module_inject.autotp_config import AutoTPPresets

# AutoTP's sharded layers: the column-parallel one is given a shared entrance (with AutoTP's own gather of outputs), and
# all of them know how to gather their full weights for export. (0.19.8)
from deepspeed.module_inject.layers import GatherFromTensorParallelRegion, LinearLayer, TensorParallel_Layer

# Which of the wrappers an engine built, so that the matching subclass takes its place; exact types only. (0.19.8)
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer

# What an optimizer of a mixed model needs and DeepSpeed did not make for it: the loss scaler of a low-precision dtype. The two
# classes stand in its checkpoints. (0.19.8)
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler as _CreateLossScaler
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler as _DynamicLossScaler
from deepspeed.runtime.fp16.loss_scaler import LossScaler as _LossScaler
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

# Parses tensor_parallel, its presets included, into layer specs. (0.19.8)
from deepspeed.runtime.tensor_parallel.config import _get_hf_tp_plan, get_tensor_parallel_config

# initialize() merges what deepspeed.tp_model_init recorded into the configuration. (0.19.8)
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config, merge_tp_model_init_into_config

# The stage, as its optimizers write it. (0.19.8)
from deepspeed.runtime.zero.config import ZeroStageEnum as _ZeroStageEnum

# initialize() leaves a zero.Init context while it builds an engine. (0.19.8)
from deepspeed.runtime.zero.partition_parameters import restore_init_context, shutdown_init_context

# GradPartitionBufferGroup: a partition's gradients that are one flat buffer already, which step() then takes as it is.
# IPGBucket: a bucket of gradients, one for each dtype they are reduced in. (0.19.8)
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer, GradPartitionBufferGroup, IPGBucket

# Process-global group registry that the engine, AutoTP and ZeRO read while they are built. (0.19.8)
from deepspeed.utils import groups as _groups

# The engine's map of parameters to names. (0.19.8)
from deepspeed.utils.debug import debug_clear_module_and_param_names, debug_extract_module_and_param_names

# Where a parameter's elements lie in a partition. (0.19.8)
from deepspeed.utils.tensor_fragment import fragment_address as _fragment_address

from deepspeed_autoep.errors import ConfigError

__all__ = [
    "AFFINE_MAP_FORMAT_VERSION",
    "AutoTPCut",
    "DeepSpeedZeroOptimizer",
    "FP16_Optimizer",
    "FP16_UnfusedOptimizer",
    "GatherFromTensorParallelRegion",
    "GradPartitionBufferGroup",
    "GroupBinding",
    "IPGBucket",
    "LinearLayer",
    "ParamAffineMap",
    "ReplacementSourceMap",
    "SCALE_POWER_BY_STATE",
    "STOCK_CLASSES",
    "TensorParallel_Layer",
    "autotp_cut",
    "bind_groups",
    "configure_python_gc",
    "hf_tp_plan",
    "load_ds_config",
    "make_loss_scaler",
    "merge_tp_model_init_into_config",
    "restore_init_context",
    "set_optimizer_flags",
    "shutdown_init_context",
    "stock_expert_names",
    "stock_keys",
    "training_autotp",
    "user_layer_specs",
    "without_debug_names",
]

# Tags parameters for optimizers that need it; deepspeed.initialize calls it right before the engine. (0.19.8)
set_optimizer_flags = deepspeed.set_optimizer_flags

# Whose instances DeepSpeed's checkpoint files hold, beside tensors and plain data. (0.19.8)
STOCK_CLASSES = (_DynamicLossScaler, _LossScaler, _SubparamShape, _ZeroStageEnum, _fragment_address)

_GROUP_VARIABLES = (
    "_TENSOR_MODEL_PARALLEL_GROUP",
    "_MODEL_PARALLEL_GROUP",
    "_DATA_PARALLEL_GROUP",
    "_EXPERT_PARALLEL_GROUP",
    "_EXPERT_PARALLEL_GROUP_RANKS",
    "_EXPERT_DATA_PARALLEL_GROUP",
    "_EXPERT_DATA_PARALLEL_GROUP_RANKS",
    "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE",
    "_MPU_TENSOR_MODEL_PARALLEL_RANK",
    "mesh_device",
    "mpu",
)


@dataclass(eq=False)
class GroupBinding:
    """DeepSpeed's registry as it was before an engine was bound to it."""

    previous: dict[str, Any]

    def restore(self) -> None:
        """Put the registry back. Once; engines may go in any order: where another engine has been bound since, that one's
        groups stay, and it will put back what was there before both."""
        if self not in _bindings:
            return
        position = _bindings.index(self)
        if position + 1 < len(_bindings):
            _bindings[position + 1].previous = self.previous
        else:
            for name, value in self.previous.items():
                setattr(_groups, name, value)
        del _bindings[position]


_bindings: list[GroupBinding] = []  # of the engines alive, oldest first


def bind_groups(handles) -> tuple[GroupBinding, object | None]:
    """Make DeepSpeed's registry hold exactly the groups of ``handles``.

    Returns the binding and the ``mpu`` to give to the engine: DeepSpeed's own registry when tp > 1 (without an mpu it
    takes the whole world as data parallel), None otherwise.
    """
    binding = GroupBinding({name: getattr(_groups, name) for name in _GROUP_VARIABLES})
    _bindings.append(binding)
    name, shared = handles.ep_group_name, handles.expert_shared_name
    folded = handles.spec.tp_size > 1
    mpu = _groups if folded else None
    values = {
        "_TENSOR_MODEL_PARALLEL_GROUP": handles.tp_group,
        "_MODEL_PARALLEL_GROUP": handles.tp_group,
        "_DATA_PARALLEL_GROUP": handles.dense_dp_group,
        "_EXPERT_PARALLEL_GROUP": {name: handles.ep_group, shared: handles.ep_group},
        "_EXPERT_PARALLEL_GROUP_RANKS": {name: list(handles.ep_ranks), shared: list(handles.ep_ranks)},
        "_EXPERT_DATA_PARALLEL_GROUP": {name: handles.edp_group, shared: handles.expert_shared_group},
        "_EXPERT_DATA_PARALLEL_GROUP_RANKS": {name: list(handles.edp_ranks), shared: list(handles.expert_shared_ranks)},
        "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE": None,
        "_MPU_TENSOR_MODEL_PARALLEL_RANK": None,
        "mesh_device": None,
        "mpu": mpu,
    }
    for variable in _GROUP_VARIABLES:
        setattr(_groups, variable, values[variable])
    return binding, mpu


@dataclass(frozen=True)
class AutoTPCut:
    """How AutoTP cut a parameter of ``shape``: seen as ``logical_shape``, along ``dim``, which is made of parts one after the other;
    ``widths``: of each part, what each rank of the TP group has of it."""

    shape: tuple[int, ...]
    logical_shape: tuple[int, ...]
    dim: int
    widths: tuple[tuple[int, ...], ...]


def autotp_cut(parameter) -> AutoTPCut | None:
    """From what AutoTP notes on a parameter for universal checkpoints; None where it does not say (layers that it cuts by
    other rules). (0.19.8)"""
    meta = getattr(parameter, _DS_AUTOTP_UC_META, None)
    if meta is None or meta["partition_dim"] is None or meta["conversion"]["unsupported_reason"] or not meta["logical_shape"]:
        return None
    widths = meta["sub_param_shard_widths"] or ([meta["partition_sizes"]] if meta["partition_sizes"] else None)
    if widths is None:
        return None
    return AutoTPCut(
        tuple(meta["original_shape"]),
        tuple(meta["logical_shape"]),
        meta["partition_dim"],
        tuple(tuple(part) for part in widths),
    )


def configure_python_gc(engine) -> None:
    """What deepspeed.initialize does last: the configuration's garbage collection settings. (0.19.8)"""
    engine._configure_python_gc()


@contextlib.contextmanager
def without_debug_names(model):
    """While it lasts the engine's map of parameters to names, which holds weak references to them, is empty: torch swaps the
    contents of two tensors only where nobody has any. (0.19.8)"""
    debug_clear_module_and_param_names()
    try:
        yield
    finally:
        debug_extract_module_and_param_names(model)


def make_loss_scaler(engine, dtype):
    """The loss scaler that DeepSpeed gives a ZeRO optimizer whose parameters are of ``dtype``."""
    return _CreateLossScaler(
        dtype=dtype,
        static_loss_scale=engine.loss_scale(),
        dynamic_scaling=engine.dynamic_loss_scale(),
        dynamic_loss_args=engine.dynamic_loss_scale_args(),
    )


def training_autotp() -> None:
    """AutoTP shards for training (with backward collectives) rather than for inference."""
    _set_autotp_mode(training=True)


def hf_tp_plan(model) -> dict[str, str]:
    """The model's tensor-parallel plan (pattern -> style), merged from its config, class and instance."""
    return _get_hf_tp_plan(model) or {}


def user_layer_specs(tensor_parallel: dict) -> tuple[list[dict], list[str]] | None:
    """The user's own partition_config or preset as (layer specs, patterns whose gradient is partial), or None.

    The ``grad_allreduce`` flag is taken out of the specs: it would install AutoTP's per-parameter hook, and the family
    table decides these gradients here. Raises :class:`ConfigError` for what DeepSpeed cannot parse.
    """
    preset = tensor_parallel.get("preset_model")
    if preset is not None and AutoTPPresets.get_preset(preset) is None:
        known = sorted(name for name in vars(AutoTPPresets) if not name.startswith("_") and AutoTPPresets.get_preset(name))
        raise ConfigError(f"tensor_parallel.preset_model={preset!r}: legal are {', '.join(known)}")
    try:
        parsed = get_tensor_parallel_config({"tensor_parallel": tensor_parallel}).get_partition_config_object()
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"tensor_parallel.partition_config (or another tensor_parallel key) is refused: {error}") from None
    if parsed is None:
        return None
    specs, partial = [], []
    for spec in parsed.layer_specs:
        if spec.grad_allreduce:
            partial += spec.patterns
        specs.append(
            {
                "patterns": spec.patterns,
                "partition_type": spec.partition_type.value,
                "shape": spec.shape,
                "partition_dim": spec.partition_dim,
                "model_types": spec.model_types,
                "gather_output": spec.gather_output,
            }
        )
    return specs, partial


def stock_expert_names(preset_model: str) -> dict[str, str | None] | None:
    """What the model calls the parts of an experts block that DeepSpeed's AutoEP renames (router, experts, w1, w2, w3,
    shared_experts, shared_experts_gate); None for a preset that it does not know. (0.19.8)"""
    preset = _PRESET_MODELS.get(preset_model)
    if preset is None:
        return None
    return {
        "router": preset.router_pattern,
        "experts": preset.experts_pattern,
        "w1": preset.expert_w1,
        "w2": preset.expert_w2,
        "w3": preset.expert_w3,
        "shared_experts": preset.shared_experts_pattern or None,
        "shared_experts_gate": preset.shared_experts_gate_pattern or None,
    }
