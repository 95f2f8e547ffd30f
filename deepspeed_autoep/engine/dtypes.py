"""Which dtypes a model keeps. DeepSpeed casts every parameter to bf16 or fp16 when that block is enabled.

A model that holds parameters in that dtype already is *mixed as its user made it*: what of it is fp32 (a router by
transformers' ``_keep_in_fp32_modules_strict``, adapters beside a frozen bf16 base) is so on purpose, and stays. A model that
is fp32 throughout asks for nothing, and is cast as ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from deepspeed_autoep.config import low_precision_block
from deepspeed_autoep.errors import ConfigError, ModelError, UnsupportedError

_DTYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class KeptDtypes:
    """Of a mixed model. ``low``: the dtype of the enabled block; ``fp32``: names of the trainable parameters that are not of it."""

    low: torch.dtype
    fp32: tuple[str, ...] = ()


def kept_dtypes(model: nn.Module, config: Mapping) -> KeptDtypes | None:
    """What the model keeps, or None where DeepSpeed's cast is wanted. One rank's decision, from its own model.

    Raises :class:`ModelError` or :class:`ConfigError` for a trainable parameter that would not be trained exactly.
    """
    block = low_precision_block(config)
    low = None if block is None else _DTYPES[block]
    legal = {torch.float32, low}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype not in legal:
            raise _wrong_dtype(name, parameter.dtype, block, low)
    if low is None or all(parameter.dtype != low for parameter in model.parameters()):
        return None
    fp32 = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.dtype != low)
    if fp32:
        _check_config(config, block, low, fp32[0])
    return KeptDtypes(low, fp32)


def _wrong_dtype(name: str, dtype: torch.dtype, block: str | None, low: torch.dtype | None) -> Exception:
    fitting = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
    if block is None and fitting is not None:
        return ConfigError(
            f"parameter {name!r} is {dtype} and trainable, and neither bf16.enabled nor fp16.enabled is true: its optimizer state "
            f'would be {dtype} too. Add "{fitting}": {{"enabled": true}}, which keeps fp32 masters, or convert the model to fp32'
        )
    also = "" if low is None else f" and {low} ({block}.enabled)"
    return ModelError(f"parameter {name!r} is {dtype} and trainable: legal is torch.float32{also}. Convert or freeze it")


def _check_config(config: Mapping, block: str, low: torch.dtype, name: str) -> None:
    """Settings that would round the fp32 parameters of a mixed model."""
    data_types = config.get("data_types") or {}
    if data_types.get("param_dtype") is not None:
        raise ConfigError(
            f"data_types.param_dtype={data_types['param_dtype']!r} would cast {name!r}, which is torch.float32 in a model that is "
            f"{low} already: remove the key to keep it, or cast the model before initialize"
        )
    accumulation = data_types.get("grad_accum_dtype")
    legal = {torch.bfloat16: ("bf16", "bfloat16"), torch.float16: ("fp16", "float16", "half")}[low]
    if accumulation not in (None, *legal, "fp32", "float32", "float"):
        raise ConfigError(f"data_types.grad_accum_dtype={accumulation!r}: legal with parameters in {low} are {legal[0]!r} and 'fp32'")
    options = config.get(block) or {}
    for key in ("bf16_master_weights_and_grads", "fp16_master_weights_and_grads"):
        if options.get(key):
            raise UnsupportedError(f"{block}.{key}=true would round {name!r}, which is torch.float32: remove the key, or cast the parameter")
