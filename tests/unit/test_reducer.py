"""The reducer alone: transfers of any size, one rounding, the memory that it takes, the check of the first step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from deepspeed_autoep.folding import GradientFamily, build_folding_spec, create_folding_groups
from deepspeed_autoep.gradients.reducer import TPGradientReducer
from deepspeed_autoep.gradients.slices import FlatGradients, GradientSlice, ParameterInfo
from tests.perf.memory import LiveTensors
from tests.unit.pool import run_on

R, P, S, E, X = (
    GradientFamily.REPLICATED,
    GradientFamily.PARTIAL,
    GradientFamily.TP_SHARDED,
    GradientFamily.EXPERT,
    GradientFamily.EXPERT_SHARED_ETP,
)


def reduce_some(limit: int, depth: int, flat: bool | str, dtype: str):
    handles = create_folding_groups(build_folding_spec(world_size=4, pp_size=1, tp_size=4, ep_size=1))
    families = [R, P, R, R] if flat else [R, E, P, S, R, X]
    infos = [ParameterInfo(index, f"p{index}", family) for index, family in enumerate(families * 3)]
    sizes = [7 + 13 * index for index in range(len(infos))]
    made = torch.zeros(sum(sizes) + 20)
    generator = torch.Generator().manual_seed(dist.get_rank())
    source = torch.randn(sum(sizes), generator=generator)
    made[: len(source)] = source
    tensors = [piece.clone().to(getattr(torch, dtype)) for piece in source.split(sizes)]
    if flat:
        tensors = list(made[: sum(sizes)].split(sizes))
    everyone = [torch.zeros_like(source) for _ in range(4)]
    dist.all_gather(everyone, source)
    if dtype != "float32":
        everyone = [lane.to(getattr(torch, dtype)).float() for lane in everyone]
    pieces = [GradientSlice(tensor, info, 1) for tensor, info in zip(tensors, infos, strict=True)]
    reducer = TPGradientReducer(handles, infos, torch.device("cpu"), transfer_elements=limit, under_way=depth)
    reducer.verify_next = False
    if flat:
        left = reducer.correct_flat(FlatGradients(made, tuple(pieces)), leave_factor=flat == "factor left")
        assert left == (0.25 if flat == "factor left" else 1.0)
        made.mul_(left)
    else:
        reducer.correct(pieces)
    worst, start = 0.0, 0
    for piece, size, info in zip(pieces, sizes, infos, strict=True):
        lanes = torch.stack([lane[start : start + size].double() for lane in everyone])
        own = lanes[dist.get_rank()]
        right = {R: lanes.mean(0), P: lanes.sum(0), S: own, E: own / 4, X: own / 4}[info.family]
        worst = max(worst, ((piece.gradient.double() - right).abs().max() / right.abs().max()).item())
        start += size
    return worst, bool((made[sum(sizes) :] == 0).all())


@pytest.mark.parametrize("flat", [False, True, "factor left"])
@pytest.mark.parametrize("limit", [1, 16, 100, 10**6])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_transfers_of_any_size_give_the_same_result(limit, depth, flat):
    for worst, padding_is_zero in run_on(4, reduce_some, limit, depth, flat, "float32"):
        assert worst < 1e-6 and padding_is_zero


@pytest.mark.parametrize(("dtype", "unit"), [("bfloat16", 2**-8), ("float16", 2**-11)])
def test_sixteen_bit_gradients_are_summed_in_fp32(dtype, unit):
    """One rounding, to half a unit in the last place; a 16-bit sum would round three times."""
    for worst, _ in run_on(4, reduce_some, 100, 2, False, dtype):
        assert 0 < worst <= unit


def held_memory(limit: int, under_way: int, flat: bool):
    """Bytes that the reducer keeps, and the most that it had at a time; the first step compares lanes, too."""
    handles = create_folding_groups(build_folding_spec(world_size=4, pp_size=1, tp_size=4, ep_size=1))
    infos = [ParameterInfo(index, f"p{index}", R) for index in range(40)]
    buffer = torch.ones(40_000)
    pieces = [GradientSlice(view, info, 1) for view, info in zip(buffer.split(1000), infos, strict=True)]
    reducer = TPGradientReducer(handles, infos, torch.device("cpu"), transfer_elements=limit, under_way=under_way)
    addresses = set()
    with LiveTensors() as live:
        for _ in range(3):
            if flat:
                reducer.correct_flat(FlatGradients(buffer, tuple(pieces)), leave_factor=True)
            else:
                reducer.correct(pieces)
            reducer.finish_step()
            addresses.add(tuple(kept.data_ptr() for kept in reducer._ring))
    return reducer.ring_bytes, live.peak, len(addresses)


@pytest.mark.parametrize("under_way", [1, 2])
def test_memory_is_that_of_the_transfers_under_way(under_way):
    """Of 160,000 bytes of gradients; the first step's comparison adds temporaries of one piece."""
    transfers = under_way * 4 * 4096
    for held, peak, different in run_on(4, held_memory, 4096, under_way, False):
        assert 0 < held <= transfers and different == 1
        assert peak <= transfers + 40_000
    for held, peak, _ in run_on(4, held_memory, 4096, under_way, True):
        assert held == 0 and peak <= 2 * transfers + 40_000


def classified_after_an_overflow():
    """A first step with an infinity settles nothing; the second shows that lanes differ."""
    handles = create_folding_groups(build_folding_spec(world_size=4, pp_size=1, tp_size=4, ep_size=1))
    infos = [ParameterInfo(0, "wrong.one", R)]
    reducer = TPGradientReducer(handles, infos, torch.device("cpu"))
    reducer.correct([GradientSlice(torch.full((4,), float("inf")), infos[0], 1)])
    reducer.finish_step()
    reducer.correct([GradientSlice(torch.full((4,), float("nan")), infos[0], 1)])
    reducer.forget()  # the pass is discarded
    reducer.correct([GradientSlice(torch.full((4,), float(dist.get_rank())), infos[0], 1)])
    try:
        reducer.finish_step()
    except RuntimeError as caught:
        return str(caught)
    return ""


def test_an_overflow_does_not_use_up_the_check_of_the_first_step():
    assert all("wrong.one" in message for message in run_on(4, classified_after_an_overflow))
