"""Topology as pure arithmetic: sizes -> rank tables. No processes, no torch.distributed, no DeepSpeed.

Words (DESIGN section 2): a *stage* is the ranks of one pipeline stage. The dense view of a stage is
``dp x tp`` with tp fastest; the expert view of the *same* ranks is ``edp x ep x etp`` with etp fastest.

The names, fields and signatures of DeepSpeed 0.19.8's ``module_inject/auto_ep_folding.py`` are kept, so that
code written against it runs here; what is new is expert tensor parallelism (ETP) and ``ep = 1`` with ``tp > 1``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from deepspeed_autoep.errors import TopologyError

RankGroups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ParallelFoldingSpec:
    """Sizes of one topology. Built by :func:`build_folding_spec`, which checks them."""

    world_size: int
    pp_size: int
    stage_size: int
    tp_size: int
    dp_size: int
    ep_size: int
    etp_size: int
    edp_size: int
    mp_mode: str = "tp"


@dataclass(frozen=True)
class FoldingGroupTables:
    """Rank tables of every group kind, stage after stage.

    ``expert_shared_groups`` are the ranks over which a parameter replicated over ETP (an expert's
    down-projection bias) is reduced: EDP x ETP at one EP index.
    """

    tp_groups: RankGroups
    dense_dp_groups: RankGroups
    ep_groups: RankGroups
    edp_groups: RankGroups
    etp_groups: RankGroups = ()
    expert_shared_groups: RankGroups = ()


def _divisors(value: int) -> list[int]:
    return [candidate for candidate in range(1, value + 1) if value % candidate == 0]


def _require_positive(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise TopologyError(f"{name} must be a positive integer, got {value!r}")


def build_folding_spec(
    *,
    world_size: int,
    pp_size: int,
    tp_size: int,
    ep_size: int,
    etp_size: int = 1,
    mp_mode: str = "tp",
) -> ParallelFoldingSpec:
    """Check the sizes and derive dp and edp: ``world / pp = dp * tp = edp * ep * etp``.

    Raises :class:`TopologyError` (a ``ValueError``) with the key, the numbers and the legal values.
    """
    for name, value in (
        ("world_size", world_size),
        ("pp_size", pp_size),
        ("tensor_parallel.autotp_size", tp_size),
        ("expert_parallel.autoep_size", ep_size),
        ("expert_parallel.expert_tensor_parallel_size", etp_size),
    ):
        _require_positive(name, value)

    if world_size % pp_size != 0:
        raise TopologyError(
            f"pp_size={pp_size} must divide world_size={world_size}. Valid pp_size values: {_divisors(world_size)}"
        )
    stage_size = world_size // pp_size
    stage_words = f"(world_size={world_size} / pp_size={pp_size} = {stage_size})"

    if stage_size % tp_size != 0:
        raise TopologyError(
            f"tensor_parallel.autotp_size={tp_size} must divide the stage size {stage_words}: "
            f"tp * dp != world. Computed dp would be non-integral. "
            f"Valid autotp_size values: {_divisors(stage_size)}"
        )
    expert_width = ep_size * etp_size
    if stage_size % expert_width != 0:
        raise TopologyError(
            f"expert_parallel.autoep_size * expert_parallel.expert_tensor_parallel_size "
            f"({ep_size} * {etp_size} = {expert_width}) must divide the stage size {stage_words}. "
            f"Computed edp would be non-integral. Valid expert-width values: {_divisors(stage_size)}"
        )
    return ParallelFoldingSpec(
        world_size=world_size,
        pp_size=pp_size,
        stage_size=stage_size,
        tp_size=tp_size,
        dp_size=stage_size // tp_size,
        ep_size=ep_size,
        etp_size=etp_size,
        edp_size=stage_size // expert_width,
        mp_mode=mp_mode,
    )


def expected_folding_group_tables(spec: ParallelFoldingSpec) -> FoldingGroupTables:
    """Every group of every kind, in the order in which all ranks must create them.

    The position of rank ``r`` in its stage is ``s = r % stage``; ``s = dp_i * tp + tp_i`` in the dense view and
    ``s = (edp_i * ep + ep_i) * etp + etp_i`` in the expert view.
    """
    tp, ep, etp, width = spec.tp_size, spec.ep_size, spec.etp_size, spec.ep_size * spec.etp_size
    tables: dict[str, list[tuple[int, ...]]] = {field.name: [] for field in fields(FoldingGroupTables)}

    for start in range(0, spec.world_size, spec.stage_size):
        stop = start + spec.stage_size
        tables["tp_groups"] += [tuple(range(first, first + tp)) for first in range(start, stop, tp)]
        tables["dense_dp_groups"] += [tuple(range(start + lane, stop, tp)) for lane in range(tp)]
        tables["ep_groups"] += [
            tuple(range(block + etp_i, block + width, etp)) for block in range(start, stop, width) for etp_i in range(etp)
        ]
        tables["edp_groups"] += [tuple(range(start + shard, stop, width)) for shard in range(width)]
        tables["etp_groups"] += [tuple(range(first, first + etp)) for first in range(start, stop, etp)]
        tables["expert_shared_groups"] += [
            tuple(rank for block in range(start, stop, width) for rank in range(block + ep_i * etp, block + (ep_i + 1) * etp))
            for ep_i in range(ep)
        ]
    return FoldingGroupTables(**{name: tuple(groups) for name, groups in tables.items()})


def folding_ranks_of(global_rank: int, spec: ParallelFoldingSpec) -> dict[str, tuple[int, ...]]:
    """The groups that hold one rank: keys tp, dense_dp, ep, edp, etp, expert_shared. Costs O(world), not O(tables)."""
    if not 0 <= global_rank < spec.world_size:
        raise TopologyError(f"rank {global_rank} is outside the world of {spec.world_size}: legal are 0..{spec.world_size - 1}")
    tp, ep, etp, width = spec.tp_size, spec.ep_size, spec.etp_size, spec.ep_size * spec.etp_size
    start = global_rank - global_rank % spec.stage_size
    stop, position = start + spec.stage_size, global_rank - start
    tp_first = start + position - position % tp
    block = start + position - position % width
    etp_i, ep_i = position % etp, position // etp % ep
    return {
        "tp": tuple(range(tp_first, tp_first + tp)),
        "dense_dp": tuple(range(start + position % tp, stop, tp)),
        "ep": tuple(range(block + etp_i, block + width, etp)),
        "edp": tuple(range(start + position % width, stop, width)),
        "etp": tuple(range(global_rank - etp_i, global_rank - etp_i + etp)),
        "expert_shared": tuple(
            rank
            for first in range(start, stop, width)
            for rank in range(first + ep_i * etp, first + (ep_i + 1) * etp)
        ),
    }


def local_folding_ranks(global_rank: int, spec: ParallelFoldingSpec) -> dict[str, tuple[int, ...]]:
    """As DeepSpeed's: keys tp, dense_dp, ep, edp; with ``etp > 1`` also etp and expert_shared."""
    ranks = folding_ranks_of(global_rank, spec)
    if spec.etp_size > 1:
        return ranks
    return {name: ranks[name] for name in ("tp", "dense_dp", "ep", "edp")}


def first_difference(mine: ParallelFoldingSpec, other: ParallelFoldingSpec) -> str | None:
    """Name of the first field in which two specs differ, or None."""
    return next((f.name for f in fields(ParallelFoldingSpec) if getattr(mine, f.name) != getattr(other, f.name)), None)


def _mpu_world_size(mpu, *names: str) -> int | None:
    getters = (getattr(mpu, name, None) for name in names) if mpu is not None else ()
    getter = next((candidate for candidate in getters if candidate is not None), None)
    return getter() if getter is not None else None


def validate_folding_global(
    spec: ParallelFoldingSpec,
    *,
    zero_stage: int = 0,
    sp_size: int = 1,
    deepcompile_enabled: bool = False,
    use_data_before_expert_parallel: bool = False,
    mpu=None,
    autoep_enabled: bool = True,
    tp_preset: str | None = None,
    ep_preset: str | None = None,
    zero_offload_optimizer: bool = False,
    zero_offload_param: bool = False,
) -> None:
    """Refuse settings that cannot be folded, before any process group exists. One rank's view, no collective:
    agreement between ranks is :func:`deepspeed_autoep.folding.validate_folding_agreement`.

    Differs from DeepSpeed 0.19.8 in two places only: ``ep = 1`` with ``tp > 1`` and ``etp > 1`` are legal topologies.
    Raises :class:`TopologyError`.
    """
    if not autoep_enabled:
        return
    folded = spec.tp_size > 1

    if deepcompile_enabled and folded:
        raise TopologyError(
            f"compile.deepcompile=true is not supported with tensor_parallel.autotp_size={spec.tp_size}; "
            "set compile.deepcompile to false, or tensor_parallel.autotp_size to 1"
        )
    if folded and spec.pp_size > 1:
        raise TopologyError(f"pp_size={spec.pp_size} is not supported with tensor_parallel.autotp_size={spec.tp_size}: legal is 1")
    if folded and sp_size > 1:
        raise TopologyError(
            f"tensor_parallel.autotp_size={spec.tp_size} and sequence parallelism (sp_size={sp_size}) exclude each other: "
            "set one of the two to 1"
        )
    if tp_preset is not None and ep_preset is not None and tp_preset != ep_preset:
        raise TopologyError(
            f"tensor_parallel.preset_model={tp_preset!r} and expert_parallel.preset_model={ep_preset!r} must match "
            "when both are set"
        )
    if folded and use_data_before_expert_parallel:
        raise TopologyError(
            "use_data_before_expert_parallel_=true is not supported with "
            f"tensor_parallel.autotp_size={spec.tp_size}: set it to false"
        )
    if folded and (zero_offload_optimizer or zero_offload_param):
        raise TopologyError(
            "zero_optimization.offload_optimizer / offload_param are not supported with "
            f"tensor_parallel.autotp_size={spec.tp_size}: remove them"
        )
    mpu_tp = _mpu_world_size(mpu, "get_tensor_model_parallel_world_size", "get_model_parallel_world_size")
    if mpu_tp not in (None, 1, spec.tp_size):
        raise TopologyError(
            f"the mpu's tensor parallel world size ({mpu_tp}) conflicts with tensor_parallel.autotp_size={spec.tp_size}"
        )
    mpu_pp = _mpu_world_size(mpu, "get_pipeline_model_parallel_world_size", "get_pipeline_parallel_world_size")
    if mpu_pp not in (None, spec.pp_size):
        raise TopologyError(f"the mpu's pipeline parallel world size ({mpu_pp}) conflicts with pp_size={spec.pp_size}")


def _normalize_rank_groups(groups: Iterable[Iterable[int]]) -> set[tuple[int, ...]]:
    return {tuple(int(rank) for rank in group) for group in groups}


class GroupMismatchError(TopologyError, RuntimeError):
    """A cached process group does not have the ranks that the spec asks for (a ``RuntimeError`` as in DeepSpeed)."""


def assert_group_matches_spec(existing_rank_lists, spec: ParallelFoldingSpec, *, group_kind: str = "ep_edp") -> None:
    """Check cached rank lists, ``{"ep": [...], "edp": [...]}`` or ``(ep, edp)``, against the spec's tables.

    ``group_kind`` is a word for the message only. Raises :class:`GroupMismatchError`.
    """
    tables = expected_folding_group_tables(spec)
    if isinstance(existing_rank_lists, dict):
        observed = {name: existing_rank_lists.get(name, []) for name in ("ep", "edp")}
    else:
        observed = dict(zip(("ep", "edp"), existing_rank_lists, strict=True))
    words = {"ep": "expert-parallel", "edp": "expert-data-parallel"}
    for name, groups in observed.items():
        expected = _normalize_rank_groups(getattr(tables, f"{name}_groups"))
        for group in sorted(_normalize_rank_groups(groups)):
            if group not in expected:
                raise GroupMismatchError(
                    f"Cached {words[name]} group {group} ({group_kind}) does not match folding spec {spec}."
                )
