"""The two blocks of ``ds_config.json``, parsed once at the boundary.

``expert_parallel`` accepts every key of DeepSpeed 0.19.8. Keys that describe DeepSpeed's own router and experts have
nothing to act on here, since the model's own run unchanged: they are accepted and reported, each with the reason.
Unknown keys are an error that names the nearest legal one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError

from deepspeed_autoep.errors import ConfigError, UnsupportedError

EXPERT_BLOCK, TENSOR_BLOCK = "expert_parallel", "tensor_parallel"

_ROUTER = "the model's own router runs unchanged"
_EXPERTS = "the model's own experts module runs, found by its interface"
_DEEPEP = "tokens travel through torch.distributed all-to-all, not DeepEP"
# DeepSpeed's keys that have no effect here -> why.
IGNORED_KEYS: dict[str, str] = {
    "async_split_plan": "split sizes are exchanged once a layer, before the rows",
    "preset_model": _EXPERTS,
    "moe_layer_pattern": _EXPERTS,
    "expert_pattern": _EXPERTS,
    "router_pattern": _ROUTER,
    "disable_triton_grouped_mm": "grouped matmuls are torch's own",
    "route_norm": _ROUTER,
    "route_scale": _ROUTER,
    "score_apply": _ROUTER,
    "combine_impl": "rows are weighted and summed as transformers does",
    "row_weighting_impl": "rows are weighted and summed as transformers does",
    "gate_up_impl": "gate and up run as the model stores them",
    "comm_backend": _DEEPEP,
    "comm_num_sm": _DEEPEP,
    "comm_qp_margin": _DEEPEP,
    "comm_max_tokens_per_rank": _DEEPEP,
    "num_expert_groups": _ROUTER,
    "num_limited_groups": _ROUTER,
    "score_func": _ROUTER,
    "top_k": _ROUTER,
    "routed_scaling_factor": _ROUTER,
    "load_balance_coeff": "the model's own auxiliary loss is used (output_router_logits in the model's config)",
    "expert_w1": _EXPERTS,
    "expert_w2": _EXPERTS,
    "expert_w3": _EXPERTS,
    "num_experts_attr": _EXPERTS,
    "top_k_attr": _ROUTER,
    "has_shared_experts": "shared experts stay in the model and are cut by tensor_parallel",
    "shared_experts_pattern": "shared experts stay in the model and are cut by tensor_parallel",
    "shared_experts_gate_pattern": "shared experts stay in the model and are cut by tensor_parallel",
    "expert_activation": _EXPERTS,
}

# tensor_parallel keys of DeepSpeed 0.19.8 (runtime/tensor_parallel/config.py), which parses their values.
TENSOR_KEYS = (
    "autotp_size",
    "dtype",
    "injection_policy_tuple",
    "keep_module_on_host",
    "kernel_inject",
    "partition_config",
    "preset_model",
    "replace_with_kernel_inject",
    "tensor_parallel",
    "tp",
    "tp_overlap_comm",
    "vocab_parallel_ce_backend",
    "vocab_parallel_lm_head",
)


# DeepSpeed's top-level keys that training turns on most: it ignores what it does not know, so a near miss is an error here.
_COMMON_KEYS = (
    "bf16",
    "data_types",
    "fp16",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "gradient_predivide_factor",
    "optimizer",
    "prescale_gradients",
    "scheduler",
    "steps_per_print",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "wall_clock_breakdown",
    "zero_allow_untested_optimizer",
    "zero_optimization",
)


class ExpertParallelConfig(BaseModel):
    """The ``expert_parallel`` block."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: StrictBool = False
    autoep_size: StrictInt = Field(1, ge=1, description="EP: ranks among which the experts are spread")
    expert_tensor_parallel_size: StrictInt = Field(1, ge=1, description="ETP: ranks that share one expert")
    validate_folding_routing: StrictBool = Field(
        False, description="check on every forward that a TP group's lanes hold the same samples and routing"
    )
    use_grouped_mm: StrictBool = Field(True, description="false: a loop of matmuls over the local experts")
    replicated_gradient_sync: Literal["average", "verify", "off"] = Field(
        "average",
        description="gradients that all lanes of a TP group compute alike: average them; or leave them, and verify now and then "
        "that they are the same; or only leave them",
    )
    replicated_gradient_verify_interval: StrictInt = Field(100, ge=1, description="steps between two checks of 'verify'")
    tp_gradient_correction: Literal["auto", "partition", "bucket"] = Field(
        "auto",
        description="ZeRO-1/2: correct gradients over TP on a rank's own partition after the reduction over data, or on each "
        "bucket before it; auto: bucket with overlap_comm, else partition",
    )
    parameter_norm: StrictBool = Field(False, description="compute the norm of the parameters with the gradient statistics")
    expert_backend: Literal["auto", "grouped_mm", "loop", "model"] = Field(
        "auto", description="how local experts compute; model: the model's own forward with top-1 routing"
    )
    async_checkpoint: StrictBool = Field(
        False, description="save_checkpoint copies a rank's part to host memory and writes it beside the training"
    )
    verify_checkpoint: Literal["full", "sizes"] = Field(
        "full", description="load_checkpoint reads every file once more for its checksum before it changes anything, or compares sizes only"
    )
    initial_weights: StrictStr | None = Field(
        None,
        min_length=1,
        description="folder of safetensors files from which a model on the meta device gets its weights, each rank its own part",
    )


class FoldingConfig(BaseModel):
    """Both blocks as this package uses them."""

    model_config = ConfigDict(frozen=True)

    expert: ExpertParallelConfig
    tp_size: int
    notes: tuple[str, ...] = ()  # keys that were accepted and have no effect, with the reason

    @property
    def expert_backend(self) -> str:
        return "loop" if self.expert.expert_backend == "auto" and not self.expert.use_grouped_mm else self.expert.expert_backend


def nearest(word: str, legal: Iterable[str]) -> str | None:
    matches = difflib.get_close_matches(word, list(legal), n=1, cutoff=0.6)
    return matches[0] if matches else None


def _unknown_key(path: str, key: str, legal: Iterable[str]) -> ConfigError:
    legal = sorted(legal)
    guess = nearest(key, legal)
    hint = f"did you mean {path + guess!r}?" if guess else f"legal keys: {', '.join(legal)}"
    return ConfigError(f"unknown key {path + key!r}: {hint}")


def _block(config: Mapping, name: str) -> dict:
    """A nested object of the configuration; absent and null are empty, as in DeepSpeed."""
    block = config.get(name)
    if block is None:
        return {}
    if not isinstance(block, dict):
        raise ConfigError(f"{name} must be an object of keys and values, got {block!r}")
    return block


def _check_block_names(config: dict) -> None:
    """A misspelt block name would be ignored by DeepSpeed, and the run would train without it."""
    blocks = (EXPERT_BLOCK, TENSOR_BLOCK)
    for key in config:
        for legal in blocks:
            if key not in blocks and difflib.SequenceMatcher(None, str(key), legal).ratio() > 0.85:
                raise ConfigError(f"unknown key {key!r}: did you mean {legal!r}?")
        close = difflib.get_close_matches(str(key), _COMMON_KEYS, n=1, cutoff=0.9)
        if key not in _COMMON_KEYS and close:
            raise ConfigError(f"unknown key {key!r}: did you mean {close[0]!r}?")


def _parse_expert_block(block: dict) -> tuple[ExpertParallelConfig, tuple[str, ...]]:
    legal = [*ExpertParallelConfig.model_fields, *IGNORED_KEYS]
    for key in block:
        if key not in legal:
            raise _unknown_key(f"{EXPERT_BLOCK}.", key, legal)
    coefficient = block.get("load_balance_coeff")
    if coefficient is not None:
        raise ConfigError(
            f"{EXPERT_BLOCK}.load_balance_coeff={coefficient!r} is not supported (DeepSpeed 0.19.8 refuses it too): set it "
            "to null, and use the model's own auxiliary loss (output_router_logits and router_aux_loss_coef in its config)"
        )
    notes = tuple(
        f"{EXPERT_BLOCK}.{key} has no effect: {IGNORED_KEYS[key]}"
        for key in block
        if key in IGNORED_KEYS and block[key] is not None
    )
    try:
        parsed = ExpertParallelConfig(**{key: value for key, value in block.items() if key not in IGNORED_KEYS})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{EXPERT_BLOCK}.{key}={first['input']!r}: {first['msg']}") from None
    if "replicated_gradient_verify_interval" in block and parsed.replicated_gradient_sync != "verify":
        notes += (
            f"{EXPERT_BLOCK}.replicated_gradient_verify_interval has no effect: replicated_gradient_sync is "
            f"{parsed.replicated_gradient_sync!r}, not 'verify'",
        )
    return parsed, notes


def _parse_tensor_block(block: dict) -> int:
    for key in block:
        if key not in TENSOR_KEYS:
            raise _unknown_key(f"{TENSOR_BLOCK}.", key, TENSOR_KEYS)
    size = block.get("autotp_size", 0)
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ConfigError(f"{TENSOR_BLOCK}.autotp_size={size!r}: legal are whole numbers from 0 (off)")
    for key, kind, words in (("partition_config", dict, "an object"), ("preset_model", str, "a name")):
        if not isinstance(block.get(key), kind | None):
            raise ConfigError(f"{TENSOR_BLOCK}.{key}={block[key]!r}: legal are {words} or null")
    inner = block.get("tp", block.get("tensor_parallel")) or {}
    if isinstance(inner, dict) and inner.get("tp_size", 1) not in (1, max(size, 1)):
        raise ConfigError(f"{TENSOR_BLOCK}.tp.tp_size={inner['tp_size']!r} differs from {TENSOR_BLOCK}.autotp_size={size}: remove it")
    if block.get("vocab_parallel_lm_head"):
        raise UnsupportedError(
            f"{TENSOR_BLOCK}.vocab_parallel_lm_head=true is not supported with {EXPERT_BLOCK}: remove it "
            "(the output head is sharded and its output gathered, or kept whole when it is tied)"
        )
    return max(size, 1)


def parse_folding_config(config: dict) -> FoldingConfig | None:
    """Parse and check both blocks of a DeepSpeed configuration; None when expert parallelism is not enabled.

    Raises :class:`ConfigError` or :class:`UnsupportedError`, which name the key, its value and what is legal.
    """
    _check_block_names(config)
    expert, notes = _parse_expert_block(_block(config, EXPERT_BLOCK))
    if not expert.enabled:
        return None
    tp_size = _parse_tensor_block(_block(config, TENSOR_BLOCK))
    return FoldingConfig(
        expert=expert,
        tp_size=tp_size,
        notes=notes,
    )


# Optimizers that would not be exact, by a part of their type's name: their update of one element depends on other
# elements of its tensor, they reduce gradients themselves, or DeepSpeed regroups their parameters.
_NOT_EXACT = {
    "lamb": "its trust ratio needs the whole tensor, each rank holds a part",
    "muon": "it orthogonalises whole matrices, each rank holds a part",
    "adafactor": "its factored moments need the whole matrix, each rank holds a part",
    "adagrad": "DeepSpeed rebuilds it over all partitions as one group",
    "onebitadam": "it reduces gradients itself",
    "onebitlamb": "it reduces gradients itself",
    "zerooneadam": "it reduces gradients itself",
    "lbfgs": "it needs a closure, and products over all parameters",
    "sparseadam": "it takes sparse gradients only",
    "lars": "its trust ratio needs the whole tensor, each rank holds a part",
    "shampoo": "it preconditions whole matrices, each rank holds a part",
    "soap": "it preconditions whole matrices, each rank holds a part",
    "galore": "it projects whole matrices, each rank holds a part",
    "novograd": "its second moment is one of the whole tensor, each rank holds a part",
    "prodigy": "it estimates its step from all parameters, each rank holds a part",
    "dadapt": "it estimates its step from all parameters, each rank holds a part",
}


def _enabled(value: Any) -> bool:
    """Whether a block such as ``amp`` is on: each is off until its ``enabled`` says otherwise."""
    return bool(value.get("enabled", False)) if isinstance(value, dict) else bool(value)


def _device(zero: dict, key: str) -> Any:
    block = zero.get(key)
    if not isinstance(block, dict | None):
        raise ConfigError(f"zero_optimization.{key}={block!r}: legal are an object or null")
    return (block or {}).get("device")


def check_supported(config: dict) -> None:
    """Refuse DeepSpeed features that this package does not make exact, and values of a wrong type in what it reads.

    Raises :class:`UnsupportedError` with a way out, or :class:`ConfigError`.
    """
    zero = _block(config, "zero_optimization")

    def refuse(key: str, value: Any, remedy: str) -> None:
        raise UnsupportedError(f"{key}={value!r} is not supported with {EXPERT_BLOCK}.enabled=true: {remedy}")

    for name in ("bf16", "fp16", "data_types", "optimizer", "scheduler"):
        _block(config, name)  # an object, or absent
    clipping = config.get("gradient_clipping", 0.0)
    if isinstance(clipping, bool) or not isinstance(clipping, int | float) or clipping < 0:
        raise ConfigError(f"gradient_clipping={clipping!r}: legal are numbers from 0 (off)")
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2):
        refuse("zero_optimization.stage", stage, "use stage 0, 1 or 2 (stage 2 shards gradients and optimizer state)")
    for key in ("offload_optimizer", "offload_param"):
        device = _device(zero, key)
        if device not in (None, "none"):
            refuse(f"zero_optimization.{key}.device", device, "remove it; a larger data-parallel size shrinks the state per rank")
    for key in ("cpu_offload", "zenflow", "zero_quantized_gradients", "zero_quantized_weights"):
        if zero.get(key):
            refuse(f"zero_optimization.{key}", zero[key], "remove it")
    if not zero.get("reduce_scatter", True):
        refuse("zero_optimization.reduce_scatter", False, "set it to true: the other path averages experts over the wrong ranks")
    if config.get("sequence_parallel_size") not in (None, 1):
        refuse("sequence_parallel_size", config["sequence_parallel_size"], "use tensor_parallel.autotp_size for long sequences")
    if config.get("use_data_before_expert_parallel_"):
        refuse("use_data_before_expert_parallel_", True, "set it to false: EP groups are consecutive ranks")
    if _block(config, "checkpoint").get("use_node_local_storage"):
        refuse("checkpoint.use_node_local_storage", True, "set it to false: a checkpoint is one folder on storage that all ranks share")
    if config.get("datastates_ckpt", False) is not False:
        refuse("datastates_ckpt", config["datastates_ckpt"], f"remove it, and set {EXPERT_BLOCK}.async_checkpoint to true")
    if _block(config, "compile").get("deepcompile"):
        refuse("compile.deepcompile", True, "set it to false")
    for key in ("sparse_gradients", "amp", "torch_autocast", "hybrid_engine"):
        if config.get(key) and _enabled(config[key]):
            refuse(key, config[key], "use bf16 or fp16 instead" if key in ("amp", "torch_autocast") else "remove it")
    check_optimizer(str(_block(config, "optimizer").get("type", "")))


def low_precision_block(config: Mapping) -> str | None:
    """Name of the enabled block for half precision, or None. As DeepSpeed, reads ``bfloat16`` where ``bf16`` is absent.

    Raises :class:`ConfigError`.
    """
    for name in ("bf16" if config.get("bf16") is not None else "bfloat16", "fp16"):
        enabled = _block(config, name).get("enabled", False)
        if enabled not in (True, False):
            raise ConfigError(f"{name}.enabled={enabled!r}: legal are true and false")
        if enabled:
            return name
    return None


def check_optimizer(name: str) -> None:
    """Refuse an optimizer by its type's name, from the configuration or the client's. Raises :class:`UnsupportedError`."""
    reason = next((reason for known, reason in _NOT_EXACT.items() if known in name.lower()), None)
    if reason is not None:
        raise UnsupportedError(
            f"optimizer.type={name!r} is not supported with {EXPERT_BLOCK}.enabled=true: {reason}; use AdamW, Adam or SGD"
        )


def check_batch(config: dict, tp_size: int, world_size: int) -> None:
    """``train_batch_size = micro_batch * accumulation * dp`` with ``dp = world / tp``; missing ones must be derivable.

    Raises :class:`ConfigError`.
    """
    total = config.get("train_batch_size")
    parts = {key: config.get(key) for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")}
    dp = world_size // tp_size
    if total is None and parts["train_micro_batch_size_per_gpu"] is None:
        raise ConfigError("give train_batch_size or train_micro_batch_size_per_gpu: both are missing")
    for key, size in {"train_batch_size": total, **parts}.items():
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ConfigError(f"{key}={size!r}: legal are whole numbers from 1")
    if total is None:
        return
    known = {key: size for key, size in parts.items() if size is not None}
    product = dp
    for size in known.values():
        product *= size
    if total != product if len(known) == len(parts) else total % product:
        relation = "equal" if len(known) == len(parts) else "be a multiple of"
        raise ConfigError(
            f"train_batch_size={total} must {relation} {' * '.join([*known, 'dp'])} = "
            f"{' * '.join(str(size) for size in [*known.values(), dp])} = {product}, where dp = world / "
            f"{TENSOR_BLOCK}.autotp_size = {world_size} / {tp_size}; remove train_batch_size to let it be derived"
        )
