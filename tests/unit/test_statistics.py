"""Gradient statistics of the engine against one plain process, and the one collective that they cost."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed_autoep.folding import GradientFamily, build_folding_spec
from deepspeed_autoep.gradients import norms
from deepspeed_autoep.gradients.norms import GradientStatistics
from tests.unit.injection import injected_engine, one_step, stage_gradient
from tests.unit.models import make_batches, make_model
from tests.unit.pool import run_on
from tests.unit.training import Case, allow_fp16_on_cpu, ds_config, my_share, relative

PARAMETER_NORM = (("parameter_norm", True),)


def grouped_optimizer(model):
    """Decayed matrices, undecayed vectors, and the experts' first layer with a learning rate of its own."""
    own = [p for name, p in model.named_parameters() if "layers.0.mlp.experts" in name]
    rest = [p for p in model.parameters() if all(p is not mine for mine in own)]
    groups = [
        {"params": [p for p in rest if p.dim() > 1]},
        {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
        {"params": own, "lr": 1e-4},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)


def train_with_statistics(case: Case):
    """[(statistics, statistics of one process)] of each step. Both count elements as the whole model has them."""
    import deepspeed_autoep

    model, plain = make_model(case.family), make_model(case.family)
    engine, *_ = deepspeed_autoep.initialize(model=model, optimizer=grouped_optimizer(model), config=ds_config(case))
    family_of = {info.name: info.family.value for info in engine.autoep_families.values()}
    stepper = grouped_optimizer(plain)
    before = engine.get_gradient_statistics()
    results = []
    for batch in make_batches(case.steps, case.samples, case.length):
        share = my_share(batch, case)
        engine.backward(engine(input_ids=share, labels=share).loss)
        engine.step()

        stepper.zero_grad()
        plain(input_ids=batch, labels=batch).loss.backward()

        def norm(tensors):
            return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors))

        named = list(plain.named_parameters())
        right = {
            "norm": norm(p.grad for _, p in named),
            "families": {kind: norm(p.grad for name, p in named if family_of[name] == kind) for kind in set(family_of.values())},
            "groups": [norm(p.grad for p in group["params"]) for group in stepper.param_groups],
            "parameters": norm(p.detach() for _, p in named),
            "zeros": sum((p.grad == 0).sum().item() for _, p in named),
        }
        results.append((engine.get_gradient_statistics(), right))
        torch.nn.utils.clip_grad_norm_(plain.parameters(), case.clip)
        stepper.step()
    engine.destroy()
    return before, results


TOPOLOGIES = [(4, 2, 1), (4, 2, 4), (4, 4, 2), (8, 2, 4), (2, 1, 2)]


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize(("world", "tp", "ep"), TOPOLOGIES)
def test_statistics_equal_those_of_one_process(world, tp, ep, zero):
    case = Case("qwen3_moe", world, tp, ep, zero, steps=3, expert_config=PARAMETER_NORM)
    everyone = run_on(world, train_with_statistics, case)
    for before, results in everyone:
        assert before is None
        for found, right in results:
            assert relative(found.norm, right["norm"]) < 1e-5
            assert found.family_norms.keys() == right["families"].keys()
            assert all(relative(found.family_norms[kind], value) < 1e-5 for kind, value in right["families"].items())
            assert len(found.group_norms) == len(right["groups"]) == 3
            assert all(relative(*pair) < 1e-5 for pair in zip(found.group_norms, right["groups"], strict=True))
            assert relative(found.parameter_norm, right["parameters"]) < 1e-5
            assert found.zeros == right["zeros"] > 0
            assert found.is_finite
    assert all(found == everyone[0][1][step][0] for _, results in everyone for step, (found, _) in enumerate(results))


def half_statistics(case: Case, value: float):
    """Statistics where every element of the whole model's gradient is ``value``, beside what they must be."""
    if case.dtype == "fp16":
        allow_fp16_on_cpu()
    spec = build_folding_spec(world_size=case.world, pp_size=1, tp_size=case.tp, ep_size=case.ep)
    engine = injected_engine(case, lambda name, family, _: stage_gradient(value, family, spec))
    one_step(engine)
    found = engine.get_gradient_statistics()
    reported = float(engine.get_global_grad_norm())
    engine.destroy()
    return found, reported


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_statistics_in_low_precision(dtype, zero):
    """Without the loss scale, of the fp32 masters; norm, groups and families of a constant gradient."""
    case = Case("qwen3_moe", 4, 2, 4, zero, "SGD", samples=2, dtype=dtype, expert_config=PARAMETER_NORM)
    model = make_model("qwen3_moe")
    elements = sum(p.numel() for p in model.parameters())
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    parameters = math.sqrt(sum(p.detach().to(half).double().square().sum().item() for p in model.parameters()))
    for found, reported in run_on(4, half_statistics, case, 0.5):
        assert found.norm == pytest.approx(0.5 * math.sqrt(elements), rel=1e-6) == pytest.approx(reported, rel=1e-6)
        assert found.group_norms == (pytest.approx(found.norm, rel=1e-6),)
        assert math.hypot(*found.family_norms.values()) == pytest.approx(found.norm, rel=1e-6)
        assert found.parameter_norm == pytest.approx(parameters, rel=1e-5)
        assert found.zeros == 0
    for found, _ in run_on(4, half_statistics, case, 0.0):
        assert (found.norm, found.zeros) == (0.0, elements)


def one_bad_value(case: Case):
    def gradient(name, family, parameter):
        value = torch.full_like(parameter, 0.01)
        if family is GradientFamily.EXPERT and dist.get_rank() == 1:
            value.view(-1)[5] = math.nan
        return value

    engine = injected_engine(case, gradient)
    one_step(engine)
    found = engine.get_gradient_statistics()
    engine.destroy()
    return found.is_finite, math.isfinite(found.norm), {k: math.isfinite(v) for k, v in found.family_norms.items()}


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_bad_family_does_not_hide_the_others(zero):
    case = Case("qwen3_moe", 4, 2, 4, zero, "SGD", samples=2)
    for finite, norm, families in run_on(4, one_bad_value, case):
        assert not finite and not norm
        assert families == {"expert": False, "replicated": True, "partial": True, "tp_sharded": True}


def count_stage_collectives(case: Case):
    """Elements of the collectives over the stage in a step after the first."""
    engine = injected_engine(case, lambda *_: 1.0)
    one_step(engine)
    found, real = [], dist.all_reduce

    def spy(tensor, *arguments, group=None, **options):
        if group is engine.autoep.handles.stage_group:
            found.append(tensor.numel())
        return real(tensor, *arguments, group=group, **options)

    with mock.patch.object(norms.dist, "all_reduce", spy):
        one_step(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_all_statistics_cost_one_small_collective(dtype, zero):
    case = Case("qwen3_moe", 4, 2, 4, zero, "SGD", samples=2, dtype=dtype, expert_config=PARAMETER_NORM)
    # all, four families, one group; zeros, non-finite, parameters
    assert run_on(4, count_stage_collectives, case) == [[9]] * 4


def monitored(case: Case):
    engine = injected_engine(case, lambda *_: 1.0)
    one_step(engine)
    one_step(engine)
    found = engine.get_gradient_statistics()
    engine.destroy()
    return found


def test_the_monitor_gets_the_statistics(tmp_path):
    monitor = ("csv_monitor", {"enabled": True, "output_path": str(tmp_path), "job_name": "run"})
    case = Case("qwen3_moe", 4, 2, 4, 1, "SGD", samples=2, expert_config=PARAMETER_NORM, config=(monitor,))
    found = run_on(4, monitored, case)[0]
    written = {path.stem.removeprefix("Train_Samples_"): path.read_text().split() for path in (tmp_path / "run").iterdir()}
    expected = {"gradient_norm": found.norm, "gradient_zeros": found.zeros, "parameter_norm": found.parameter_norm}
    expected |= {f"gradient_norm_{family}": norm for family, norm in found.family_norms.items()}
    expected["gradient_norm_group0"] = found.group_norms[0]
    for name, value in expected.items():
        header, first, second = written[name]
        assert header == f"step,{name}" and first.split(",")[0] == "2"
        assert second == f"4,{value}"


STATISTICS = GradientStatistics(4.0, {"expert": 4.0}, (4.0,), 3, 8.0, True)


@pytest.mark.parametrize(("max_norm", "norm", "factor"), [(1.0, 4.0, 1 / (4 + 1e-6)), (5.0, 4.0, 1.0), (0.0, 4.0, 1.0), (1.0, 0.0, 1.0)])
def test_clip_factor(max_norm, norm, factor):
    assert GradientStatistics(norm, {}, (), 0, None, True).clip_factor(max_norm) == pytest.approx(factor, rel=1e-12)


def test_the_loss_scale_leaves_counts_and_parameters_alone():
    assert STATISTICS.unscaled(2.0) == GradientStatistics(2.0, {"expert": 2.0}, (2.0,), 3, 8.0, True)
