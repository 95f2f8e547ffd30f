"""An engine's model and optimizer as the logical tensors of a checkpoint."""

from __future__ import annotations

import torch
import torch.distributed as dist

from deepspeed_autoep.checkpoint.slices import Cut
from deepspeed_autoep.checkpoint.tensors import WEIGHT, Held, LogicalTensor
from deepspeed_autoep.engine.construction import FoldedConstruction
from deepspeed_autoep.engine.master_state import MasterState
from deepspeed_autoep.engine.placements import Placement, placements
from deepspeed_autoep.quantization import describe_buffers


def logical_tensors(engine: FoldedConstruction, masters: MasterState) -> list[LogicalTensor]:
    """Every parameter and persistent buffer, in the order of the model's state dict; a tensor of several names under its first."""
    state = {name: value for name, value in engine.module.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        names.setdefault(id(value), []).append(name)
    places = placements(engine.module, engine.autoep.sites, engine.autoep.plan, engine.autoep.handles)
    found = []
    for first, *others in names.values():
        value = state[first]
        place = places.get(value) or Placement(Cut.along(value.shape), "stage")
        found.append(_logical_tensor(engine, masters, value, place, place.name or first, tuple(others)))
    return found


def foreign_tensors(engine: FoldedConstruction) -> list[LogicalTensor]:
    """What other ranks hold under names that this rank has not: quantizers' values of single experts. Collective over the stage
    for a model that has such; nothing of them is held here."""
    modules = [module for module in engine.module.modules() if getattr(module, "autoep_quantizers", ())]
    if not modules:
        return []
    own = {part.name: (part.shape, part.value.dtype) for module in modules for part in describe_buffers(module)}
    everyone: list = [None] * len(engine.autoep.handles.stage_ranks)
    dist.all_gather_object(everyone, own, group=engine.autoep.handles.stage_group)
    others = {name: found for rank in everyone for name, found in rank.items() if name not in own}
    return [
        LogicalTensor(name, Cut.along(shape), {WEIGHT: dtype}, model_dtype=dtype, is_buffer=True, trained=False)
        for name, (shape, dtype) in others.items()
    ]


def _logical_tensor(
    engine: FoldedConstruction, masters: MasterState, value: torch.Tensor, place: Placement, name: str, aliases: tuple[str, ...]
) -> LogicalTensor:
    handles = engine.autoep.handles
    replica, replicas = place.replica(handles, engine.global_rank)
    part = value.detach()
    if place.name is not None:
        part = part.view(place.cut.local_shape)  # a quantizer's buffer, by the dimensions of what it quantizes
    dtypes, held = {WEIGHT: value.dtype}, {WEIGHT: Held(part, 0, value.numel())}
    if value in masters.owners:
        dtypes = {WEIGHT: masters.owners[value].dtype, **masters.state_dtypes(value)}
        fragment = masters.fragments.get(value)
        held = {}
        if fragment is not None:
            owner_state = masters.base.state.get(fragment.owner, {})
            held = {state: fragment.held(fragment.owner if state == WEIGHT else owner_state[state]) for state in dtypes}
        if masters.is_partitioned:
            # ZeRO has shared the elements out over the data; lanes that hold them alike are left.
            meets_peers = engine.autoep_families[value].family.meets_tp_peers
            replica, replicas = (handles.tp_rank, handles.spec.tp_size) if meets_peers else (0, 1)
    return LogicalTensor(
        name,
        place.cut,
        dtypes,
        held,
        replica,
        replicas,
        model_dtype=value.dtype,
        is_buffer=not isinstance(value, torch.nn.Parameter),
        trained=isinstance(value, torch.nn.Parameter) and value.requires_grad,
        aliases=aliases,
    )
