"""Record every collective of a piece of code as the c10d dispatcher sees it, and replay a recording without compute."""

from __future__ import annotations

import os
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# c10d operator -> kind. An operator that is not listed here keeps its own name, and is counted all the same.
_KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
}
# Methods of ProcessGroup through which Python enters a collective: the second, independent count.
_METHODS = (
    "allreduce allreduce_coalesced allgather allgather_coalesced allgather_into_tensor_coalesced _allgather_base "
    "all_gather_single all_gather_single_coalesced alltoall alltoall_base all_to_all_single broadcast reduce "
    "reduce_scatter _reduce_scatter_base reduce_scatter_single reduce_scatter_single_coalesced "
    "reduce_scatter_tensor_coalesced gather scatter barrier send recv"
).split()
_SITE_FRAMES = 4
# Files between a call site and the dispatcher, and this one.
_MACHINERY = (
    "torch/distributed/",
    "torch/utils/",
    "torch/autograd/",
    "torch/_",
    "torch/nn/modules/module.py",
    "deepspeed/comm/",
    "deepspeed/utils/",
    "typing_extensions",
    "tests/perf/",
)


@dataclass(frozen=True)
class Collective:
    """One collective on one rank. Bytes are those of its own tensors: an in-place one counts as input and as output."""

    kind: str
    phase: str
    ranks: tuple[int, ...]
    index: int  # of this rank in ``ranks``
    shapes_in: tuple[tuple[int, ...], ...]
    shapes_out: tuple[tuple[int, ...], ...]
    dtype: str
    bytes_in: int
    bytes_out: int
    in_place: bool
    root: int | None  # index in the group
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None  # rows received from, rows sent to each peer
    site: tuple[str, ...]  # innermost call first

    @property
    def bytes(self) -> int:
        return self.bytes_in + self.bytes_out

    @property
    def sent(self) -> int:
        """Bytes that leave this rank with bandwidth-optimal algorithms (ring), whatever the backend does."""
        size = len(self.ranks)
        peers = (size - 1) / size
        if self.kind == "all_to_all":
            rows = self.splits[1] if self.splits else (1,) * size
            return round(self.bytes_in * (1 - rows[self.index] / max(1, sum(rows))))
        factor = {"all_reduce": 2 * peers, "all_gather": size - 1, "reduce_scatter": peers, "broadcast": peers}
        return round(self.bytes_in * factor.get(self.kind, 1.0))


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _call_site() -> tuple[str, ...]:
    frames = []
    for frame in reversed(traceback.extract_stack()):
        if not any(part in frame.filename for part in _MACHINERY):
            path = frame.filename.split("site-packages/")[-1]
            frames.append(f"{os.path.relpath(path) if os.path.isabs(path) else path}:{frame.lineno} {frame.name}")
            if len(frames) == _SITE_FRAMES:
                break
    return tuple(frames)


class CollectiveRecorder(TorchDispatchMode):
    """Context that appends to ``collectives`` what is called in it; set ``phase`` to say where.

    Sees the calling thread, which on CPU runs the backward pass too. ``method_calls`` counts the same collectives at
    ``ProcessGroup``'s methods, in every thread: the two must agree (:meth:`check`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Collective] = []
        self.method_calls: Counter[str] = Counter()
        self.phase = ""
        self._originals: dict[str, object] = {}

    def __enter__(self):
        for name in _METHODS:
            if hasattr(dist.ProcessGroup, name):
                # From __dict__: getattr would give the bare function, which does not bind once it is put back.
                self._originals[name] = dist.ProcessGroup.__dict__[name]
                setattr(dist.ProcessGroup, name, self._counted(name))
        return super().__enter__()

    def __exit__(self, *exception):
        for name, original in self._originals.items():
            setattr(dist.ProcessGroup, name, original)
        self._originals.clear()
        return super().__exit__(*exception)

    def _counted(self, name: str):
        original = self._originals[name].__get__(None, dist.ProcessGroup)

        def method(group, *args, **kwargs):
            self.method_calls[name] += 1
            return original(group, *args, **kwargs)

        return method

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            self._record(func, args, kwargs or {})
        return out

    def _record(self, func, args, kwargs) -> None:
        names = [argument.name for argument in func._schema.arguments]
        values = dict(zip(names, args, strict=False)) | kwargs
        groups = [value for name, value in values.items() if name == "process_group"]
        ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(groups[0])))
        inputs, outputs, in_place = [], [], False
        for name, value in values.items():
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            if name.startswith("input"):
                inputs += tensors
            elif name.startswith("output"):
                outputs += tensors
            elif name.startswith("tensor") and func._opname != "barrier":
                inputs, outputs, in_place = inputs + tensors, outputs + tensors, True
        splits = None
        if values.get("input_split_sizes"):
            splits = tuple(values["output_split_sizes"]), tuple(values["input_split_sizes"])
        self.collectives.append(
            Collective(
                kind=_KINDS.get(func._opname, func._opname.strip("_")),
                phase=self.phase,
                ranks=ranks,
                index=ranks.index(dist.get_rank()),
                shapes_in=tuple(tuple(tensor.shape) for tensor in inputs),
                shapes_out=tuple(tuple(tensor.shape) for tensor in outputs),
                dtype=str(inputs[0].dtype).removeprefix("torch.") if inputs else "",
                bytes_in=_bytes(inputs),
                bytes_out=_bytes(outputs),
                in_place=in_place,
                root=values.get("root_rank"),
                splits=splits,
                site=_call_site(),
            )
        )

    def check(self) -> None:
        """Raises ``AssertionError`` if one of the two counts has missed something."""
        called = sum(self.method_calls.values())
        assert called == len(self.collectives), (
            f"{len(self.collectives)} collectives reached the dispatcher in this thread, {called} were called: {self.method_calls}"
        )


def summarize(collectives: Iterable[Collective], key) -> dict[str, dict[str, int]]:
    """``{key(collective): {count, bytes, sent}}`` with a ``total`` at the end."""
    result: dict[str, dict[str, int]] = {}
    total = {"count": 0, "bytes": 0, "sent": 0}
    for collective in collectives:
        for entry in (result.setdefault(key(collective), {"count": 0, "bytes": 0, "sent": 0}), total):
            entry["count"] += 1
            entry["bytes"] += collective.bytes
            entry["sent"] += collective.sent
    return dict(sorted(result.items())) | {"total": total}


class Replay:
    """The bare collectives of one rank's recording, on buffers allocated once. Build it on every rank, in step.

    ``all_ranks`` are the recordings of every rank, so that all of them create the same groups in the same order.
    """

    def __init__(self, all_ranks: list[list[Collective]], rank: int) -> None:
        ranks = sorted({collective.ranks for recording in all_ranks for collective in recording})
        groups = {members: dist.new_group(list(members)) for members in ranks}
        self.calls: dict[str, list] = {}
        for collective in all_ranks[rank]:
            self.calls.setdefault(collective.phase, []).append(self._prepare(collective, groups[collective.ranks]))

    def __call__(self, phase: str) -> None:
        for call in self.calls.get(phase, []):
            call()

    @staticmethod
    def _prepare(collective: Collective, group):
        dtype = getattr(torch, collective.dtype)
        inputs = [torch.zeros(shape, dtype=dtype) for shape in collective.shapes_in]
        outputs = [torch.zeros(shape, dtype=dtype) for shape in collective.shapes_out]
        kind = collective.kind
        if kind == "all_reduce":
            return lambda: [dist.all_reduce(tensor, group=group) for tensor in inputs]
        if kind == "broadcast":
            source = collective.ranks[collective.root]
            return lambda: [dist.broadcast(tensor, source, group=group) for tensor in inputs]
        if kind == "reduce":
            target = collective.ranks[collective.root]
            return lambda: [dist.reduce(tensor, target, group=group) for tensor in inputs]
        if kind == "all_gather" and len(outputs) > 1:
            return lambda: dist.all_gather(outputs, inputs[0], group=group)
        if kind == "all_gather":
            return lambda: dist.all_gather_into_tensor(outputs[0], inputs[0], group=group)
        if kind == "all_to_all":
            received, sent = (list(side) for side in collective.splits) if collective.splits else (None, None)
            return lambda: dist.all_to_all_single(outputs[0], inputs[0], received, sent, group=group)
        if kind == "reduce_scatter" and len(inputs) == 1:
            return lambda: dist.reduce_scatter_tensor(outputs[0], inputs[0], group=group)
        raise NotImplementedError(f"cannot replay {kind} with {len(inputs)} inputs and {len(outputs)} outputs")
