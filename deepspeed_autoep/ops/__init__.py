"""Passes over many gradient segments at once: pack, scale and write back, sum squares and count zeros.

Three implementations of one interface, :class:`BucketOps`: ``reference`` (torch), ``cpp`` (host memory) and ``triton``
(GPU). The device chooses; the environment variable ``DEEPSPEED_AUTOEP_OPS`` names one instead. Where the chosen one
cannot run, one warning says why and the reference runs.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Sequence
from typing import Protocol

import torch

from deepspeed_autoep.errors import ConfigError
from deepspeed_autoep.ops import cpu, reference
from deepspeed_autoep.ops.segments import IN_PLACE, Segments

logger = logging.getLogger("deepspeed_autoep")

ENVIRONMENT_VARIABLE = "DEEPSPEED_AUTOEP_OPS"
_AUTO = "auto"
_LEGAL = (_AUTO, "reference", "cpp", "triton")


class BucketOps(Protocol):
    """What an implementation (a module) offers. See :mod:`deepspeed_autoep.ops.reference`."""

    NAME: str

    def pack(self, segments: Segments, tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None: ...

    def scale_unpack(self, segments: Segments, tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None: ...

    def squares_and_zeros(self, segments: Segments, tensors: Sequence[torch.Tensor]) -> torch.Tensor: ...

    def checksums(self, segments: Segments, tensors: Sequence[torch.Tensor]) -> torch.Tensor: ...


def requested_ops() -> str:
    """The environment variable's value. Raises :class:`ConfigError` for an unknown one."""
    wanted = os.environ.get(ENVIRONMENT_VARIABLE, _AUTO)
    if wanted not in _LEGAL:
        raise ConfigError(f"{ENVIRONMENT_VARIABLE}={wanted!r}: legal are {', '.join(_LEGAL)}")
    return wanted


def choose_ops(device: torch.device) -> BucketOps:
    """The implementation for tensors on ``device``. Raises :class:`ConfigError` as :func:`requested_ops`."""
    wanted = requested_ops()
    if wanted == _AUTO:
        wanted = {"cpu": "cpp", "cuda": "triton"}.get(device.type, "reference")
    ops, reason = _try(wanted, device.type)
    if reason:
        _warn_once(f"gradient ops {wanted!r} cannot run on {device.type} here, the slower reference runs: {reason}")
    return ops


@functools.cache
def _try(name: str, device_type: str) -> tuple[BucketOps, str]:
    """The implementation, or the reference and the reason for it."""
    if name == "cpp":
        if device_type != "cpu":
            return reference, "it works on host memory only"
        if not cpu.is_available():
            return reference, "the C++ library was not built, is outdated or does not load (install with a C++ compiler)"
        return cpu, ""
    if name == "triton":
        try:
            gpu = importlib.import_module("deepspeed_autoep.ops.gpu")
            if device_type == "cpu" and not gpu.is_interpreted():
                return reference, "Triton compiles for GPUs (TRITON_INTERPRET=1 interprets its kernels, slowly)"
            _trial(gpu, device_type)
        except Exception as error:  # a missing or foreign Triton, compiler or driver: each raises its own kind
            return reference, f"{type(error).__name__}: {error}"
        return gpu, ""
    return reference, ""


def _trial(ops: BucketOps, device_type: str) -> None:
    """Run each op once on a few elements: whatever is missing on this machine shows before training, not in it."""
    data = [torch.full((3,), 2.0, device=device_type), torch.zeros(20, dtype=torch.bfloat16, device=device_type)]
    buffer = torch.zeros(36, device=device_type)
    segments = Segments.of(data, offsets=[0, 16], factors=[0.5, 1.0])
    ops.pack(segments, data, buffer)
    ops.scale_unpack(segments, data, buffer)
    ops.checksums(segments, data)
    found = ops.squares_and_zeros(segments, data).tolist()
    if found != [[3.0, 0.0], [0.0, 20.0]]:
        raise RuntimeError(f"a trial computed {found} instead of [[3.0, 0.0], [0.0, 20.0]]")


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


__all__ = ["ENVIRONMENT_VARIABLE", "IN_PLACE", "BucketOps", "Segments", "choose_ops", "requested_ops"]
