"""NVIDIA Model-Optimizer's quantizers in a model, recognised without importing it, and what of them cannot be split over ranks.

The quantizers are modules that fake-quantize what they are called with. Those of an experts module are looked at in
:mod:`deepspeed_autoep.quantization.experts`, those of dense layers here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from deepspeed_autoep.errors import ModelError
from deepspeed_autoep.folding.spec import ParallelFoldingSpec

_QUANTIZER_MODULE = "modelopt.torch.quantization.nn.modules.tensor_quantizer"
PER_TOKEN = "block_sizes={-1: None} with type='dynamic' (a range for each token)"


def is_quantizer(module: nn.Module) -> bool:
    """Whether ``module`` is a TensorQuantizer. Nothing is one before Model-Optimizer was imported, which made them."""
    return isinstance(module, getattr(sys.modules.get(_QUANTIZER_MODULE), "TensorQuantizer", ()))


def quantizers_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every quantizer in ``module`` with its name, in module order."""
    return ((name, inner) for name, inner in module.named_modules() if is_quantizer(inner))


def is_active(quantizer: Any) -> bool:
    """Whether it changes what it is called with. Model-Optimizer leaves a disabled quantizer on most layers."""
    return quantizer.is_enabled or quantizer.pre_quant_scale is not None or bool(quantizer.rotate_is_enabled)


def is_calibrating(quantizer: Any) -> bool:
    return quantizer.is_enabled and bool(quantizer._if_calib)


def block_sizes_of(quantizer: Any, dims: int) -> dict[int, int | None]:
    """Dimension (not negative, of ``dims``) -> size of its blocks, None: the whole dimension."""
    sizes = quantizer.block_sizes or {}
    return {key % dims: size for key, size in sizes.items() if isinstance(key, int)}


def blocks_of(quantizer: Any, dims: int) -> dict[int, int]:
    """Dimension -> size of the blocks into which the quantizer itself cuts it."""
    return {dim: size for dim, size in block_sizes_of(quantizer, dims).items() if size is not None}


def dims_of_one_range(quantizer: Any, dims: int) -> set[int]:
    """Dimensions over which the quantizer takes a range from the very tensor that it is called with, of ``dims`` dimensions;
    empty where the range is fixed (calibrated, or constant) or each block's own."""
    if not quantizer.is_enabled or quantizer._use_constant_amax or quantizer._buffers.get("_amax") is not None:
        return set()
    sizes = block_sizes_of(quantizer, dims)
    if any(sizes.values()):
        # Blocks that have a scale of their own for all of them (NVFP4) take that from the whole tensor.
        of_all = (quantizer.block_sizes or {}).get("type") == "dynamic" and not quantizer.is_mx_format
        return set(range(dims)) if of_all else set()
    if sizes:
        return set(sizes)
    axis = quantizer.axis
    kept = () if axis is None else (axis,) if isinstance(axis, int) else axis
    return set(range(dims)) - {dim % dims for dim in kept}


def check_quantizers(model: nn.Module) -> None:
    """Raise :class:`ModelError` for quantizers that no rank could use: learnable ranges, compressed weights, an unfinished
    calibration, a model on the meta device."""
    for name, quantizer in quantizers_of(model):
        where = f"quantizer {name!r}"
        learnable = sorted(key for key, _ in quantizer.named_parameters())
        if learnable:
            raise ModelError(f"{where} has learnable ranges {learnable} (LSQ), which are not supported: legal are calibrated ranges, which training leaves alone")
        if is_calibrating(quantizer):
            raise ModelError(f"{where} is being calibrated: legal is a model whose calibration (modelopt.torch.quantization.quantize) has ended")
        if is_active(quantizer) and not quantizer.fake_quant:
            raise ModelError(f"{where} has fake_quant=False, by which weights are stored compressed and cannot be trained: legal is fake_quant=True")
        if is_active(quantizer):
            _check_device(where, model)


def _check_device(where: str, model: nn.Module) -> None:
    on_meta = next((name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta), None)
    if on_meta is not None:
        raise ModelError(
            f"{where} is in a model on the meta device ({on_meta!r}): legal with quantizers is a model that has its weights on every rank"
        )


def check_dense_quantizers(model: nn.Module, expert_names: list[str], cut: set[str], spec: ParallelFoldingSpec) -> None:
    """Raise :class:`ModelError` for quantizers outside of the experts that would be lost or see a part only.

    ``cut``: names of the modules that AutoTP replaces by its own, without their quantizers.
    """
    inside = tuple(f"{name}." for name in expert_names)
    for name, quantizer in quantizers_of(model):
        if name.startswith(inside) or not is_active(quantizer):
            continue
        owner = name.rpartition(".")[0]
        while owner and owner not in cut:
            owner = owner.rpartition(".")[0]
        if owner:
            pattern = "*" + ".".join(owner.split(".")[-2:]) + ".*"
            raise ModelError(
                f"module {owner!r} is cut by tensor parallelism and has the active quantizer {name!r}: the layer that takes its place "
                "would not call it. Legal with tensor_parallel.autotp_size > 1 are quantized experts: leave dense layers alone by an "
                f"entry at the end of quant_cfg for each of them, here {{'quantizer_name': {pattern!r}, 'enable': False}}, or set autotp_size to 1"
            )
        if spec.tp_size > 1:
            _check_scalar(name, quantizer)
        if spec.world_size > 1 and "weight_quantizer" not in name:
            check_range_of_rows(name, quantizer, dims=3)


def _check_scalar(name: str, quantizer: Any) -> None:
    """Beside cut layers (a key's or value's quantizer in attention) it may see this lane's heads only."""
    large = [key for key, buffer in quantizer.named_buffers() if buffer.numel() > 1]
    if large and "weight_quantizer" not in name and "input_quantizer" not in name:
        raise ModelError(f"quantizer {name!r} has a range of several values ({large}), legal with tensor_parallel.autotp_size > 1 is one")


def check_range_of_rows(name: str, quantizer: Any, dims: int) -> None:
    """Raise :class:`ModelError` where one range is taken from several rows: a rank has a part of the batch, and the result would
    depend on the topology. Rows (or samples) are dimension 0."""
    if 0 in dims_of_one_range(quantizer, dims):
        raise ModelError(
            f"quantizer {name!r} takes its range (amax) from all rows of each call, of which a rank has a part only: the result would "
            f"depend on the number of ranks. Legal are a calibrated range (quantize with a forward_loop that reaches it) and {PER_TOKEN}"
        )
