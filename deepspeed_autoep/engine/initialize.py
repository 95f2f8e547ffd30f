"""``deepspeed_autoep.initialize``: decide and check everything, on every rank alike, then build the engine."""

from __future__ import annotations

import copy
import hashlib
import logging
import os
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import DeepSpeedConfig, PipelineModule
from deepspeed import comm as deepspeed_comm
from deepspeed.accelerator import get_accelerator

from deepspeed_autoep import compat
from deepspeed_autoep.config import (
    EXPERT_BLOCK,
    TENSOR_BLOCK,
    FoldingConfig,
    check_batch,
    check_supported,
    low_precision_block,
    parse_folding_config,
)
from deepspeed_autoep.engine.construction import Decisions, EngineSetup
from deepspeed_autoep.engine.dtypes import kept_dtypes
from deepspeed_autoep.engine.engine import AutoEPEngine
from deepspeed_autoep.engine.replicas import synchronize_model, synchronize_random_state
from deepspeed_autoep.engine.user_optimizer import check_user_optimizer, listed_parameters
from deepspeed_autoep.errors import ConfigError, ModelError, UnsupportedError
from deepspeed_autoep.folding.groups import collectively, create_folding_groups, validate_folding_agreement
from deepspeed_autoep.folding.spec import build_folding_spec
from deepspeed_autoep.moe.discovery import ExpertsSite, check_expert_sizes, find_experts
from deepspeed_autoep.ops import requested_ops
from deepspeed_autoep.peft_adapters import check_adapter_kinds, check_expert_adapters, check_trained_copies
from deepspeed_autoep.quantization.experts import check_expert_quantizers
from deepspeed_autoep.quantization.quantizers import check_dense_quantizers, check_quantizers
from deepspeed_autoep.quantization.structure import remember_structure, structure_digest, structure_of
from deepspeed_autoep.tensor_parallel import PartitionPlan, cut_modules, make_plan
from deepspeed_autoep.weights.files import SafetensorsFolder
from deepspeed_autoep.weights.plan import WeightPlan, check_streamable, plan_weights
from deepspeed_autoep.weights.stream import expert_layouts, initialize_buffers

logger = logging.getLogger("deepspeed_autoep")

# DeepSpeed's own default (deepspeed.constants.TORCH_DISTRIBUTED_DEFAULT_PORT).
_DEFAULT_PORT = 29500


def initialize(
    args: Any = None,
    model: torch.nn.Module = None,
    optimizer=None,
    model_parameters=None,
    training_data=None,
    lr_scheduler=None,
    distributed_port: int = _DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn=None,
    config=None,
    mesh_param: Any = None,
    config_params=None,
):
    """Build a DeepSpeed engine whose MoE model is folded. Signature and return value of ``deepspeed.initialize``.

    Without ``expert_parallel.enabled`` in the configuration this *is* ``deepspeed.initialize``. With it, the model's
    experts are spread over ``autoep_size`` ranks and its dense layers cut over ``tensor_parallel.autotp_size``, in
    place: the model keeps its modules, names and ``Parameter`` objects.

    Returns ``(engine, optimizer, training_dataloader, lr_scheduler)``.

    Raises, on every rank, subclasses of :class:`deepspeed_autoep.errors.AutoEPError`: ``ConfigError``,
    ``TopologyError``, ``ModelError``, ``FamilyError``, ``UnsupportedError``, and ``RankMismatchError`` when ranks differ.
    """
    deepspeed.init_distributed(
        dist_backend=get_accelerator().communication_backend_name(),
        distributed_port=distributed_port,
        dist_init_required=dist_init_required,
    )
    # The engine does so later; the collectives before it must not all run on the first device.
    local_rank = int(os.environ.get("LOCAL_RANK", getattr(args, "local_rank", -1)))
    if local_rank >= 0:
        get_accelerator().set_device(local_rank)
    source = _config_source(args, config, config_params)

    def read():
        loaded = {key: value for key, value in _load(source).items() if value is not None}  # null is absent
        compat.merge_tp_model_init_into_config(loaded, mpu, mesh_param, deepspeed_comm)
        folding = parse_folding_config(loaded)
        if folding is not None:
            requested_ops()
        return loaded, folding

    loaded, folding = collectively(read)
    enabled: list = [None] * dist.get_world_size()
    dist.all_gather_object(enabled, folding is not None)
    if not any(enabled):
        return deepspeed.initialize(
            args=args,
            model=model,
            optimizer=optimizer,
            model_parameters=model_parameters,
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            distributed_port=distributed_port,
            mpu=mpu,
            dist_init_required=dist_init_required,
            collate_fn=collate_fn,
            config=config,
            mesh_param=mesh_param,
            config_params=config_params,
        )
    if not all(enabled):
        validate_folding_agreement(build_folding_spec(world_size=len(enabled), pp_size=1, tp_size=1, ep_size=1), _flat(loaded))

    decided = collectively(lambda: _decide(loaded, folding, model, mpu, mesh_param, optimizer, model_parameters, lr_scheduler))
    spec, kept, weights = decided.spec, decided.kept, decided.weights
    digests = {"model": _model_digest(model), "weights": weights.folder.digest() if weights else None}
    digests["quantization"] = structure_digest(decided.structure)
    validate_folding_agreement(spec, _flat(loaded) | digests)
    for note in folding.notes:
        if dist.get_rank() == 0:
            logger.warning(note)

    if kept is not None and kept.fp32 and dist.get_rank() == 0:
        logger.warning("the model is %s already: %d trainable parameters stay fp32, first %r", kept.low, len(kept.fp32), kept.fp32[0])

    handles = create_folding_groups(spec)
    device = torch.device(get_accelerator().current_device_name())
    if weights is None:
        changed = synchronize_model(model, handles, device)
        if changed and dist.get_rank() == 0:
            logger.warning("%d tensors differed between ranks and were taken from rank 0, first %r", len(changed), changed[0])
    else:
        initialize_buffers(model, weights, device)
        if weights.unexpected and dist.get_rank() == 0:
            logger.warning(
                "%d tensors of %r are not the model's and were left, first %r",
                len(weights.unexpected),
                weights.folder.source,
                weights.unexpected[0],
            )
    synchronize_random_state(handles, device)
    remember_structure(model, decided.structure)

    engine_config = _engine_config(loaded, folding, decided.plan)
    binding, engine_mpu = compat.bind_groups(handles)
    zero = loaded.get("zero_optimization", {})
    setup = EngineSetup(
        **vars(decided),
        config=folding,
        handles=handles,
        binding=binding,
        contiguous_gradients=bool(zero.get("contiguous_gradients", True)),
    )
    try:
        engine = _build(
            setup,
            engine_config,
            args=_without_config(args),
            model=model,
            optimizer=optimizer,
            model_parameters=decided.model_parameters,
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            mpu=engine_mpu,
            dist_init_required=dist_init_required,
            collate_fn=collate_fn,
        )
    except BaseException:
        binding.restore()
        raise
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _build(setup: EngineSetup, config: dict, *, mpu, **arguments) -> AutoEPEngine:
    """What deepspeed.initialize does around its engine, with ours."""
    compat.shutdown_init_context()
    try:
        if setup.handles.spec.tp_size > 1:
            compat.training_autotp()
        parsed = DeepSpeedConfig(config, mpu)
        compat.set_optimizer_flags(parsed, arguments["model"])
        engine = AutoEPEngine(autoep=setup, mpu=mpu, config=config, config_class=parsed, **arguments)
    finally:
        compat.restore_init_context()
    compat.configure_python_gc(engine)
    return engine


def _config_source(args, config, config_params):
    source = config if config is not None else config_params
    from_args = getattr(args, "deepspeed_config", None)
    if from_args is not None and source is not None:
        raise ConfigError("the configuration is given twice: by args.deepspeed_config and by config. Give one")
    source = from_args if from_args is not None else source
    if source is None:
        raise ConfigError("no configuration: give config (a dict or a path), or --deepspeed_config on the command line")
    return source


def _load(source) -> dict:
    if isinstance(source, dict):
        return copy.deepcopy(source)
    if isinstance(source, str | os.PathLike) and os.path.exists(source):
        try:
            return compat.load_ds_config(str(source))
        except ValueError as error:
            raise ConfigError(f"{source} is not a valid JSON configuration: {error}") from None
    raise ConfigError(f"config={source!r}: legal are a dict or the path of an existing JSON file")


def _without_config(args):
    """The engine refuses a configuration in both places; ours is the rewritten one."""
    if getattr(args, "deepspeed_config", None) is None:
        return args
    args = copy.copy(args)
    args.deepspeed_config = None
    return args


def _decide(loaded: dict, folding: FoldingConfig, model, mpu, mesh_param, optimizer, model_parameters, lr_scheduler) -> Decisions:
    """Every check that needs one rank only. No collective, nothing changed."""
    if not isinstance(model, torch.nn.Module):
        raise ModelError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        raise UnsupportedError(f"the model is wrapped in {type(model).__name__}: pass the plain model, the engine reduces its gradients")
    if isinstance(model, PipelineModule):
        raise UnsupportedError(f"pipeline parallelism (PipelineModule) is not supported with {EXPERT_BLOCK}: pass the plain model")
    if mpu is not None:
        raise UnsupportedError(
            f"mpu={type(mpu).__name__} is not supported with {EXPERT_BLOCK}: the topology comes from "
            f"{TENSOR_BLOCK}.autotp_size and {EXPERT_BLOCK}.autoep_size; pass mpu=None"
        )
    if mesh_param is not None:
        raise UnsupportedError(f"mesh_param={mesh_param!r} is not supported with {EXPERT_BLOCK}: sequence parallelism is not; pass None")
    check_supported(loaded)
    spec = build_folding_spec(
        world_size=dist.get_world_size(),
        pp_size=1,
        tp_size=folding.tp_size,
        ep_size=folding.expert.autoep_size,
        etp_size=folding.expert.expert_tensor_parallel_size,
    )
    check_batch(loaded, spec.tp_size, spec.world_size)

    if any(getattr(module, "_is_autoep_layer", False) for module in model.modules()):
        raise ModelError("the model is folded already: build a fresh one for another engine")
    kept = kept_dtypes(model, loaded)
    check_adapter_kinds(model, spec.tp_size)
    check_trained_copies(model)
    check_quantizers(model)
    sites = find_experts(model)
    check_expert_sizes(sites, spec.ep_size, spec.etp_size)
    check_expert_adapters(model, sites, spec)
    plan = PartitionPlan()
    if spec.tp_size > 1:
        plan = make_plan(model, [site.name for site in sites], loaded.get(TENSOR_BLOCK, {}), spec.tp_size)
    check_expert_quantizers(model, sites, spec, folding.expert.expert_backend)
    check_dense_quantizers(model, [site.name for site in sites], cut_modules(model, plan), spec)
    structure = structure_of(model)
    weights = _plan_weights(model, sites, folding.expert.initial_weights)
    given = listed_parameters(model_parameters)  # a generator is read once
    check_user_optimizer(model, optimizer, given, lr_scheduler)
    return Decisions(spec, sites, plan, kept, weights, given, structure)


def _plan_weights(model: torch.nn.Module, sites: list[ExpertsSite], source: str | None) -> WeightPlan | None:
    """Where a model on the meta device gets its weights from; None for a model that has them."""
    on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    key = f"{EXPERT_BLOCK}.initial_weights"
    if not on_meta:
        if source is not None:
            raise ConfigError(f"{key}={source!r} is for a model built under torch.device('meta'), and this one has its weights: remove the key")
        return None
    if source is None:
        raise ConfigError(f"parameter {on_meta[0]!r} is on the meta device: set {key} to the folder with the model's safetensors files")
    real = [name for name, tensor in model.named_parameters() if not tensor.is_meta]
    if real:
        raise ModelError(f"parameter {on_meta[0]!r} is on the meta device and {real[0]!r} is not: build all of the model under torch.device('meta'), or none")
    check_streamable(model)
    return plan_weights(model, SafetensorsFolder.open(source), expert_layouts(sites))


def _engine_config(loaded: dict, folding: FoldingConfig, plan: PartitionPlan) -> dict:
    """The configuration that DeepSpeed's own code sees: its AutoEP off, AutoTP told what to cut."""
    config = copy.deepcopy(loaded)
    config[EXPERT_BLOCK] = {"enabled": False}
    if folding.tp_size > 1:
        block = config[TENSOR_BLOCK]
        block.pop("preset_model", None)
        block["partition_config"] = plan.as_partition_config()
    if _bf16_with_fp32_accumulation(config) and config.get("zero_optimization", {}).get("stage", 0) == 0:
        # DeepSpeed has no unsharded optimizer for this mix; ZeRO-1 computes the same update from the same gradients.
        config["zero_optimization"] = {**config.get("zero_optimization", {}), "stage": 1}
        if dist.get_rank() == 0:
            logger.warning("bf16 with fp32 gradient accumulation and zero_optimization.stage=0 runs as stage 1")
    return config


def _bf16_with_fp32_accumulation(config: dict) -> bool:
    accumulation = config.get("data_types", {}).get("grad_accum_dtype")
    return low_precision_block(config) in ("bf16", "bfloat16") and accumulation in ("fp32", "float32", "float")


def _flat(config: dict, prefix: str = "") -> dict[str, Any]:
    """Nested keys joined by dots, for comparing the ranks' configurations."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _model_digest(model: torch.nn.Module) -> str:
    """Names, shapes and dtypes of the parameters and buffers: ranks with different models would meet in mismatched collectives."""
    lines = [f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for name, p in model.named_parameters()]
    lines += [f"{name} {tuple(buffer.shape)} {buffer.dtype}" for name, buffer in model.named_buffers()]
    return f"{type(model).__name__} {hashlib.sha256(chr(10).join(lines).encode()).hexdigest()[:16]}"
