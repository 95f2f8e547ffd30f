"""Is an expert's weight read by anything but its experts module? Then the model goes around the interface, and would compute
with this rank's experts only.

Watched in the first forwards, until each experts module has been called (image experts may wait for an image), a hundred at
most; a way that the model takes later is not seen. The error comes from the first operation that takes such a weight, before
any result is wrong, and on every rank that goes there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch
from torch.overrides import TorchFunctionMode

from deepspeed_autoep.errors import ModelError
from deepspeed_autoep.moe.discovery import ExpertsSite

# Attributes that hold a tensor's values; of the others (dtype, device, shape) a model may ask whatever it calls.
_VALUES = ("data", "T", "mT", "H", "mH", "real", "imag")
_ABOUT = {
    *("size", "dim", "numel", "stride", "element_size", "is_floating_point", "is_complex", "is_contiguous", "data_ptr", "get_device"),
    *("__len__", "__hash__", "__repr__", "__format__", "requires_grad_", "register_hook", "result_type", "can_cast", "_is_view"),
}
# They take dtype and device of a second tensor.
_AS_SECOND = {"to", "type_as"}


class InterfaceCheck(TorchFunctionMode):
    """Entered around a forward of the model."""

    def __init__(self, sites: Iterable[ExpertsSite]) -> None:
        super().__init__()
        sites = list(sites)
        self.uncalled = {site.name for site in sites}
        self.owners = {id(parameter): site.name for site in sites for parameter in site.module.parameters()}
        self.inside = 0

    @contextlib.contextmanager
    def calling(self, name: str):
        """Around the forward of the experts module ``name``."""
        self.uncalled.discard(name)
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if not self.inside and not _is_about(func):
            read = args[:1] if getattr(func, "__name__", "") in _AS_SECOND else (args, kwargs)
            for value in _flat(read):
                if id(value) in self.owners:
                    raise ModelError(
                        f"experts module {self.owners[id(value)]!r}: its weights were read by {getattr(func, '__name__', func)} outside of "
                        "its own forward. A model that does not call its experts module cannot be parallelised: this rank holds a part "
                        "of the experts. Let the block call self.experts(hidden_states, top_k_index, top_k_weights)"
                    )
        return func(*args, **(kwargs or {}))


def _is_about(func) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") not in _VALUES
    return name in _ABOUT or name.startswith("new_") or name.endswith("_like")


def _flat(structure):
    if isinstance(structure, torch.Tensor):
        yield structure
    elif isinstance(structure, list | tuple):
        for item in structure:
            yield from _flat(item)
    elif isinstance(structure, dict):
        yield from _flat(list(structure.values()))
