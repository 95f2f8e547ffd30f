"""Process groups: created as the tables say, cached by the whole spec, agreed on by all ranks."""

import pytest
import torch.distributed as dist

from deepspeed_autoep.errors import ConfigError, TopologyError
from deepspeed_autoep.folding import (
    build_folding_spec,
    collectively,
    create_folding_groups,
    expected_folding_group_tables,
    validate_folding_agreement,
)
from tests.unit.pool import run_on

KINDS = ("tp", "dense_dp", "ep", "edp", "etp", "expert_shared")


def spec_of(world, tp, ep, etp=1):
    return build_folding_spec(world_size=world, pp_size=1, tp_size=tp, ep_size=ep, etp_size=etp)


def created(sizes):
    """Ranks of each of this rank's groups as torch.distributed knows them, and as the handles say."""
    handles = create_folding_groups(spec_of(*sizes))
    actual = {kind: tuple(dist.get_process_group_ranks(getattr(handles, f"{kind}_group"))) for kind in KINDS}
    said = {kind: getattr(handles, f"{kind}_ranks") for kind in KINDS}
    stage = tuple(dist.get_process_group_ranks(handles.stage_group))
    return actual, said, stage, handles.tp_rank, handles.ep_rank


@pytest.mark.parametrize("sizes", [(8, 1, 8), (8, 2, 1), (8, 2, 4), (8, 4, 8), (8, 2, 2, 2), (8, 4, 1, 8)], ids=str)
def test_groups_are_those_of_the_tables(sizes):
    tables = expected_folding_group_tables(spec_of(*sizes))
    for rank, (actual, said, stage, tp_rank, ep_rank) in enumerate(run_on(8, created, sizes)):
        for kind in KINDS:
            (right,) = [group for group in getattr(tables, f"{kind}_groups") if rank in group]
            assert set(actual[kind]) == set(right) and said[kind] == right
        assert stage == tuple(range(8))
        assert said["tp"][tp_rank] == rank and said["ep"][ep_rank] == rank


def kept():
    """tp 1 / ep 2 and tp 2 / ep 2 / etp 2 have the same EP size and different groups: neither may get the other's. tp 2 / ep 1 has
    the pairs of the first, as TP groups."""
    first, second = create_folding_groups(spec_of(4, 1, 2)), create_folding_groups(spec_of(4, 2, 2, 2))
    own = dist.get_process_group_ranks(second.ep_group) == list(second.ep_ranks)
    third = create_folding_groups(spec_of(4, 2, 1))
    again = create_folding_groups(spec_of(4, 1, 2))
    return again is first, first.ep_ranks != second.ep_ranks, own, third.tp_group is first.ep_group


def test_groups_are_kept_by_their_ranks():
    assert run_on(4, kept) == [(True, True, True, True)] * 4


def wrong_world():
    try:
        create_folding_groups(spec_of(8, 2, 2))
    except TopologyError as caught:
        return str(caught)
    return ""


def test_a_spec_for_another_world_is_refused():
    assert all("8 ranks" in message and "has 4" in message for message in run_on(4, wrong_world))


def disagree(what):
    rank = dist.get_rank()
    spec = spec_of(4, 2 if what == "spec" and rank == 3 else 1, 2)
    settings = {"a.b": "1" if what == "settings" and rank == 2 else "0"}
    try:
        validate_folding_agreement(spec, settings)
    except Exception as caught:
        return type(caught).__name__, str(caught)
    return "nothing", ""


@pytest.mark.parametrize(
    ("what", "words"), [("spec", ["tp_size", "1 on rank 0", "2 on rank 3"]), ("settings", ["a.b", "'0' on rank 0", "'1' on rank 2"])]
)
def test_disagreement_is_the_same_error_everywhere(what, words):
    results = run_on(4, disagree, what)
    assert len(set(results)) == 1
    kind, message = results[0]
    assert kind == "RankMismatchError" and all(word in message for word in words)


def test_agreement_passes():
    assert run_on(4, disagree, "nothing") == [("nothing", "")] * 4


def checked(failing):
    def check():
        if dist.get_rank() in failing:
            raise ConfigError(f"bad on {dist.get_rank()}")
        return dist.get_rank()

    try:
        return collectively(check)
    except Exception as caught:
        return type(caught).__name__, str(caught)


def test_collectively_raises_everywhere_or_nowhere():
    assert run_on(4, checked, ()) == [0, 1, 2, 3]
    results = run_on(4, checked, (1, 2))
    assert results[1] == ("ConfigError", "bad on 1") and results[2] == ("ConfigError", "bad on 2")
    for rank in (0, 3):
        kind, message = results[rank]
        assert kind == "RankMismatchError" and "rank 1 of 4" in message and "bad on 1" in message
