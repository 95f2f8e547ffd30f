"""Stable counting sort of rows by expert: C++ on CPU where the extension was built, else torch.

``csrc/dispatch_plan.cpp`` is a plain C ABI, loaded with ctypes: it needs no torch headers and cannot fail an install.
"""

from __future__ import annotations

import ctypes

import torch

from deepspeed_autoep.shared_library import load_library

_INT64_POINTER = ctypes.POINTER(ctypes.c_int64)


def _load() -> ctypes.CDLL | None:
    library = load_library("_dispatch_plan")
    if library is not None:
        library.autoep_sort_by_expert.argtypes = [
            _INT64_POINTER,
            ctypes.c_int64,
            ctypes.c_int64,
            _INT64_POINTER,
            _INT64_POINTER,
            _INT64_POINTER,
        ]
        library.autoep_sort_by_expert.restype = ctypes.c_int64
    return library


_LIBRARY = _load()


def is_native() -> bool:
    """Whether the C++ sort is in use for CPU tensors."""
    return _LIBRARY is not None


def _pointer(tensor: torch.Tensor):
    return ctypes.cast(tensor.data_ptr(), _INT64_POINTER)


def sort_by_expert_reference(experts: torch.Tensor, num_experts: int):
    """The torch form, on any device: see :func:`sort_by_expert`."""
    order = torch.argsort(experts, stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=experts.device)
    counts.scatter_add_(0, experts.long(), torch.ones_like(order))
    return order, inverse, counts


@torch.no_grad()
def sort_by_expert(experts: torch.Tensor, num_experts: int):
    """``experts`` [R] integers in [0, num_experts) -> (order [R], inverse [R], counts [num_experts]), all int64.

    ``order`` sorts the rows by expert and keeps equal ones in order; ``inverse[order[i]] = i``.
    Raises ``IndexError`` for an expert out of range (CPU; on a GPU torch's own device assertion reports it).
    """
    if _LIBRARY is None or experts.device.type != "cpu":
        return sort_by_expert_reference(experts, num_experts)
    experts = experts.to(torch.int64).contiguous()
    order, inverse = torch.empty_like(experts), torch.empty_like(experts)
    counts = torch.empty(num_experts, dtype=torch.int64)
    bad = _LIBRARY.autoep_sort_by_expert(
        _pointer(experts), experts.numel(), num_experts, _pointer(order), _pointer(inverse), _pointer(counts)
    )
    if bad >= 0:
        raise IndexError(f"row {bad} is routed to expert {int(experts[bad])}: legal are 0..{num_experts - 1}")
    return order, inverse, counts
