"""Who is summed with whom, what it is divided by, and the norm: gradients whose value tells."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from deepspeed_autoep.folding import (
    FAMILY_RULES,
    GradientFamily,
    apply_folding_correction_to_grad_buffer,
    build_folding_spec,
    create_folding_groups,
    mark_autoep_folding_partial_router_parameter,
    mark_autoep_folding_router_parameter,
    reduce_autoep_folding_gradient,
)
from deepspeed_autoep.gradients.norms import StatisticsPass
from deepspeed_autoep.gradients.reducer import TPGradientReducer
from deepspeed_autoep.gradients.slices import GradientSlice, ParameterInfo
from tests.unit.injection import expected_of_powers, injected_engine, one_backward, one_step, snapshot, stage_gradient
from tests.unit.pool import run_on
from tests.unit.training import Case, build_engine

ZERO = [0, 1, 2]
TOPOLOGIES = [(4, 1, 4), (4, 2, 1), (4, 2, 2), (4, 2, 4), (4, 4, 2), (8, 2, 4), (8, 4, 8)]


def powers_of_two(case: Case):
    """One SGD step of learning rate 0.5: the update is the reduced gradient."""
    engine = injected_engine(case, lambda *_: 2.0 ** dist.get_rank())
    before = snapshot(engine)
    one_step(engine)
    wrong, families = [], set()
    for parameter, info in engine.autoep_families.items():
        families.add(info.family.value)
        update = (before[info.name] - parameter.detach()) / 0.5
        right = expected_of_powers(info.family, engine.autoep.handles)
        if (update - right).abs().max() > 1e-4 * right:
            wrong.append((info.name, info.family.value, right, update.flatten()[0].item()))
    engine.destroy()
    return wrong, sorted(families)


@pytest.mark.parametrize("zero", ZERO)
@pytest.mark.parametrize(("world", "tp", "ep"), TOPOLOGIES)
def test_powers_of_two_show_who_was_reduced(world, tp, ep, zero):
    case = Case("qwen3_moe", world, tp, ep, zero, optimizer="SGD", samples=world // tp, clip=0.0)
    everywhere = {"expert", "replicated"} | ({"partial", "tp_sharded"} if tp > 1 else set())
    for wrong, families in run_on(world, powers_of_two, case):
        assert set(families) == everywhere
        assert not wrong


def all_ones(case: Case):
    engine = injected_engine(case, lambda name, family, _: stage_gradient(1.0, family, engine_spec(case)))
    before = snapshot(engine)
    one_step(engine)
    updates = [((before[i.name].float() - p.detach().float()) / 0.5) for p, i in engine.autoep_families.items()]
    low, high = min(u.min().item() for u in updates), max(u.max().item() for u in updates)
    norm = float(engine.get_global_grad_norm())
    engine.destroy()
    return norm, low, high


def engine_spec(case: Case):
    return build_folding_spec(world_size=case.world, pp_size=1, tp_size=case.tp, ep_size=case.ep, etp_size=case.etp)


def unique_elements(family: str) -> int:
    from tests.unit.models import make_model

    return sum(parameter.numel() for parameter in make_model(family).parameters())


@pytest.mark.parametrize("zero", ZERO)
@pytest.mark.parametrize(("world", "tp", "ep"), TOPOLOGIES)
def test_all_ones_count_every_element_once_and_clip_alike(world, tp, ep, zero):
    """Traps 10, 11, 12: norm sqrt(n), and clipping leaves max_norm / sqrt(n) in each element, on every rank."""
    case = Case("qwen3_moe", world, tp, ep, zero, optimizer="SGD", samples=world // tp, clip=3.0)
    right = math.sqrt(unique_elements("qwen3_moe"))
    results = run_on(world, all_ones, case)
    assert len({norm for norm, _, _ in results}) == 1  # the same bits everywhere
    for norm, low, high in results:
        assert norm == pytest.approx(right, rel=1e-6)
        assert low == pytest.approx(3.0 / right, rel=1e-3) and high == pytest.approx(3.0 / right, rel=1e-3)


def expert_squares(case: Case):
    """Trap 9: rank 0's expert gradients square to 20, rank 1's to 100, everything else is zero."""
    mine = [(2.0, 4.0), (6.0, 8.0)][dist.get_rank()]

    def gradient(name, family, parameter):
        value = torch.zeros_like(parameter)
        if name.endswith("layers.0.mlp.experts.down_proj"):
            value[0, 0, 0], value[1, 0, 0] = (stage_gradient(v, family, engine_spec(case)) for v in mine)
        return value

    engine = injected_engine(case, gradient)
    before = snapshot(engine)
    one_step(engine)
    norm = float(engine.get_global_grad_norm())
    name = next(name for name in before if name.endswith("layers.0.mlp.experts.down_proj"))
    after = snapshot(engine)[name]
    update = (before[name].float() - after.float())[:2, 0, 0] / 0.5
    engine.destroy()
    return norm, update.tolist()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("zero", ZERO)
def test_expert_norms_add_in_squares(zero, dtype):
    # A scale at which twice 8 (dp is 2) does not overflow.
    config = (("fp16", {"enabled": True, "initial_scale_power": 8}),) if dtype == "fp16" else ()
    case = Case("mixtral", 2, 1, 2, zero, optimizer="SGD", samples=2, clip=1.0, dtype=dtype, config=config)
    results = run_on(2, expert_squares, case)
    tolerance = 1e-6 if dtype == "fp32" else 2e-2  # of the parameter: its 16-bit grid
    for (norm, update), mine in zip(results, [(2.0, 4.0), (6.0, 8.0)], strict=True):
        assert norm == pytest.approx(math.sqrt(120), rel=1e-6)
        assert update == pytest.approx([value / math.sqrt(120) for value in mine], abs=tolerance)


def one_scalar_each(gradient: float):
    """Trap 10, literally: tp2/ep2, dp 1, one replicated dense scalar and one expert scalar a rank."""
    handles = create_folding_groups(build_folding_spec(world_size=2, pp_size=1, tp_size=2, ep_size=2))
    families = (GradientFamily.REPLICATED, GradientFamily.EXPERT)
    slices = [
        GradientSlice(torch.tensor([gradient]), ParameterInfo(index, family.value, family), shards=1)
        for index, family in enumerate(families)
    ]
    parameters = [piece.parameter for piece in slices]
    found = StatisticsPass(handles.spec, handles.stage_group, torch.device("cpu"), parameters, groups=1)(slices)
    return found.norm, found.zeros, found.is_finite


def test_one_dense_and_two_expert_scalars_have_norm_sqrt_3_and_three_zeros():
    assert run_on(2, one_scalar_each, 1.0) == [(pytest.approx(math.sqrt(3), rel=1e-15), 0, True)] * 2
    assert run_on(2, one_scalar_each, 0.0) == [(0.0, 3, True)] * 2
    assert [finite for _, _, finite in run_on(2, one_scalar_each, math.inf)] == [False, False]


def miscounted(case: Case, family: str):
    rule = FAMILY_RULES[GradientFamily(family)]
    FAMILY_RULES[GradientFamily(family)] = replace(rule, replicas=lambda spec: 1)
    try:
        return all_ones(case)[0]
    finally:
        FAMILY_RULES[GradientFamily(family)] = rule


@pytest.mark.parametrize("family", ["replicated", "partial", "tp_sharded", "expert"])
@pytest.mark.parametrize("zero", ZERO)
def test_norm_test_sees_a_wrong_replica_count(family, zero):
    case = Case("qwen3_moe", 4, 2, 1, zero, optimizer="SGD", samples=2, clip=3.0)
    right = math.sqrt(unique_elements("qwen3_moe"))
    assert abs(run_on(4, miscounted, case, family)[0] / right - 1) > 1e-5


def one_infinity(case: Case):
    """Only the last rank's expert holds an inf in the first step; the second step is healthy."""
    broken = [True]

    def gradient(name, family, parameter):
        value = torch.full_like(parameter, 0.01)
        if broken[0] and family is GradientFamily.EXPERT and dist.get_rank() == dist.get_world_size() - 1:
            value.view(-1)[0] = math.inf
        return value

    engine = injected_engine(case, gradient)
    before, scale = snapshot(engine), _scale(engine)
    one_step(engine)
    unchanged = all(torch.equal(before[name], value) for name, value in snapshot(engine).items())
    first = (unchanged, engine.was_step_applied(), engine.skipped_steps, _scale(engine) / scale)
    broken[0] = False
    one_step(engine)
    moved = any(not torch.equal(before[name], value) for name, value in snapshot(engine).items())
    second = (moved, engine.was_step_applied(), engine.skipped_steps)
    engine.destroy()
    return first, second


def _scale(engine) -> float:
    optimizer = engine.optimizer
    if hasattr(optimizer, "loss_scale_config"):
        return optimizer.loss_scale_config.cur_scale
    return optimizer.loss_scale if hasattr(optimizer, "loss_scale") else 1.0


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("zero", ZERO)
def test_one_infinite_gradient_makes_all_ranks_skip(zero, dtype):
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    # With DeepSpeed's own check off the norm alone must stop the step.
    bf16 = {"enabled": True, "check_grad_overflow": False}
    config = {"fp16": (("fp16", fp16),), "bf16": (("bf16", bf16),)}.get(dtype, ())
    case = Case("mixtral", 4, 2, 4, zero, optimizer="SGD", samples=2, clip=1.0, dtype=dtype, config=config)
    for first, second in run_on(4, one_infinity, case):
        assert first == (True, False, 1, 0.5 if dtype == "fp16" else 1.0)
        assert second == (True, True, 1)


def corrected_once(case: Case):
    """ZeRO-0: a second reduction of the same gradients must not correct them again; the next step's is corrected."""
    engine = injected_engine(case, lambda *_: 2.0 ** dist.get_rank())
    gradients = []
    for _ in range(2):
        one_backward(engine)
        raw = {info.name: p.grad.clone() for p, info in engine.autoep_families.items()}
        engine._reduce_whole_gradients()
        once = {info.name: p.grad.clone() for p, info in engine.autoep_families.items()}
        engine._reduce_whole_gradients()
        twice = {info.name: p.grad.clone() for p, info in engine.autoep_families.items()}
        gradients.append((raw, once, twice))
        engine.step()
    engine.destroy()
    same = all(torch.equal(once[name], twice[name]) for _, once, twice in gradients for name in once)
    changed = any(not torch.equal(raw[name], once[name]) for raw, once, _ in gradients for name in raw)
    again = all(torch.allclose(gradients[0][1][name], value) for name, value in gradients[1][1].items())
    return same, changed, again


def test_gradients_are_corrected_once_a_step():
    case = Case("qwen3_moe", 4, 2, 2, 0, optimizer="SGD", samples=2, clip=0.0)
    assert run_on(4, corrected_once, case) == [(True, True, True)] * 4


def stock_hooks(case: Case):
    engine = build_engine(case)
    hooked = [name for name, p in engine.module.named_parameters() if getattr(p, "_ds_grad_allreduce_registered", False)]
    stock = (engine._autoep_folding_spec, getattr(engine.optimizer, "autoep_folding_tp_group", None))
    engine.destroy()
    return hooked, stock


def test_stock_corrections_are_off():
    assert run_on(4, stock_hooks, Case("qwen3_moe", 4, 2, 2, 2)) == [([], (None, None))] * 4


def reduce_like_deepspeed():
    """Our per-parameter form against DeepSpeed's own, on real groups: results, return values, marker."""
    from deepspeed.module_inject import auto_ep_folding as stock

    handles = create_folding_groups(build_folding_spec(world_size=4, pp_size=1, tp_size=2, ep_size=2))
    theirs = stock.build_folding_spec(world_size=4, pp_size=1, tp_size=2, ep_size=2)
    wrong = []
    for dtype in (torch.float32, torch.bfloat16):
        for kind in ("plain", "router", "partial", "expert", "sharded"):
            outcomes = []
            for spec, reduce, apply in (
                (handles.spec, reduce_autoep_folding_gradient, apply_folding_correction_to_grad_buffer),
                (theirs, stock.reduce_autoep_folding_gradient, stock.apply_folding_correction_to_grad_buffer),
            ):
                parameter = torch.nn.Parameter(torch.zeros(2, 3))
                {
                    "router": mark_autoep_folding_router_parameter,
                    "partial": mark_autoep_folding_partial_router_parameter,
                    "expert": lambda p: setattr(p, "allreduce", False),
                    "sharded": lambda p: setattr(p, "tensor_model_parallel", True),
                }.get(kind, lambda p: None)(parameter)
                first = torch.full((2, 3), 2.0 ** dist.get_rank(), dtype=dtype)
                second = first.clone()
                names = [reduce(spec, parameter, first, tp_group=handles.tp_group)]
                names += [apply(spec, parameter, second, tp_group=handles.tp_group) for _ in range(2)]
                outcomes.append((names, first.tolist(), second.tolist()))
            if outcomes[0] != outcomes[1]:
                wrong.append((str(dtype), kind, outcomes))
    return wrong


def test_per_parameter_form_equals_deepspeeds():
    assert run_on(4, reduce_like_deepspeed) == [[]] * 4


def transposed_gradient():
    handles = create_folding_groups(build_folding_spec(world_size=4, pp_size=1, tp_size=2, ep_size=2))
    base = torch.arange(6.0).view(2, 3) * (1 + dist.get_rank())
    gradient = base.t()
    reduce_autoep_folding_gradient(handles.spec, torch.nn.Parameter(torch.zeros(3, 2)), gradient, tp_group=handles.tp_group)
    first = dist.get_rank() // 2 * 2
    right = torch.arange(6.0).view(2, 3).t() * ((1 + first) + (2 + first)) / 2
    return torch.allclose(gradient, right)


def test_per_parameter_form_takes_a_transposed_gradient():
    assert run_on(4, transposed_gradient) == [True] * 4


def forgotten_partial(case: Case):
    """A plan that forgets q_norm: the first step must say so, on every rank."""
    engine = build_engine(case)
    try:
        tokens = torch.arange(3, 12).view(1, 9)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    except RuntimeError as caught:
        return type(caught).__name__, str(caught)
    finally:
        engine.autoep.binding.restore()
    return "nothing", ""


PLACES = {
    "default": (),
    "bucket": (("tp_gradient_correction", "bucket"),),
    # Not averaged, but in the first step.
    "off": (("replicated_gradient_sync", "off"),),
    "verify": (("replicated_gradient_sync", "verify"),),
}


# Buckets under ZeRO-0 are refused: test_gradient_sync.py.
@pytest.mark.parametrize(("zero", "place"), [(zero, place) for zero in ZERO for place in PLACES if zero or place != "bucket"])
def test_a_partial_gradient_taken_for_replicated_is_an_error(zero, place):
    specs = [
        {"patterns": [r".*self_attn\.[qkv]_proj\.weight$"], "partition_type": "column"},
        {"patterns": [r".*self_attn\.o_proj\.weight$"], "partition_type": "row"},
    ]
    tensor = {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": specs}}
    case = Case("qwen3_moe", 4, 2, 2, zero, samples=2, config=(("tensor_parallel", tensor),), expert_config=PLACES[place])
    for name, message in run_on(4, forgotten_partial, case):
        assert name == "RankMismatchError"
        assert "q_norm" in message or "k_norm" in message


def bucket_sizes(limit: int):
    """One parameter a bucket or all in one: the same result."""
    handles = create_folding_groups(build_folding_spec(world_size=4, pp_size=1, tp_size=2, ep_size=2))
    families = [GradientFamily.REPLICATED, GradientFamily.EXPERT, GradientFamily.PARTIAL, GradientFamily.TP_SHARDED]
    infos = [ParameterInfo(i, f"p{i}", families[i % 4]) for i in range(8)]
    slices = [GradientSlice(torch.full((i + 1, 2), 2.0 ** dist.get_rank()), info, 1) for i, info in enumerate(infos)]
    reducer = TPGradientReducer(handles, infos, torch.device("cpu"), transfer_elements=limit)
    reducer.verify_next = False
    reducer.correct(slices)
    return [piece.gradient.flatten()[0].item() for piece in slices]


def test_reducer_result_does_not_depend_on_the_bucket_size():
    assert run_on(4, bucket_sizes, 1) == run_on(4, bucket_sizes, 10**6)
