"""fp16 against one process in fp16 with fp32 masters; bf16 against the fp32 curve, and replicas bit by bit."""

import functools
import math

import pytest
import torch
import torch.distributed as dist

from deepspeed_autoep.folding import FAMILY_RULES, build_folding_spec
from deepspeed_autoep.folding.groups import all_gather_single
from deepspeed_autoep.moe.lane_check import checksum
from tests.unit.injection import injected_engine, one_step, snapshot, stage_gradient
from tests.unit.models import EXPERTS, OPTIMIZERS, Curve, make_batches, make_model
from tests.unit.pool import run_on
from tests.unit.training import (
    Case,
    allow_fp16_on_cpu,
    build_engine,
    mean_over_data,
    my_share,
    reference_of,
    relative,
    train,
    uncorrected,
    worst_errors,
)

HALF_TOLERANCE = 5e-3
SCALE = 2.0**12  # as initial_scale_power in ds_config()
# Every token visits every expert: with top-2 a rounding error of a router logit can send a token elsewhere, which moves a
# step's loss and norm by up to a percent, here as in the reference.
ALL_EXPERTS = (("num_experts_per_tok", EXPERTS),)


@functools.cache
def half_reference(case: Case) -> Curve:
    """One process: fp16 weights and gradients, fp32 masters, a static loss scale."""
    model = make_model(case.family, **dict(case.overrides)).half()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    kind, options = OPTIMIZERS[case.optimizer]
    stepper = kind(masters, **options)
    curve = Curve()
    for batch in make_batches(case.steps, case.samples, case.length):
        model.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        (loss.float() * SCALE).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            master.grad = gradient.float() / SCALE
        curve.losses.append(loss.item())
        curve.norms.append(torch.nn.utils.clip_grad_norm_(masters, case.clip).item())
        stepper.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
    curve.state = model.state_dict()
    return curve


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize(("tp", "ep"), [(1, 4), (2, 1), (2, 4), (4, 2)])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_fp16(family, tp, ep, zero):
    case = Case(family, 4, tp, ep, zero, optimizer="SGD", dtype="fp16", overrides=ALL_EXPERTS)
    right = half_reference(Case(family, optimizer="SGD", overrides=ALL_EXPERTS))
    assert min(right.norms) > case.clip
    result = run_on(4, train, case)[0]
    assert result.state["model.norm.weight"].dtype == torch.float16
    assert max(worst_errors(result, right).values()) <= HALF_TOLERANCE


@pytest.mark.parametrize("torch_adam", [True, False], ids=["torch", "fused"])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_adam_from_the_configuration_in_fp16(zero, torch_adam):
    """DeepSpeed's own fused Adam takes its flat wrapper under ZeRO-0, torch's the other one."""
    for error in run_on(4, train_adam, Case(zero=zero, ep=4, dtype="fp16", overrides=ALL_EXPERTS), torch_adam):
        assert error <= HALF_TOLERANCE


def train_adam(case: Case, torch_adam: bool) -> float:
    import deepspeed_autoep
    from tests.unit.training import ds_config

    allow_fp16_on_cpu()
    options = OPTIMIZERS["AdamW"][1] | {"betas": [0.9, 0.95], "torch_adam": torch_adam}
    config = ds_config(case) | {"optimizer": {"type": "AdamW", "params": options}}
    engine, *_ = deepspeed_autoep.initialize(model=make_model(case.family, **dict(case.overrides)), config=config)
    losses, norms = [], []
    for batch in make_batches(case.steps, case.samples, case.length):
        share = my_share(batch, case)
        loss = engine(input_ids=share, labels=share).loss
        engine.backward(loss)
        engine.step()
        losses.append(mean_over_data(loss, engine))
        norms.append(float(engine.get_global_grad_norm()))
    engine.destroy()
    right = half_reference(Case(overrides=ALL_EXPERTS))
    return max(relative(*pair) for pair in zip(losses + norms, right.losses + right.norms, strict=True))


ACCUMULATION = {
    "bf16": (("data_types", {"grad_accum_dtype": "bf16"}),),
    "fp32": (("data_types", {"grad_accum_dtype": "fp32"}),),
}


def train_bf16(case: Case):
    """Losses, and the parameters whose copies differ in any bit after the last step."""
    engine = build_engine(case)
    losses = []
    for batch in make_batches(case.steps, case.samples, case.length):
        share = my_share(batch, case)
        loss = engine(input_ids=share, labels=share).loss
        engine.backward(loss)
        engine.step()
        losses.append(mean_over_data(loss, engine))
    handles = engine.autoep.handles
    groups = {"dense_dp": [handles.dense_dp_group], "edp": [handles.edp_group]}
    differing = []
    for parameter, info in engine.autoep_families.items():
        holders = list(groups[FAMILY_RULES[info.family].data_group])
        if info.family.meets_tp_peers:
            holders.append(handles.tp_group)
        for group in holders:
            mine = checksum([parameter]).reshape(1)
            everyone = mine.new_empty(dist.get_world_size(group))
            all_gather_single(everyone, mine, group=group)
            if len(everyone.unique()) > 1:
                differing.append(info.name)
    dtypes = {parameter.dtype for parameter in engine.module.parameters()}
    engine.destroy()
    return losses, differing, dtypes


@pytest.mark.parametrize("accumulation", ACCUMULATION)
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize(("tp", "ep"), [(2, 2), (4, 2), (1, 2)])
def test_bf16_follows_fp32_and_replicas_stay_equal(tp, ep, zero, accumulation):
    case = Case("qwen3_moe", 4, tp, ep, zero, steps=20, dtype="bf16", config=ACCUMULATION[accumulation])
    right = reference_of(Case("qwen3_moe", steps=20))
    assert right.losses[-1] < right.losses[0]
    for losses, differing, dtypes in run_on(4, train_bf16, case):
        assert differing == []
        assert dtypes == {torch.bfloat16}
        assert max(relative(*pair) for pair in zip(losses, right.losses, strict=True)) < 1e-2


def test_replica_check_sees_a_drift():
    case = Case("qwen3_moe", 4, 2, 2, 1, steps=2, dtype="bf16")
    assert any(differing for _, differing, _ in run_on(4, train_drifting, case))


def train_drifting(case: Case):
    """Without the TP rule lanes drift apart."""
    from unittest import mock

    from deepspeed_autoep.gradients import sync

    with mock.patch.object(sync.GradientSync, "correct", uncorrected):
        return train_bf16(case)


def steps_of_a_growing_scale(case: Case) -> tuple[list[float], list[float]]:
    """Loss scales before each of four steps, and how far the parameters moved in each; gradients are 0.5 everywhere."""
    allow_fp16_on_cpu()
    spec = build_folding_spec(world_size=case.world, pp_size=1, tp_size=case.tp, ep_size=case.ep)
    engine = injected_engine(case, lambda name, family, _: stage_gradient(0.5, family, spec))
    scales, moves = [], []
    for _ in range(4):
        scales.append(engine.optimizer.loss_scale)
        before = snapshot(engine)
        one_step(engine)
        after = snapshot(engine)
        moves.append(max((before[name].float() - after[name].float()).abs().max().item() for name in before))
    engine.destroy()
    return scales, moves


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("clip", [0.0, 3.0])
def test_a_growing_loss_scale_leaves_the_step_as_it_is(zero, clip):
    """DeepSpeed 0.19.8 divides by the scale after it has grown: half of the step is lost, each time."""
    fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1}
    case = Case("mixtral", 4, 2, 4, zero, "SGD", samples=2, clip=clip, dtype="fp16", config=(("fp16", fp16),))
    elements = sum(parameter.numel() for parameter in make_model("mixtral").parameters())
    gradient = 0.5 if clip == 0 else clip / math.sqrt(elements)
    for scales, moves in run_on(4, steps_of_a_growing_scale, case):
        assert scales == [16.0, 16.0, 32.0, 64.0]
        # lr 0.5, momentum 0.9
        assert moves == [pytest.approx(0.5 * gradient * times, rel=1e-2, abs=2e-3) for times in (1.0, 1.9, 2.71, 3.439)]
