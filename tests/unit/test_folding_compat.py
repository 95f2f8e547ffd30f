"""``deepspeed_autoep.folding`` against DeepSpeed's ``module_inject.auto_ep_folding``, name by name and value by value.

Functions that reduce over a group are compared on gradients in the tests that run processes.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools

import pytest
import torch
from deepspeed.module_inject import auto_ep_folding as stock

from deepspeed_autoep import folding as ours

PUBLIC = {
    name: value
    for name, value in vars(stock).items()
    if not name.startswith("_") and (name.startswith("AUTOEP_") or getattr(value, "__module__", None) == stock.__name__)
}
CONSTANTS = sorted(name for name, value in PUBLIC.items() if isinstance(value, str))
FUNCTIONS = sorted(name for name, value in PUBLIC.items() if inspect.isfunction(value))
CLASSES = sorted(name for name, value in PUBLIC.items() if inspect.isclass(value))
MARKS = {
    "none": None,
    "router": "mark_autoep_folding_router_parameter",
    "partial_router": "mark_autoep_folding_partial_router_parameter",
    "sp_layernorm": "mark_autoep_folding_sp_sharded_layernorm_parameter",
}
FLAGS = [
    dict(pairs)
    for size in range(4)
    for pairs in itertools.combinations(
        [("allreduce", False), ("tensor_model_parallel", True), ("model_parallel", True)], size
    )
] + [{"allreduce": True}, {"tensor_model_parallel": False}]


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def topologies(world: int):
    """Every legal (pp, tp, ep) of a world."""
    for pp in divisors(world):
        yield from itertools.product([pp], divisors(world // pp), divisors(world // pp))


def both_specs(**sizes):
    return stock.build_folding_spec(**sizes), ours.build_folding_spec(**sizes)


def make_parameter(flags: dict, mark: str | None = None, marker=ours) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(2))
    for name, value in flags.items():
        setattr(parameter, name, value)
    if mark is not None:
        getattr(marker, mark)(parameter)
    return parameter


def outcome(function, *arguments, kind: type[Exception] = ValueError, **options):
    """The result, or ``kind`` when it raised that."""
    try:
        return function(*arguments, **options)
    except kind:
        return kind


def test_the_stock_module_has_what_is_compared_here():
    """Guards the tests below against an empty comparison."""
    assert len(CONSTANTS) >= 9 and len(CLASSES) >= 3 and len(FUNCTIONS) >= 13
    assert set(PUBLIC) == {*CONSTANTS, *CLASSES, *FUNCTIONS}


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_name_is_importable(name):
    assert hasattr(ours, name) and name in ours.__all__


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_are_equal(name):
    assert getattr(ours, name) == PUBLIC[name]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_are_equal(name):
    def shape(function) -> list[tuple]:
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    assert shape(getattr(ours, name)) == shape(PUBLIC[name])


@pytest.mark.parametrize("name", CLASSES)
def test_dataclass_fields_start_with_stocks(name):
    mine, theirs = dataclasses.fields(getattr(ours, name)), dataclasses.fields(PUBLIC[name])
    assert [(f.name, f.default) for f in mine[: len(theirs)]] == [(f.name, f.default) for f in theirs]
    assert all(f.default is not dataclasses.MISSING for f in mine[len(theirs) :])
    assert getattr(ours, name).__dataclass_params__.frozen == PUBLIC[name].__dataclass_params__.frozen


@pytest.mark.parametrize("world", range(1, 17))
def test_specs_tables_and_local_ranks_are_equal(world):
    for pp, tp, ep in topologies(world):
        theirs, mine = both_specs(world_size=world, pp_size=pp, tp_size=tp, ep_size=ep)
        assert dataclasses.asdict(mine) == dataclasses.asdict(theirs)
        stock_tables, tables = stock.expected_folding_group_tables(theirs), ours.expected_folding_group_tables(mine)
        for field in dataclasses.fields(stock_tables):
            assert getattr(tables, field.name) == getattr(stock_tables, field.name), (pp, tp, ep, field.name)
        for rank in range(world):
            assert ours.local_folding_ranks(rank, mine) == stock.local_folding_ranks(rank, theirs)


@pytest.mark.parametrize("world", [1, 4, 6])
def test_the_same_sizes_are_refused(world):
    sizes = range(world + 2)
    for pp, tp, ep, etp in itertools.product(sizes, repeat=4):
        options = {"world_size": world, "pp_size": pp, "tp_size": tp, "ep_size": ep, "etp_size": etp}
        theirs, mine = outcome(stock.build_folding_spec, **options), outcome(ours.build_folding_spec, **options)
        assert (theirs is ValueError) == (mine is ValueError), options


class Mpu:
    """A model parallel unit of fixed sizes."""

    def __init__(self, tp: int, pp: int):
        self.get_model_parallel_world_size = lambda: tp
        self.get_pipeline_parallel_world_size = lambda: pp


GLOBAL_OPTIONS = [
    {},
    {"deepcompile_enabled": True},
    {"sp_size": 2},
    {"use_data_before_expert_parallel": True},
    {"zero_offload_optimizer": True},
    {"zero_offload_param": True},
    {"tp_preset": "mixtral", "ep_preset": "qwen3_moe"},
    {"tp_preset": "mixtral", "ep_preset": "mixtral"},
    {"zero_stage": 2},
    {"mpu": Mpu(2, 1)},
    {"mpu": Mpu(4, 1)},
    {"mpu": Mpu(1, 2)},
    {"autoep_enabled": False, "deepcompile_enabled": True, "sp_size": 2},
]


@pytest.mark.parametrize("options", GLOBAL_OPTIONS, ids=lambda options: "-".join(options) or "defaults")
def test_global_validation_refuses_the_same_but_ep1_and_etp(options):
    for pp, tp, ep, etp in itertools.product([1, 2], [1, 2, 4], [1, 2], [1, 2]):
        theirs, mine = both_specs(world_size=8, pp_size=pp, tp_size=tp, ep_size=ep, etp_size=etp)
        refused = outcome(ours.validate_folding_global, mine, **options) is ValueError
        refused_by_stock = outcome(stock.validate_folding_global, theirs, **options) is ValueError
        if etp > 1 or (tp > 1 and ep == 1):
            # Legal here only; whatever else stock refuses must still be refused.
            likeness, _ = both_specs(world_size=8, pp_size=pp, tp_size=tp, ep_size=2)
            refused_by_stock = outcome(stock.validate_folding_global, likeness, **options) is ValueError
        assert refused == refused_by_stock, (pp, tp, ep, etp)


@pytest.mark.parametrize("form", ["dict", "pair"])
def test_cached_groups_are_refused_alike(form):
    specs = [both_specs(world_size=8, pp_size=pp, tp_size=tp, ep_size=ep) for pp, tp, ep in topologies(8)]
    results = set()
    for (cached, _), (theirs, mine) in itertools.product(specs, repeat=2):
        tables = stock.expected_folding_group_tables(cached)
        groups = (tables.ep_groups, tables.edp_groups)
        groups = dict(zip(("ep", "edp"), groups, strict=True)) if form == "dict" else groups
        refused = outcome(ours.assert_group_matches_spec, groups, mine, kind=RuntimeError)
        assert refused is outcome(stock.assert_group_matches_spec, groups, theirs, kind=RuntimeError), (cached, mine)
        results.add(refused)
    assert results == {None, RuntimeError}


@pytest.mark.parametrize("mp_mode", ["tp", "sp", "none"])
@pytest.mark.parametrize("tp", [1, 2, None])
@pytest.mark.parametrize("mark", MARKS.values(), ids=MARKS)
def test_reduction_strategy_is_equal(mark, tp, mp_mode):
    specs = (None, None) if tp is None else both_specs(world_size=4, pp_size=1, tp_size=tp, ep_size=2, mp_mode=mp_mode)
    for flags, name in itertools.product(FLAGS, [None, "model.layers.0.mlp.router.weight", "model.norm.weight"]):
        expected = stock.autoep_folding_gradient_reduction_strategy(
            specs[0], make_parameter(flags, mark, stock), param_name=name
        )
        found = ours.autoep_folding_gradient_reduction_strategy(specs[1], make_parameter(flags, mark), param_name=name)
        assert found == expected, (flags, name)


def test_every_strategy_occurs_in_the_comparison():
    """So that the equality above is not between constants."""
    spec = ours.build_folding_spec(world_size=4, pp_size=1, tp_size=2, ep_size=2)
    found = {
        ours.autoep_folding_gradient_reduction_strategy(spec, make_parameter(flags, mark))
        for flags, mark in itertools.product(FLAGS, MARKS.values())
    }
    assert found == {"skip", "average", "sum", "expert_tp_cancel"}


@pytest.mark.parametrize("mark", [mark for mark in MARKS.values() if mark])
def test_marks_set_the_same_attributes(mark):
    assert vars(make_parameter({}, mark)) == vars(make_parameter({}, mark, stock)) != {}


@pytest.mark.parametrize("value", [None, True, False], ids=["fresh", "corrected", "cleared"])
def test_correction_marker_behaves_the_same(value):
    attribute = stock.AUTOEP_FOLDING_GRAD_CORRECTED_ATTR
    mine, theirs = (make_parameter({} if value is None else {attribute: value}) for _ in range(2))
    assert stock.is_autoep_folding_gradient_corrected(theirs) is bool(value)
    assert ours.is_autoep_folding_gradient_corrected(mine) is bool(value)
    ours.clear_autoep_folding_gradient_corrected(mine)
    stock.clear_autoep_folding_gradient_corrected(theirs)
    assert vars(mine) == vars(theirs)
    assert not ours.is_autoep_folding_gradient_corrected(mine)
