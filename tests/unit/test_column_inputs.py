"""Column-parallel siblings all-reduce their input's gradient once."""

import pytest
import torch
import torch.distributed as dist

from deepspeed_autoep.engine import column_inputs
from tests.unit.models import make_batches
from tests.unit.pool import run_on
from tests.unit.training import Case, build_engine, my_share

LAYERS = 2


def backward_reductions(case: Case, checkpointing: bool):
    """All-reduces of entrances in one backward pass, and inputs that entrances still hold after the forward pass."""
    engine = build_engine(case)
    if checkpointing:
        engine.module.gradient_checkpointing_enable({"use_reentrant": False})
    entrances = {m.autoep_entrance for m in engine.module.modules() if isinstance(m, column_inputs.SharedInputLinear)}
    share = my_share(make_batches(1, case.samples, case.length)[0], case)
    loss = engine(input_ids=share, labels=share).loss
    held = sum(entrance._source is not None for entrance in entrances)
    counted, original = [], dist.all_reduce

    def counting(tensor, *arguments, **named):
        counted.append(tensor.shape)
        return original(tensor, *arguments, **named)

    column_inputs.dist = type("counting", (), {"all_reduce": staticmethod(counting)})
    try:
        engine.backward(loss)
    finally:
        column_inputs.dist = dist
    held += sum(entrance._source is not None for entrance in entrances)
    engine.step()
    engine.destroy()
    return len(counted), len(entrances), held


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("family", "entrances"),
    [
        ("mixtral", LAYERS + 1),  # q, k, v of each layer, and the output head
        ("qwen3_moe", LAYERS + 1),
        ("deepseek_v3", 2 + 1),  # gate and up of the dense layer and of the shared experts; attention is not cut
        ("olmoe", LAYERS + 1),
    ],
)
def test_one_reduction_for_each_input(family, entrances, checkpointing):
    for counted, made, held in run_on(4, backward_reductions, Case(family, tp=2, ep=4), checkpointing):
        assert counted == made == entrances
        assert held == 0


def distinct_inputs():
    """Children that read different tensors enter separately, and a second call does not see the first one's gradient."""
    entrance = column_inputs._Entrance(dist.group.WORLD)
    first, second = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    assert entrance(first) is entrance(first)
    total = entrance(first).sum() + 2 * entrance(second).sum()
    total.backward()
    return first.grad.tolist(), second.grad.tolist()


def test_distinct_inputs_enter_separately():
    assert run_on(4, distinct_inputs) == [([4.0, 4.0], [8.0, 8.0])] * 4
