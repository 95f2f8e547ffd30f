"""The tensors of a running engine for an export, which rank 0 writes and all ranks gather, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from deepspeed_autoep.checkpoint.consolidate import gather_expert, gatherers
from deepspeed_autoep.checkpoint.slices import Cut
from deepspeed_autoep.engine.construction import FoldedConstruction
from deepspeed_autoep.engine.placements import placements
from deepspeed_autoep.errors import AutoEPError, CheckpointError
from deepspeed_autoep.moe.layer import AutoEPMoELayer

_Result = TypeVar("_Result")
_STOP = "stop"


class EngineTensors:
    """Source of :func:`deepspeed_autoep.weights.export.export_folder` on rank 0, which the other ranks serve: see :meth:`run`."""

    def __init__(self, engine: FoldedConstruction, group: dist.ProcessGroup) -> None:
        self._engine, self._group = engine, group
        state = engine.module.state_dict(keep_vars=True)
        self._tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        self._gather = gatherers(engine)
        places = placements(engine.module, engine.autoep.sites, engine.autoep.plan, engine.autoep.handles)
        self._shapes = {name: places[value].cut.shape if value in places else Cut.along(value.shape).shape for name, value in self._tensors.items()}
        self._experts = {
            getattr(module, tensor.name): tensor
            for module in engine.module.modules()
            if isinstance(module, AutoEPMoELayer)
            for tensor in module.autoep.layout.tensors
        }

    def names(self) -> list[str]:
        return list(self._tensors)

    def describe(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        return self._shapes[name], self._tensors[name].dtype

    def read(self, name: str, expert: int | None = None) -> torch.Tensor:
        """On rank 0, inside of :meth:`run`."""
        dist.broadcast_object_list([(name, expert)], group_src=0, group=self._group)
        return self._read(name, expert).cpu()

    @torch.no_grad()
    def _read(self, name: str, expert: int | None) -> torch.Tensor:
        value = self._tensors[name]
        if expert is not None and value in self._experts:
            return gather_expert(value.detach(), self._experts[value], self._engine.autoep.handles, expert)
        whole = self._gather[value]() if value in self._gather else value.detach().clone()
        return whole if expert is None else whole[expert : expert + 1].clone()

    def run(self, write: Callable[[], _Result]) -> _Result | None:
        """``write()`` on rank 0, whose reads all ranks serve; its result there, None elsewhere. Its failure is every rank's."""
        if dist.get_rank(self._group) == 0:
            result, failure = None, None
            try:
                result = write()
            except Exception as error:
                failure = error
            if failure is not None and not isinstance(failure, AutoEPError):
                failure = CheckpointError(f"the export failed on rank 0: {type(failure).__name__}: {failure}")
            dist.broadcast_object_list([(_STOP, None if failure is None else (type(failure), str(failure)))], group_src=0, group=self._group)
            if failure is not None:
                raise failure
            return result
        while True:
            request: list = [None]
            dist.broadcast_object_list(request, group_src=0, group=self._group)
            name, detail = request[0]
            if name == _STOP:
                if detail is not None:
                    kind, message = detail
                    raise kind(message)
                return None
            self._read(name, detail)
