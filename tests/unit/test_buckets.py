"""The layout of TP transfers: pure arithmetic, so checked on any list of pieces and at any TP size."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_autoep.folding import FAMILY_RULES, GradientFamily
from deepspeed_autoep.gradients.buckets import ALIGNMENT, TPRule, plan_flat, plan_transfers

FAMILIES = list(GradientFamily)
R, P, S, E, X, C = (
    GradientFamily.REPLICATED,
    GradientFamily.PARTIAL,
    GradientFamily.TP_SHARDED,
    GradientFamily.EXPERT,
    GradientFamily.EXPERT_SHARED_ETP,
    GradientFamily.EXPERT_COMMON,
)


@pytest.mark.parametrize("tp", [2, 3, 4, 65536])
def test_the_rule_is_the_table(tp):
    rule = TPRule(tp)
    assert {family: rule.meets(family) for family in FAMILIES} == {R: True, P: True, S: False, E: False, X: False, C: True}
    assert {family: rule.factor(family) for family in FAMILIES} == {R: 1 / tp, P: 1.0, S: 1.0, E: 1 / tp, X: 1 / tp, C: 1 / tp}


def test_without_tp_nothing_happens():
    assert plan_transfers([5, 6, 7, 8, 9, 10], FAMILIES, TPRule(1), 100) == ()


def test_replicated_gradients_can_be_left_alone():
    rule = TPRule(4, synchronize_replicated=False)
    assert not rule.meets(R) and rule.factor(R) == 1.0
    assert rule.meets(P) and rule.factor(E) == 0.25
    assert rule.meets(C) and rule.factor(C) == 0.25  # lanes' gradients are of different rows
    assert plan_transfers([5, 6], [R, S], rule, 100) == ()
    assert [part.piece for transfer in plan_transfers([5, 6, 7], [R, P, E], rule, 100) for part in transfer.parts] == [1, 2]


def test_one_transfer_holds_everything_that_fits():
    (transfer,) = plan_transfers([5, 20, 3, 7, 1], [R, S, E, P, R], TPRule(4), 1000)
    assert transfer.size == 16 + 16 + 16
    found = [(part.piece, part.start, part.count, part.offset, part.factor) for part in transfer.parts]
    assert found == [(0, 0, 5, 0, 0.25), (2, 0, 3, None, 0.25), (3, 0, 7, 16, 1.0), (4, 0, 1, 32, 0.25)]


def test_experts_alone_need_no_collective():
    (transfer,) = plan_transfers([5, 6], [E, X], TPRule(2), 16)
    assert transfer.size == 0 and [part.offset for part in transfer.parts] == [None, None]


def test_a_piece_larger_than_a_transfer_is_cut():
    transfers = plan_transfers([40, 8], [R, P], TPRule(2), 16)
    assert [transfer.size for transfer in transfers] == [16, 16, 16, 16]  # the piece's rest is padded to 16
    assert [[(p.piece, p.start, p.count) for p in t.parts] for t in transfers] == [[(0, 0, 16)], [(0, 16, 16)], [(0, 32, 8)], [(1, 0, 8)]]


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_is_positive(limit):
    with pytest.raises(ValueError, match=f"limit={limit}"):
        plan_transfers([1], [R], TPRule(2), limit)


pieces = st.lists(st.tuples(st.integers(0, 200), st.sampled_from(FAMILIES)), max_size=20)


@settings(deadline=None)
@given(pieces=pieces, tp=st.sampled_from([2, 3, 8, 65536]), limit=st.integers(1, 300), synchronize=st.booleans())
def test_every_element_is_treated_once_as_its_family_says(pieces, tp, limit, synchronize):
    counts, families = [count for count, _ in pieces], [family for _, family in pieces]
    rule = TPRule(tp, synchronize)
    transfers = plan_transfers(counts, families, rule, limit)
    seen = [[0] * count for count in counts]
    for transfer in transfers:
        assert transfer.parts
        taken = set()
        for part in transfer.parts:
            family = families[part.piece]
            assert part.count > 0 and part.factor == rule.factor(family)
            for element in range(part.start, part.start + part.count):
                seen[part.piece][element] += 1
            assert (part.offset is not None) == rule.meets(family)
            if part.offset is not None:
                assert part.offset % ALIGNMENT == 0
                places = set(range(part.offset, part.offset + part.count))
                assert not places & taken and part.offset + part.count <= transfer.size
                taken |= places
        assert transfer.size <= -(-limit // ALIGNMENT) * ALIGNMENT
    for family, elements in zip(families, seen, strict=True):
        untouched = not rule.meets(family) and rule.factor(family) == 1.0
        assert elements == [0 if untouched else 1] * len(elements)


@settings(deadline=None)
@given(pieces=pieces, tp=st.sampled_from([2, 3]), limit=st.integers(1, 300))
def test_lanes_agree_on_sizes_whatever_their_shards(pieces, tp, limit):
    """TP shards may differ between lanes; the sizes of collectives must not."""
    counts, families = [count for count, _ in pieces], [family for _, family in pieces]
    other = [count + 5 if family is S else count for count, family in pieces]
    mine, theirs = (plan_transfers(sizes, families, TPRule(tp), limit) for sizes in (counts, other))
    assert [transfer.size for transfer in mine] == [transfer.size for transfer in theirs]


def test_a_flat_buffer_is_summed_where_it_stands():
    transfers = plan_flat([10, 6, 4], [R, R, P], [0, 10, 16], 24, TPRule(4), 100)
    assert [(t.first, t.size) for t in transfers] == [(0, 24)]
    assert [(p.start, p.count, p.offset, p.factor) for p in transfers[0].parts] == [(0, 16, None, 0.25)]  # neighbours joined


@pytest.mark.parametrize("tp", [2, 3, 49])
def test_a_factor_that_is_left_leaves_sums_alone(tp):
    (only,) = plan_flat([10, 6], [R, R], [0, 10], 16, TPRule(tp), 100, leave_factor=True)
    assert only.parts == () and only.size == 16
    (mixed,) = plan_flat([10, 6], [R, P], [0, 10], 16, TPRule(tp), 100, leave_factor=True)
    assert [(p.start, p.count, p.factor) for p in mixed.parts] == [(10, 6, float(tp))]  # times 1/tp later


def test_a_flat_buffer_is_cut_at_the_limit():
    transfers = plan_flat([10, 6, 4], [R, P, R], [0, 10, 16], 24, TPRule(2), 8)
    assert [(t.first, t.size) for t in transfers] == [(0, 8), (8, 8), (16, 8)]
    assert [[(p.start, p.count) for p in t.parts] for t in transfers] == [[(0, 8)], [(8, 2)], [(16, 4)]]


@pytest.mark.parametrize("stranger", [S, E, X])
def test_a_flat_buffer_with_something_else_in_it_is_not_summed(stranger):
    assert plan_flat([10, 6], [R, stranger], [0, 10], 16, TPRule(2), 100) is None
    assert plan_flat([10, 6], [R, P], [0, 10], 16, TPRule(2, synchronize_replicated=False), 100) is None


def test_an_empty_partition_sends_nothing():
    assert plan_flat([], [], [], 16, TPRule(2), 100) == ()


@settings(deadline=None)
@given(
    pieces=st.lists(st.tuples(st.integers(0, 200), st.sampled_from([R, P]), st.integers(0, 9)), max_size=12),
    limit=st.integers(1, 300),
    tail=st.integers(0, 20),
)
def test_flat_transfers_cover_the_buffer_and_scale_by_family(pieces, limit, tail):
    offsets, end = [], 0
    for count, _, gap in pieces:
        offsets.append(end + gap)
        end += gap + count
    counts, families, length = [p[0] for p in pieces], [p[1] for p in pieces], end + tail
    transfers = plan_flat(counts, families, offsets, length, TPRule(4), limit)
    if any(counts):
        assert [i for t in transfers for i in range(t.first, t.first + t.size)] == list(range(length))
    scaled = [0] * length
    for transfer in transfers:
        for part in transfer.parts:
            assert transfer.first <= part.start and part.start + part.count <= transfer.first + transfer.size
            for element in range(part.start, part.start + part.count):
                scaled[element] += 1
    for count, family, offset in zip(counts, families, offsets, strict=True):
        assert scaled[offset : offset + count] == [1 if FAMILY_RULES[family].tp_factor(4) != 1.0 else 0] * count
