"""The bucket ops in C++ (``csrc/gradient_ops.cpp``), for tensors in host memory. See :mod:`deepspeed_autoep.ops.reference`.

The library is built three times, portable, for AVX2 (with FMA and F16C) and for AVX-512; the processor decides which one
is loaded. Passes use ``torch.get_num_threads()`` threads.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence, Set

import torch

from deepspeed_autoep.ops.segments import DTYPES, Segments, check
from deepspeed_autoep.shared_library import load_library

NAME = "cpp"
_PORTABLE, _AVX2, _AVX512 = "_gradient_ops", "_gradient_ops_avx2", "_gradient_ops_avx512"
# By the processor's capability in torch's words, the fastest first.
_BUILDS = {"AVX512": (_AVX512, _AVX2, _PORTABLE), "AVX2": (_AVX2, _PORTABLE)}
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


def runnable_builds() -> tuple[str, ...]:
    """File stems of the builds that this processor can run, the fastest first."""
    return _BUILDS.get(torch.backends.cpu.get_cpu_capability(), (_PORTABLE,))


def _load() -> ctypes.CDLL | None:
    library = load_library(*runnable_builds())
    try:
        return None if library is None else declare(library)
    except AttributeError:  # built from older sources, which lack a function
        return None


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Give a freshly loaded library its signatures. Raises ``AttributeError`` where it lacks a function."""
    count, pointer, threads = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32
    library.autoep_pack.argtypes = [count, *[pointer] * 5, threads]
    library.autoep_scale_unpack.argtypes = [count, *[pointer] * 6, threads]
    library.autoep_squares_and_zeros.argtypes = [count, *[pointer] * 5, threads]
    library.autoep_checksums.argtypes = [count, *[pointer] * 4, threads]
    for function in (
        library.autoep_pack,
        library.autoep_scale_unpack,
        library.autoep_squares_and_zeros,
        library.autoep_checksums,
    ):
        function.restype = None
    return library


_LIBRARY = _load()


def is_available() -> bool:
    return _LIBRARY is not None


def _static(segments: Segments) -> tuple:
    """counts, offsets, factors as C arrays."""
    arrays = segments.derived.get(NAME)
    if arrays is None:
        size = len(segments.counts)
        arrays = segments.derived[NAME] = (
            (ctypes.c_int64 * size)(*segments.counts),
            (ctypes.c_int64 * size)(*segments.offsets),
            (ctypes.c_float * size)(*segments.factors),
        )
    return arrays


def _dynamic(tensors: Sequence[torch.Tensor], dtypes: Set[torch.dtype]) -> tuple:
    """Addresses and dtype codes as C arrays. By way of ``array``: ctypes takes its time over each element."""
    size = len(tensors)
    addresses = array("Q", [tensor.data_ptr() for tensor in tensors])
    if len(dtypes) == 1:
        (dtype,) = dtypes
        codes = array("i", [_CODES[dtype]]) * size
    else:
        codes = array("i", [_CODES[tensor.dtype] for tensor in tensors])
    return (ctypes.c_void_p * size).from_buffer(addresses), (ctypes.c_int32 * size).from_buffer(codes)


@torch.no_grad()
def pack(segments: Segments, tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    dtypes = check(segments, tensors, buffer)
    counts, offsets, _ = _static(segments)
    addresses, codes = _dynamic(tensors, dtypes)
    _LIBRARY.autoep_pack(len(tensors), addresses, codes, counts, offsets, buffer.data_ptr(), torch.get_num_threads())


@torch.no_grad()
def scale_unpack(segments: Segments, tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    dtypes = check(segments, tensors, buffer)
    counts, offsets, factors = _static(segments)
    addresses, codes = _dynamic(tensors, dtypes)
    _LIBRARY.autoep_scale_unpack(
        len(tensors), addresses, codes, counts, offsets, factors, buffer.data_ptr(), torch.get_num_threads()
    )


@torch.no_grad()
def squares_and_zeros(segments: Segments, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    dtypes = check(segments, tensors, None)
    counts, _, _ = _static(segments)
    addresses, codes = _dynamic(tensors, dtypes)
    result = torch.empty(2, len(tensors), dtype=torch.float64)
    squares = result.data_ptr()
    zeros = squares + result.element_size() * len(tensors)
    _LIBRARY.autoep_squares_and_zeros(len(tensors), addresses, codes, counts, squares, zeros, torch.get_num_threads())
    return result


@torch.no_grad()
def checksums(segments: Segments, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    dtypes = check(segments, tensors, None)
    counts, _, _ = _static(segments)
    addresses, codes = _dynamic(tensors, dtypes)
    result = torch.empty(len(tensors), dtype=torch.int64)
    _LIBRARY.autoep_checksums(len(tensors), addresses, codes, counts, result.data_ptr(), torch.get_num_threads())
    return result
