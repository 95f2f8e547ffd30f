"""Where the entries of quantizers' buffers lie, and which of them a rank holds."""

from __future__ import annotations

import re

import pytest

from deepspeed_autoep.moe.weight_layout import ExpertShard, ExpertTensor
from deepspeed_autoep.quantization.buffers import Extent, layout_of_buffer, layout_of_input_buffer

UP = ExpertTensor("gate_up_proj", (8, 96, 32), 1, halves=2)
DOWN = ExpertTensor("down_proj", (8, 32, 48), 2)
UP_EXTENTS = (Extent(96, tensor=UP), Extent(32))
DOWN_EXTENTS = (Extent(32), Extent(48, tensor=DOWN))
SECOND = ExpertShard.of(8, 4, 1, 2, 1)  # experts 2 and 3, second half


@pytest.mark.parametrize(
    ("stored", "extents", "blocks", "shape", "runs"),
    [
        ((), UP_EXTENTS, None, (), ()),
        ((1, 1), UP_EXTENTS, None, (1, 1), (((0, 1),), ((0, 1),))),
        ((96, 1), UP_EXTENTS, None, (96, 1), (((24, 48), (72, 96)), ((0, 1),))),
        ((32, 1), DOWN_EXTENTS, None, (32, 1), (((0, 32),), ((0, 1),))),
        ((1, 48), DOWN_EXTENTS, None, (1, 48), (((0, 1),), ((24, 48),))),
        ((384, 1), UP_EXTENTS, {1: 8}, (96, 4), (((24, 48), (72, 96)), ((0, 4),))),
        ((192, 1), DOWN_EXTENTS, {1: 8}, (32, 6), (((0, 32),), ((3, 6),))),
        ((96, 1), UP_EXTENTS, {1: 128}, (96, 1), (((24, 48), (72, 96)), ((0, 1),))),
        ((8, 1, 4, 1), UP_EXTENTS, {0: 12, 1: 8}, (8, 4), (((2, 4), (6, 8)), ((0, 4),))),
        ((8, 1, 1), (Extent(8, over_experts=True), *UP_EXTENTS), None, (8, 1, 1), (((2, 4),), ((0, 1),), ((0, 1),))),
        ((1536, 1), (Extent(8, over_experts=True), *DOWN_EXTENTS), {2: 8}, (8, 32, 6), (((2, 4),), ((0, 32),), ((3, 6),))),
    ],
)
def test_layouts(stored, extents, blocks, shape, runs):
    layout = layout_of_buffer(stored, extents, blocks)
    assert layout.shape == shape and layout.runs(SECOND) == runs
    assert layout.runs(ExpertShard(0, 8)) == tuple(((0, count),) for count in shape)


@pytest.mark.parametrize("stored", [(48,), (1, 48), (1, 1, 48)])
def test_layout_of_a_value_for_each_feature(stored):
    layout = layout_of_input_buffer(stored, DOWN_EXTENTS[1])
    assert layout.runs(SECOND)[-1] == ((24, 48),) and layout.local_shape(SECOND) == (*stored[:-1], 24)


@pytest.mark.parametrize(
    ("stored", "blocks", "words"),
    [((95, 1), None, "[95, 1]"), ((32, 96), None, "[32, 96]"), ((380, 1), {1: 8}, "{1: 8}"), ((96, 4), {1: 8}, "[96, 32]")],
)
def test_an_unknown_shape_is_refused(stored, blocks, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        layout_of_buffer(stored, UP_EXTENTS, blocks)


def test_a_cut_through_a_block_names_the_numbers():
    layout = layout_of_buffer((96, 1), DOWN_EXTENTS, {1: 16})
    with pytest.raises(ValueError, match=re.escape("[24, 48) of a dimension of size 48") + ".*blocks of 16"):
        layout.runs(SECOND)
    assert layout.runs(ExpertShard.of(8, 4, 1, 3, 1)) == (((0, 32),), ((1, 2),))


def test_at_world_65536():
    tensor = ExpertTensor("gate_up_proj", (512, 2 * 4096, 7168), 1, halves=2)
    layout = layout_of_buffer((2 * 4096 * 448, 1), (Extent(2 * 4096, tensor=tensor), Extent(7168)), {1: 16})
    rows = [run for rank in range(128) for run in layout.runs(ExpertShard.of(512, 512, 7, 128, rank))[0]]
    assert sorted(rows) == [(start, start + 32) for start in range(0, 2 * 4096, 32)]
