"""Process groups of a topology: the only place that creates them.

Every rank creates every group in the order of the tables, so creation is collective over the world. Groups are kept by
their ranks and the identity of the default process group, never by a size alone: the topologies that one process trains
under share the groups that they have in common, each of which has a communicator or threads of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from deepspeed_autoep.errors import RankMismatchError, TopologyError
from deepspeed_autoep.folding.spec import (
    FoldingGroupTables,
    ParallelFoldingSpec,
    RankGroups,
    expected_folding_group_tables,
    first_difference,
    folding_ranks_of,
)

# torch 2.13 renamed it and warns about the old name.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class FoldingGroupHandles:
    """This rank's process groups and their global ranks (ten fields as DeepSpeed's, then ours)."""

    spec: ParallelFoldingSpec
    tp_group: object
    dense_dp_group: object
    ep_group: object
    edp_group: object
    ep_group_name: str
    tp_ranks: tuple[int, ...]
    dense_dp_ranks: tuple[int, ...]
    ep_ranks: tuple[int, ...]
    edp_ranks: tuple[int, ...]
    etp_group: object = None
    expert_shared_group: object = None
    stage_group: object = None
    etp_ranks: tuple[int, ...] = ()
    expert_shared_ranks: tuple[int, ...] = ()
    stage_ranks: tuple[int, ...] = ()

    @property
    def tp_rank(self) -> int:
        """This rank's lane in its TP group."""
        return dist.get_group_rank(self.tp_group, dist.get_rank())

    @property
    def ep_rank(self) -> int:
        """This rank's position in its EP group: which block of experts it owns."""
        return dist.get_group_rank(self.ep_group, dist.get_rank())

    @property
    def etp_rank(self) -> int:
        """This rank's position in its ETP group: which part of its experts it owns."""
        return dist.get_group_rank(self.etp_group, dist.get_rank())

    @property
    def expert_shared_name(self) -> str:
        """As ``ep_group_name``, for what every ETP peer holds whole: reduced over EDP x ETP."""
        return f"{self.ep_group_name}_shared_over_etp"

    def expert_group_names(self) -> dict[str, str]:
        """Kind of data group -> the name under which DeepSpeed knows it."""
        return {"edp": self.ep_group_name, "expert_shared": self.expert_shared_name}

    def data_group(self, kind: str):
        """The process group of a family rule's ``data_group``: what a gradient is summed over after the TP rule."""
        return {"dense_dp": self.dense_dp_group, "edp": self.edp_group, "expert_shared": self.expert_shared_group}[kind]


# The default group itself is in the keys: holding it keeps its identity from being reused after a re-init.
_HANDLES: dict[tuple[ParallelFoldingSpec, object], FoldingGroupHandles] = {}
_GROUPS: dict[tuple[tuple[int, ...], object], object] = {}  # the same keys on every rank


def _create_own(groups: RankGroups, rank: int):
    """Create every group of one kind that is not there yet; return the one that holds ``rank``."""
    own = None
    for ranks in groups:
        key = (ranks, dist.group.WORLD)
        if key not in _GROUPS:
            _GROUPS[key] = dist.new_group(list(ranks))
        if rank in ranks:
            own = _GROUPS[key]
    return own


def create_folding_groups(spec: ParallelFoldingSpec) -> FoldingGroupHandles:
    """Create (or take from the cache) the process groups of ``spec``. Collective over the world.

    Raises :class:`TopologyError` when the spec's world is not the running one.
    """
    if dist.get_world_size() != spec.world_size:
        raise TopologyError(f"the spec is for {spec.world_size} ranks, the running world has {dist.get_world_size()}")
    key = (spec, dist.group.WORLD)
    for kept in (_HANDLES, _GROUPS):
        for of_another_world in [each for each in kept if each[1] is not dist.group.WORLD]:
            del kept[of_another_world]
    if key not in _HANDLES:
        _HANDLES[key] = _new_handles(spec, expected_folding_group_tables(spec), dist.get_rank())
    return _HANDLES[key]


def _new_handles(spec: ParallelFoldingSpec, tables: FoldingGroupTables, rank: int) -> FoldingGroupHandles:
    ranks = folding_ranks_of(rank, spec)
    stages = tuple(
        tuple(range(start, start + spec.stage_size)) for start in range(0, spec.world_size, spec.stage_size)
    )
    stage_ranks = next(stage for stage in stages if rank in stage)
    kinds = {"stage": stages} | {
        name: getattr(tables, f"{name}_groups") for name in ("tp", "dense_dp", "ep", "edp", "etp", "expert_shared")
    }
    groups = {name: _create_own(rank_groups, rank) for name, rank_groups in kinds.items()}
    return FoldingGroupHandles(
        spec=spec,
        ep_group_name=f"ep_size_{spec.ep_size}",
        stage_ranks=stage_ranks,
        **{f"{name}_group": group for name, group in groups.items()},
        **{f"{name}_ranks": group_ranks for name, group_ranks in ranks.items()},
    )


def collectively(check, group=None):
    """Run ``check()`` on every rank of ``group``; if it raised anywhere, raise everywhere.

    The rank's own exception is re-raised as it is; a rank whose check passed raises the first failing rank's message
    as :class:`RankMismatchError` when only some ranks failed, else the same type. So bad input on one rank ends the
    job on all of them instead of leaving the others in a collective.
    """
    result, error = None, None
    try:
        result = check()
    except Exception as caught:
        error = caught
    reports: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(reports, None if error is None else f"{type(error).__name__}: {error}", group=group)
    if error is not None:
        raise error
    failed = [rank for rank, report in enumerate(reports) if report is not None]
    if failed:
        raise RankMismatchError(f"rank {failed[0]} of {len(reports)} refused its input: {reports[failed[0]]}")
    return result


def validate_folding_agreement(spec: ParallelFoldingSpec, settings: dict | None = None, group=None) -> None:
    """All ranks hold the same spec (and settings), or every rank raises the same :class:`RankMismatchError`.

    The message names the first differing field, the two values and the ranks that hold them.
    """
    everyone: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (spec, settings or {}), group=group)
    base_spec, base_settings = everyone[0]
    for rank, (other_spec, other_settings) in enumerate(everyone):
        field = first_difference(base_spec, other_spec)
        if field is not None:
            raise RankMismatchError(
                f"ranks disagree on the topology: {field} is {getattr(base_spec, field)!r} on rank 0 "
                f"and {getattr(other_spec, field)!r} on rank {rank}; give every rank the same configuration"
            )
        for key in sorted(base_settings.keys() | other_settings.keys()):
            mine, theirs = base_settings.get(key), other_settings.get(key)
            if repr(mine) != repr(theirs):  # 1 is not true
                raise RankMismatchError(
                    f"ranks have different configurations: {key} is {mine!r} on rank 0 and {theirs!r} on rank {rank}; "
                    "give every rank the same configuration"
                )
