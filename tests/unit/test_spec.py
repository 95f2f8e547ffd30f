"""Topology tables against numpy grids: the dense view is a reshape to (dp, tp), the expert view to (edp, ep, etp)."""

from __future__ import annotations

import dataclasses
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_autoep.errors import TopologyError
from deepspeed_autoep.folding.spec import (
    FoldingGroupTables,
    ParallelFoldingSpec,
    assert_group_matches_spec,
    build_folding_spec,
    expected_folding_group_tables,
    first_difference,
    folding_ranks_of,
    local_folding_ranks,
    validate_folding_global,
)

PROPERTY = settings(max_examples=80, deadline=None, derandomize=True)
SIZE_KEYS = {
    "world_size": "world_size",
    "pp_size": "pp_size",
    "tp_size": "tensor_parallel.autotp_size",
    "ep_size": "expert_parallel.autoep_size",
    "etp_size": "expert_parallel.expert_tensor_parallel_size",
}
# (world, pp, tp, ep, etp)
TOPOLOGIES = [
    (1, 1, 1, 1, 1),
    (4, 1, 2, 2, 1),
    (4, 1, 2, 4, 1),  # ep > world / tp
    (4, 1, 4, 2, 1),
    (4, 1, 4, 1, 1),  # ep = 1 with tp > 1
    (4, 1, 2, 1, 4),
    (6, 1, 2, 2, 3),  # ETP groups straddle TP groups
    (6, 1, 2, 1, 3),
    (6, 1, 3, 2, 1),
    (6, 1, 3, 3, 2),
    (8, 1, 1, 8, 1),
    (8, 1, 2, 2, 2),
    (8, 1, 8, 8, 1),
    (8, 2, 2, 2, 2),
    (12, 2, 2, 1, 3),
    (12, 2, 2, 3, 1),
    (12, 3, 4, 2, 1),
    (60, 1, 4, 5, 3),
]
LARGE_WORLD = 65_536
LARGE_TOPOLOGIES = [
    (1, 1, 1, 1),
    (1, 8, 64, 1),
    (1, 8, 64, 4),
    (1, 8, 1, 8),
    (1, 1, 65_536, 1),
    (1, 65_536, 1, 1),
    (16, 8, 128, 2),
]


def spec_of(world: int, pp: int, tp: int, ep: int, etp: int = 1) -> ParallelFoldingSpec:
    return build_folding_spec(world_size=world, pp_size=pp, tp_size=tp, ep_size=ep, etp_size=etp)


def grid_tables(world: int, pp: int, tp: int, ep: int, etp: int) -> dict[str, list[list[int]]]:
    """Every table as rows of a transposed grid, stage after stage."""
    tables: dict[str, list[list[int]]] = {field.name: [] for field in dataclasses.fields(FoldingGroupTables)}
    for stage in np.arange(world).reshape(pp, -1):
        dense = stage.reshape(-1, tp)
        expert = stage.reshape(-1, ep, etp)
        edp = expert.shape[0]
        tables["tp_groups"] += dense.tolist()
        tables["dense_dp_groups"] += dense.T.tolist()
        tables["ep_groups"] += expert.transpose(0, 2, 1).reshape(-1, ep).tolist()
        tables["edp_groups"] += expert.transpose(1, 2, 0).reshape(-1, edp).tolist()
        tables["etp_groups"] += expert.reshape(-1, etp).tolist()
        tables["expert_shared_groups"] += expert.transpose(1, 0, 2).reshape(ep, -1).tolist()
    return tables


def as_lists(tables: FoldingGroupTables) -> dict[str, list[list[int]]]:
    return {name: [list(group) for group in groups] for name, groups in vars(tables).items()}


def runs_within(seconds: float, function, *arguments) -> bool:
    """The best of three runs, in CPU time: other load on the machine does not count."""

    def measure() -> float:
        start = time.process_time()
        function(*arguments)
        return time.process_time() - start

    return any(measure() < seconds for _ in range(3))


@st.composite
def topologies(draw):
    """Legal (world, pp, tp, ep, etp), from the smallest stage that every size divides."""
    tp, ep, etp = draw(st.integers(1, 8)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    pp, multiple = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return math.lcm(tp, ep * etp) * multiple * pp, pp, tp, ep, etp


def test_tables_of_tp2_etp3_written_out():
    tables = expected_folding_group_tables(spec_of(6, 1, 2, 2, 3))
    assert tables.tp_groups == ((0, 1), (2, 3), (4, 5))
    assert tables.dense_dp_groups == ((0, 2, 4), (1, 3, 5))
    assert tables.ep_groups == ((0, 3), (1, 4), (2, 5))
    assert tables.edp_groups == ((0,), (1,), (2,), (3,), (4,), (5,))
    assert tables.etp_groups == ((0, 1, 2), (3, 4, 5))
    assert tables.expert_shared_groups == ((0, 1, 2), (3, 4, 5))


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_tables_equal_the_grids(topology):
    assert as_lists(expected_folding_group_tables(spec_of(*topology))) == grid_tables(*topology)


@PROPERTY
@given(topologies())
def test_tables_equal_the_grids_for_any_topology(topology):
    tables = as_lists(expected_folding_group_tables(spec_of(*topology)))
    assert tables == grid_tables(*topology)
    for groups in tables.values():
        assert sorted(rank for group in groups for rank in group) == list(range(topology[0]))


@PROPERTY
@given(topologies())
def test_ranks_of_equal_the_tables(topology):
    spec, grids = spec_of(*topology), grid_tables(*topology)
    for rank in range(spec.world_size):
        expected = {
            name.removesuffix("_groups"): tuple(next(group for group in groups if rank in group))
            for name, groups in grids.items()
        }
        assert folding_ranks_of(rank, spec) == expected
        four = {name: expected[name] for name in ("tp", "dense_dp", "ep", "edp")}
        assert local_folding_ranks(rank, spec) == (expected if spec.etp_size > 1 else four)


@pytest.mark.parametrize("function", [folding_ranks_of, local_folding_ranks])
@pytest.mark.parametrize("rank", [-1, 4])
def test_rank_outside_the_world(function, rank):
    with pytest.raises(TopologyError, match=rf"rank {rank} .*world of 4.*0\.\.3"):
        function(rank, spec_of(4, 1, 2, 2))


@pytest.mark.parametrize("pp, tp, ep, etp", LARGE_TOPOLOGIES)
def test_world_of_65536(pp, tp, ep, etp):
    spec, grids = spec_of(LARGE_WORLD, pp, tp, ep, etp), grid_tables(LARGE_WORLD, pp, tp, ep, etp)
    assert as_lists(expected_folding_group_tables(spec)) == grids
    assert runs_within(1.0, expected_folding_group_tables, spec)
    for rank in (0, 12_345, LARGE_WORLD - 1):
        own = folding_ranks_of(rank, spec)
        for name, ranks in own.items():
            assert rank in ranks and list(ranks) in grids[f"{name}_groups"]
        assert runs_within(0.1, folding_ranks_of, rank, spec)


@PROPERTY
@given(topologies())
def test_sizes_tile_the_world_in_both_views(topology):
    world, pp, tp, ep, etp = topology
    spec = spec_of(*topology)
    assert spec.stage_size * pp == world
    assert spec.dp_size * tp == spec.stage_size == spec.edp_size * ep * etp
    assert (spec.world_size, spec.pp_size, spec.tp_size, spec.ep_size, spec.etp_size, spec.mp_mode) == (*topology, "tp")


@settings(PROPERTY, max_examples=300)
@given(st.integers(1, 24), st.integers(1, 4), st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))
def test_build_accepts_exactly_the_sizes_that_tile(world, pp, tp, ep, etp):
    legal = world % pp == 0 and (world // pp) % tp == 0 and (world // pp) % (ep * etp) == 0
    if legal:
        spec_of(world, pp, tp, ep, etp)
    else:
        with pytest.raises(TopologyError):
            spec_of(world, pp, tp, ep, etp)


@pytest.mark.parametrize(
    "sizes, words",
    [
        ((8, 3, 1, 1, 1), ["pp_size=3", "world_size=8", "[1, 2, 4, 8]"]),
        ((8, 1, 3, 1, 1), ["tensor_parallel.autotp_size=3", "tp * dp != world", "world_size=8", "[1, 2, 4, 8]"]),
        ((8, 2, 8, 1, 1), ["tensor_parallel.autotp_size=8", "world_size=8 / pp_size=2 = 4", "[1, 2, 4]"]),
        ((4, 1, 1, 3, 1), ["expert_parallel.autoep_size", "3 * 1 = 3", "world_size=4", "[1, 2, 4]"]),
        ((6, 1, 1, 2, 2), ["expert_parallel.expert_tensor_parallel_size", "2 * 2 = 4", "world_size=6", "[1, 2, 3, 6]"]),
        ((4, 1, 2, 8, 1), ["expert_parallel.autoep_size", "8 * 1 = 8", "world_size=4", "[1, 2, 4]"]),
    ],
)
def test_indivisible_sizes_name_key_numbers_and_legal_values(sizes, words):
    with pytest.raises(TopologyError) as caught:
        spec_of(*sizes)
    assert isinstance(caught.value, ValueError)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("value", [0, -2, True, False, 2.0, "2", None], ids=repr)
@pytest.mark.parametrize("argument, key", SIZE_KEYS.items())
def test_sizes_that_are_not_positive_integers(argument, key, value):
    sizes = dict.fromkeys(SIZE_KEYS, 1) | {argument: value}
    with pytest.raises(TopologyError) as caught:
        build_folding_spec(**sizes)
    assert str(caught.value) == f"{key} must be a positive integer, got {value!r}"


def test_spec_is_an_immutable_key():
    spec = spec_of(8, 1, 2, 4)
    assert {spec: "groups"}[spec_of(8, 1, 2, 4)] == "groups"
    assert spec_of(8, 1, 2, 4, 2) != spec
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.tp_size = 4


MPU_TP4 = SimpleNamespace(get_tensor_model_parallel_world_size=lambda: 4)
MPU_MP4 = SimpleNamespace(get_model_parallel_world_size=lambda: 4)
MPU_PP2 = SimpleNamespace(get_pipeline_model_parallel_world_size=lambda: 2)
FOLDED_REFUSALS = [
    ({"deepcompile_enabled": True}, ["compile.deepcompile=true", "set compile.deepcompile to false"]),
    ({"sp_size": 2}, ["sp_size=2", "set one of the two to 1"]),
    ({"use_data_before_expert_parallel": True}, ["use_data_before_expert_parallel_=true", "set it to false"]),
    ({"zero_offload_optimizer": True}, ["offload_optimizer", "remove"]),
    ({"zero_offload_param": True}, ["offload_param", "remove"]),
]


@pytest.mark.parametrize("settings_, words", FOLDED_REFUSALS, ids=lambda value: next(iter(value)))
def test_what_cannot_be_folded_is_refused_only_when_folded(settings_, words):
    with pytest.raises(TopologyError) as caught:
        validate_folding_global(spec_of(4, 1, 2, 2), **settings_)
    for word in [*words, "autotp_size=2"]:
        assert word in str(caught.value)
    validate_folding_global(spec_of(4, 1, 1, 2), **settings_)
    validate_folding_global(spec_of(4, 1, 2, 2), autoep_enabled=False, **settings_)


def test_pipeline_stages_are_refused_only_when_folded():
    with pytest.raises(TopologyError, match=r"pp_size=2 .*autotp_size=2: legal is 1"):
        validate_folding_global(spec_of(4, 2, 2, 1))
    validate_folding_global(spec_of(4, 2, 1, 2))


@pytest.mark.parametrize(
    "settings_, words",
    [
        ({"tp_preset": "mixtral", "ep_preset": "qwen3_moe"}, ["preset_model='mixtral'", "preset_model='qwen3_moe'"]),
        ({"mpu": MPU_TP4}, ["tensor parallel", "(4)", "tensor_parallel.autotp_size=2"]),
        ({"mpu": MPU_MP4}, ["tensor parallel", "(4)", "tensor_parallel.autotp_size=2"]),
        ({"mpu": MPU_PP2}, ["pipeline", "(2)", "pp_size=1"]),
    ],
)
def test_settings_that_contradict_each_other(settings_, words):
    with pytest.raises(TopologyError) as caught:
        validate_folding_global(spec_of(4, 1, 2, 2), **settings_)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "topology, settings_",
    [
        ((4, 1, 2, 1, 1), {}),
        ((4, 1, 2, 2, 2), {}),
        ((4, 1, 4, 1, 4), {"zero_stage": 2}),
        ((6, 1, 2, 1, 3), {}),
        ((4, 1, 4, 2, 1), {"mpu": MPU_TP4}),
        ((4, 2, 1, 2, 1), {"mpu": MPU_PP2}),
        ((4, 1, 2, 2, 1), {"mpu": SimpleNamespace(get_model_parallel_world_size=lambda: 1)}),
        ((4, 1, 2, 2, 1), {"mpu": SimpleNamespace()}),
        ((4, 1, 2, 2, 1), {"tp_preset": "mixtral", "ep_preset": "mixtral"}),
        ((4, 1, 2, 2, 1), {"tp_preset": "mixtral"}),
    ],
)
def test_legal_settings_pass(topology, settings_):
    validate_folding_global(spec_of(*topology), **settings_)


@pytest.mark.parametrize(
    "cached",
    [
        {"ep": [[0, 1], [2, 3]], "edp": [(0, 2), (1, 3)]},
        {"ep": [(2, 3)]},
        {},
        ([(0, 1)], [(1, 3)]),
        ([], []),
    ],
)
def test_cached_groups_of_the_spec_pass(cached):
    assert_group_matches_spec(cached, spec_of(4, 1, 2, 2))


@pytest.mark.parametrize(
    "cached, words",
    [
        ({"ep": [(0, 1), (1, 2)], "edp": []}, "expert-parallel group (1, 2)"),
        ({"ep": [(0, 2)], "edp": [(0, 2)]}, "expert-parallel group (0, 2)"),  # the groups of ep = 2 with tp-strided EP
        (([(0, 1)], [(0, 1)]), "expert-data-parallel group (0, 1)"),
        ({"edp": [[0, 1, 2, 3]]}, "expert-data-parallel group (0, 1, 2, 3)"),  # the whole world, as for ep = 1
    ],
)
def test_cached_groups_of_another_topology_raise(cached, words):
    spec = spec_of(4, 1, 2, 2)
    with pytest.raises(RuntimeError) as caught:
        assert_group_matches_spec(cached, spec, group_kind="cached_kind")
    assert isinstance(caught.value, TopologyError)
    for word in (words, "cached_kind", str(spec)):
        assert word in str(caught.value)


def test_cached_groups_of_the_same_ep_size_with_etp_raise():
    tables = expected_folding_group_tables(spec_of(8, 1, 2, 2, 2))
    with pytest.raises(RuntimeError, match="expert-parallel group"):
        assert_group_matches_spec((tables.ep_groups, tables.edp_groups), spec_of(8, 1, 2, 2, 1))


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ParallelFoldingSpec)])
def test_first_difference_names_the_field(field):
    spec = spec_of(8, 1, 2, 2)
    other = dataclasses.replace(spec, **{field: "sp" if field == "mp_mode" else 99})
    assert first_difference(spec, other) == field == first_difference(other, spec)
    assert first_difference(spec, dataclasses.replace(other, mp_mode="sp")) == field
    assert first_difference(spec, spec_of(8, 1, 2, 2)) is None
