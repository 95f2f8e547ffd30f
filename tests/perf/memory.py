"""Memory of one process: resident set from /proc, and live tensor bytes from the dispatcher."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def resident_bytes(field: str = "VmRSS") -> int:
    """``VmRSS`` now, or ``VmHWM``: its peak since the start or :func:`reset_resident_peak`."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0


def release_free_memory() -> None:
    """Give what building a model left behind back to the kernel, so that the resident set is what is in use (glibc)."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def reset_resident_peak() -> None:
    """Linux: 5 in clear_refs sets VmHWM to VmRSS."""
    with open("/proc/self/clear_refs", "w") as control:
        control.write("5")


class AnonymousPeak:
    """Highest RssAnon of this process while the context lasts, above that at its start."""

    def __enter__(self) -> AnonymousPeak:
        self._start = self.peak = self._now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, self._now()) - self._start

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.peak = max(self.peak, self._now())

    @staticmethod
    def _now() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("RssAnon:")) * 1024


class LiveTensors(TorchDispatchMode):
    """Peak bytes of the tensors made inside the context and alive at the same time; each storage counts once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, int] = {}  # storage -> its bytes, 0 when it was there before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for storage in _storages((args, kwargs)):
            self._add(storage, outside=True)
        out = func(*args, **kwargs)
        for storage in _storages(out):
            self._add(storage, outside=False)
        self.peak = max(self.peak, self.live)
        return out

    def _add(self, storage, outside: bool) -> None:
        key = storage._cdata
        if key not in self._known:
            size = 0 if outside else storage.nbytes()
            self._known[key] = size
            self.live += size
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._known.pop(key, 0)


def _storages(structure):
    return [leaf.untyped_storage() for leaf in tree_leaves(structure) if isinstance(leaf, torch.Tensor) and not leaf.is_meta]


def tensor_bytes(tensors) -> int:
    """Bytes of the distinct storages behind ``tensors``."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
