"""The structure of a quantized model: which quantizers it has and how they are set, without their values.

It is Model-Optimizer's own ``modelopt_state``, whose names carry the expert's index. A rank that holds some experts would
number them from 0, so a copy is taken before the model is cut. Values (``_amax``) are in the state dict; a model must have the
structure of the values that it loads.
"""

from __future__ import annotations

import copy
import hashlib
import sys
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from deepspeed_autoep.errors import ModelError
from deepspeed_autoep.quantization.quantizers import quantizers_of

_CONVERSION = "modelopt.torch.opt.conversion"
# Follows from the last forward, not from how a quantizer is set.
_VOLATILE = ("_input_dtype",)
_BEFORE_CUT: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()


def remember_structure(model: nn.Module, structure: dict[str, Any]) -> None:
    """Keep what :func:`structure_of` says of a model that is about to be cut, for what it says afterwards."""
    _BEFORE_CUT[model] = structure


def structure_of(model: nn.Module) -> dict[str, Any]:
    """A copy of ``modelopt_state`` of the whole ``model``, {} for one that Model-Optimizer has not changed.

    Of an engine's module it is what that was before :func:`deepspeed_autoep.initialize` cut it: names carry the expert's index
    in the whole model. Raises :class:`ModelError` for a part of such a module.
    """
    if model in _BEFORE_CUT:
        return copy.deepcopy(_BEFORE_CUT[model])
    if any(getattr(module, "_is_autoep_layer", False) for module in model.modules()):
        raise ModelError(f"{type(model).__name__} holds this rank's experts only: structure_of takes engine.module, or a model before initialize")
    conversion = sys.modules.get(_CONVERSION)
    if conversion is None:
        return {}
    # Under a wrapper (PEFT's) it is an inner model that was changed.
    key = conversion.ModeloptStateManager._state_key
    changed = [(name, module) for name, module in model.named_modules() if key in vars(module)]
    if len(changed) > 1:
        raise ModelError(f"Model-Optimizer has changed parts of the model by themselves, {[name for name, _ in changed]}: legal is one call for the whole model")
    return copy.deepcopy(conversion.modelopt_state(changed[0][1])) if changed else {}


def check_structure(saved: Mapping[str, Any], model: nn.Module) -> None:
    """Raise :class:`ModelError` that names the first module or property in which ``model`` (before or after
    :func:`deepspeed_autoep.initialize`) differs from the structure ``saved`` by :func:`structure_of`.

    Modes and quantizers are compared, with the shapes of what they keep; not the configuration from which they were made.
    """
    here = structure_of(model)
    hint = "Restore the saved structure in the plain model before deepspeed_autoep.initialize: restore_structure(model, saved)"
    if bool(saved) != bool(here):
        has, lacks = ("the checkpoint", "the model") if saved else ("the model", "the checkpoint")
        raise ModelError(f"{has} is changed by Model-Optimizer and {lacks} is not. {hint}")
    modes, expected = [[mode for mode, _ in state.get("modelopt_state_dict", ())] for state in (here, saved)]
    if modes != expected:
        raise ModelError(f"the model has Model-Optimizer's modes {modes}, the checkpoint {expected}. {hint}")
    mine, theirs = _quantizer_states(here), _quantizer_states(saved)
    for name in sorted(mine.keys() | theirs.keys()):
        if name not in mine or name not in theirs:
            has, lacks = ("the checkpoint", "the model") if name in theirs else ("the model", "the checkpoint")
            raise ModelError(f"quantizer {name!r} is in {has} and not in {lacks}. {hint}")
        for key in sorted(mine[name].keys() | theirs[name].keys()):
            found, wanted = (_plain(state[name].get(key)) for state in (mine, theirs))
            if found != wanted and key not in _VOLATILE:
                raise ModelError(f"quantizer {name!r} has {key}={found!r} in the model and {wanted!r} in the checkpoint. {hint}")


def restore_structure(model: nn.Module, state: Mapping[str, Any]) -> nn.Module:
    """Give a plain model, in place, the quantizers of ``state`` (from :func:`structure_of`), before
    :func:`deepspeed_autoep.initialize`. Returns it; {} leaves it as it is.

    Buffers of the quantizers are NaN until values are loaded. Raises :class:`ModelError` when Model-Optimizer is not
    installed, for a model that it has changed already, and for a state that does not fit the model.
    """
    if not state:
        return model
    try:
        from modelopt.torch import opt
    except ImportError as error:
        raise ModelError(
            f"the structure of a quantized model needs nvidia-modelopt, which cannot be imported ({error}): pip install "
            "deepspeed-autoep[quantization]"
        ) from None
    if structure_of(model):
        raise ModelError(f"{type(model).__name__} is changed by Model-Optimizer already: restore_structure takes a plain model")
    try:
        model = opt.restore_from_modelopt_state(model, copy.deepcopy(dict(state)))
    except Exception as error:
        raise ModelError(f"Model-Optimizer cannot restore this structure in {type(model).__name__}: {type(error).__name__}: {error}") from error
    for _, quantizer in quantizers_of(model):
        for buffer in quantizer.buffers():
            if buffer.is_floating_point():
                buffer.fill_(float("nan"))  # an empty buffer's content would pass for a range
    return model


def structure_digest(structure: Mapping[str, Any]) -> str | None:
    """For comparing ranks; None for an unchanged model."""
    if not structure:
        return None
    states = {name: {key: value for key, value in state.items() if key not in _VOLATILE} for name, state in _quantizer_states(structure).items()}
    return hashlib.sha256(repr(_plain(states)).encode()).hexdigest()[:16]


def _quantizer_states(structure: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Quantizer -> its properties, of the last mode that has them."""
    found: dict[str, dict[str, Any]] = {}
    for _, mode in structure.get("modelopt_state_dict", ()):
        found = mode.get("metadata", {}).get("quantizer_state") or found
    return found


def _plain(value: Any) -> Any:
    """Comparable, and the same in every process: sequences as tuples, tensors by shape and dtype, other objects by class."""
    if isinstance(value, Mapping):
        return tuple(sorted((str(key), _plain(inner)) for key, inner in value.items()))
    if isinstance(value, list | tuple):
        return tuple(_plain(inner) for inner in value)
    if isinstance(value, set | frozenset):
        return tuple(sorted(map(repr, value)))
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), str(value.dtype))
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, torch.dtype):
        return str(value)
    if hasattr(value, "model_dump"):
        return _plain(value.model_dump())
    return f"{type(value).__module__}.{type(value).__qualname__}"
