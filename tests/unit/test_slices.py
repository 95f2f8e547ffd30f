"""The arithmetic of slices, without processes, and against torch's own indexing."""

import itertools
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_autoep.checkpoint.slices import SPLIT_FROM, Cut, box_shape, check_union, flat_boxes, flat_start, share
from deepspeed_autoep.checkpoint.tensors import Held, LogicalTensor, pieces_to_read, pieces_to_write
from deepspeed_autoep.engine.placements import expert_cut
from deepspeed_autoep.errors import CheckpointError
from deepspeed_autoep.moe.cutting import cut_expert_tensor
from deepspeed_autoep.moe.weight_layout import ExpertShard, ExpertTensor


def indexed(tensor: torch.Tensor, box) -> torch.Tensor:
    return tensor[tuple(slice(*side) for side in box)]


def numbered(shape) -> torch.Tensor:
    return torch.arange(prod(shape)).reshape(shape)


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_flat_boxes_are_the_range_in_order(shape, data):
    size = prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    boxes = flat_boxes(shape, start, stop)
    values = [value for box in boxes for value in indexed(numbered(shape), box).reshape(-1).tolist()]
    assert values == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert [flat_start(shape, box) for box in boxes] == [int(indexed(numbered(shape), box).reshape(-1)[0]) for box in boxes]


LAYOUTS = [
    ExpertTensor("gate_up_proj", (4, 12, 5), 1, halves=2),
    ExpertTensor("gate_up_proj", (4, 5, 12), 2, halves=2),
    ExpertTensor("gate_up_proj", (4, 12, 5), 1),
    ExpertTensor("down_proj", (4, 5, 6), 2),
    ExpertTensor("gate_up_proj_bias", (4, 12), 1, halves=2),
    ExpertTensor("down_proj_bias", (4, 5), None),
]


@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("etp", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.name}-{layout.intermediate_dim}-{layout.halves}")
@pytest.mark.parametrize("parts", [1, 3])
def test_what_ranks_write_is_the_expert_tensor(layout, ep, etp, parts):
    """Every rank's part, cut as the layer cuts it, and that shared out in flat ranges as ZeRO does."""
    whole = numbered(layout.shape)
    written = torch.full_like(whole, -1)
    boxes = []
    for ep_rank, etp_rank in itertools.product(range(ep), range(etp)):
        shard = ExpertShard.of(4, ep, ep_rank, etp, etp_rank)
        local = cut_expert_tensor(whole, layout, shard)
        cut = expert_cut(layout, shard)
        assert cut.local_shape == tuple(local.shape)
        if layout.intermediate_dim is None and etp_rank:
            continue
        bounds = [local.numel() * part // parts for part in range(parts + 1)]
        for start, stop in itertools.pairwise(bounds):
            held = {"model": Held(local.reshape(-1)[start:stop], start, stop)}
            tensor = LogicalTensor("w", cut, {"model": torch.int64}, held)
            for piece in pieces_to_write([tensor]):
                assert piece.view.untyped_storage().data_ptr() == held["model"].value.untyped_storage().data_ptr()
                indexed(written, piece.box).copy_(piece.view)
                boxes.append((piece.box, ep_rank))
    assert torch.equal(written, whole)
    check_union("w", layout.shape, boxes)


def test_replicas_share_the_writing():
    shape, count = (301, 700), 3
    value = numbered(shape)
    tensors = [
        LogicalTensor("w", Cut.along(shape), {"model": torch.int64}, {"model": Held(value, 0, value.numel())}, index, count)
        for index in range(count)
    ]
    pieces = [(piece, index) for index, tensor in enumerate(tensors) for piece in pieces_to_write([tensor])]
    check_union("w", shape, [(piece.box, index) for piece, index in pieces])
    sizes = [sum(piece.view.numel() for piece, owner in pieces if owner == index) for index in range(count)]
    assert max(sizes) - min(sizes) <= 2 * shape[1]
    assert all(len(pieces_to_write([tensor])) == 1 for tensor in tensors)  # cut between rows
    assert all(pieces_to_read([tensor])[0].view.shape == shape for tensor in tensors)  # but each reads all


@given(st.integers(0, 10**7), st.integers(0, 10**7), st.lists(st.integers(1, 3000), max_size=3), st.integers(1, 9), st.integers(0, 20))
def test_shares_are_disjoint_whole_and_alike(start, size, shape, count, turn):
    shares = [share(shape, start, start + size, index, count, turn) for index in range(count)]
    kept = [(low, high) for low, high in shares if low < high]
    assert sum(high - low for low, high in kept) == size
    if kept:
        assert kept[0][0] == start and kept[-1][1] == start + size
        assert all(a[1] == b[0] for a, b in itertools.pairwise(kept))
    if size < SPLIT_FROM * count:
        assert len(kept) <= 1
    else:
        sizes = [high - low for low, high in shares]
        assert max(sizes) <= 1.3 * min(sizes)


def test_small_tensors_take_turns():
    owners = [next(index for index in range(4) if share((1, 8), 0, 8, index, 4, turn)[1]) for turn in range(8)]
    assert owners == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize(
    "boxes, words",
    [
        ([(((0, 2), (0, 4)), 0), (((2, 3), (0, 4)), 5)], ["'w'", "[4, 4]", "no rank", "[3:4, 0:4]", "12 of 16", "[0, 5]"]),
        ([(((0, 2), (0, 4)), 0), (((1, 4), (0, 4)), 5)], ["'w'", "rank 0", "[0:2, 0:4]", "rank 5", "[1:4, 0:4]", "overlap"]),
        ([(((0, 2), (0, 4)), 0), (((2, 4), (0, 4)), 1), (((0, 2), (0, 4)), 2)], ["rank 0", "rank 2", "overlap"]),
        ([(((0, 5), (0, 4)), 3)], ["rank 3", "[0:5, 0:4]", "not in it"]),
        ([(((0, 4),), 3)], ["rank 3", "not in it"]),
        ([], ["no rank", "[0:4, 0:4]", "0 of 16"]),
        ([(((0, 4), (0, 3)), 0), (((1, 2), (3, 4)), 1), (((0, 1), (3, 4)), 1)], ["[2:4, 3:4]"]),
    ],
)
def test_a_union_that_is_not_the_tensor_is_named(boxes, words):
    with pytest.raises(CheckpointError) as caught:
        check_union("w", (4, 4), boxes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_scalars_and_empty_tensors():
    check_union("w", (), [((), 0)])
    check_union("w", (0, 3), [])
    with pytest.raises(CheckpointError, match="overlap"):
        check_union("w", (), [((), 0), ((), 1)])
    scalar = LogicalTensor("w", Cut.along(()), {"model": torch.float32}, {"model": Held(torch.tensor(3.0), 0, 1)})
    (piece,) = pieces_to_write([scalar])
    assert piece.box == () and piece.view.item() == 3.0 and box_shape(piece.box) == ()


def test_a_large_world_is_checked_quickly():
    """65,536 ranks with a row each, and one that comes twice."""
    rows = 65_536
    boxes = [(((rank, rank + 1), (0, 8)), rank) for rank in range(rows)]
    check_union("w", (rows, 8), boxes)
    with pytest.raises(CheckpointError, match="rank 77 .* rank 65535|rank 65535 .* rank 77"):
        check_union("w", (rows, 8), [*boxes[:-1], (((77, 78), (0, 8)), 65_535)])
