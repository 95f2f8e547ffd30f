"""Training loops as people write them: several backward passes a step, discarded ones, schedulers made beforehand."""

import pytest
import torch

from tests.unit.models import OPTIMIZERS, make_batches, make_model
from tests.unit.pool import run_on
from tests.unit.training import Case, build_engine, ds_config, finished_beside, my_share, parameter_error, relative

ACCUMULATE_FP32 = (("bf16", {"enabled": True}), ("data_types", {"grad_accum_dtype": "fp32"}))


def backward(engine, batch, case: Case) -> None:
    share = my_share(batch, case)
    engine.backward(engine(input_ids=share, labels=share).loss)


def loop(case: Case, kind: str) -> float:
    """Worst error of norms and final parameters against one process."""

    engine = build_engine(case)
    plain = make_model(case.family)
    stepper = torch.optim.SGD(plain.parameters(), **OPTIMIZERS["SGD"][1])
    batches, worst = make_batches(6, case.samples, case.length), 0.0
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        stepper.zero_grad()
        backward(engine, first, case)
        if kind == "discard":
            engine.zero_grad()
        else:
            plain(input_ids=first, labels=first).loss.backward()
        backward(engine, second, case)
        plain(input_ids=second, labels=second).loss.backward()
        engine.step()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), case.clip)
        stepper.step()
        worst = max(worst, relative(float(engine.get_global_grad_norm()), norm.item()))
    return finished_beside(engine, plain, worst)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_discarded_backward_leaves_nothing(zero):
    assert max(run_on(4, loop, Case(ep=4, zero=zero, optimizer="SGD"), "discard")) < 1e-5


def test_two_backwards_before_a_step_add_under_zero_0():
    assert max(run_on(4, loop, Case(ep=4, zero=0, optimizer="SGD"), "add")) < 1e-5


def lost(case: Case) -> tuple[str, str]:
    engine = build_engine(case)
    batch = make_batches(1, case.samples, case.length)[0]
    try:
        backward(engine, batch, case)
        backward(engine, batch, case)
    except Exception as caught:
        return type(caught).__name__, str(caught)
    finally:
        engine.autoep.binding.restore()
    return "nothing", ""


@pytest.mark.parametrize("zero", [1, 2])
def test_a_backward_that_would_be_lost_is_an_error(zero):
    for kind, message in run_on(4, lost, Case(ep=4, zero=zero)):
        assert kind == "UnsupportedError"
        assert "gradient_accumulation_steps=1" in message and "set_gradient_accumulation_boundary" in message


def discard_low_precision(case: Case) -> bool:
    """bf16 with fp32 accumulation keeps reduced gradients in a buffer of its own: a discarded pass must leave it, too."""
    norms = []
    for discard in (False, True):
        engine = build_engine(case)
        batches = make_batches(2, case.samples, case.length)
        if discard:
            backward(engine, batches[0], case)
            engine.zero_grad()
        backward(engine, batches[1], case)
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
        engine.destroy()
    return norms[0] == norms[1]


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_discarded_backward_leaves_nothing_in_fp32_accumulators(zero):
    assert run_on(4, discard_low_precision, Case(ep=4, zero=zero, config=ACCUMULATE_FP32)) == [True] * 4


def with_scheduler(case: Case, chained: bool) -> tuple[float, list[float]]:
    """Optimizer with two groups and a scheduler, both made on the model before initialize."""
    import deepspeed_autoep

    def make(model):
        decayed = [p for p in model.parameters() if p.dim() > 1]
        plain = [p for p in model.parameters() if p.dim() <= 1]
        stepper = torch.optim.AdamW([{"params": decayed, "lr": 2e-3}, {"params": plain, "weight_decay": 0.0}], lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(stepper, [lambda step: 0.5**step, lambda step: 0.9**step])
        return stepper, torch.optim.lr_scheduler.ChainedScheduler([schedule]) if chained else schedule

    model, reference = make_model(case.family), make_model(case.family)
    stepper, schedule = make(model)
    engine, *_ = deepspeed_autoep.initialize(model=model, optimizer=stepper, lr_scheduler=schedule, config=ds_config(case))
    right, right_schedule = make(reference)
    for batch in make_batches(case.steps, case.samples, case.length):
        backward(engine, batch, case)
        engine.step()
        right.zero_grad()
        reference(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), case.clip)
        right.step()
        right_schedule.step()
    state = deepspeed_autoep.consolidated_state_dict(engine)
    rates = sorted({group["lr"] for group in engine.optimizer.param_groups})
    engine.destroy()
    errors = [parameter_error(state[name], value) for name, value in reference.state_dict().items()] if state else [0.0]
    return max(errors), [rate - right for rate, right in zip(rates, sorted({g["lr"] for g in right.param_groups}), strict=True)]


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("zero", [0, 1])
def test_scheduler_made_before(zero, chained):
    for error, rates in run_on(4, with_scheduler, Case(ep=4, zero=zero), chained):
        assert error < 1e-4 and rates == pytest.approx([0.0, 0.0], abs=1e-12)


def client_optimizer(name: str) -> tuple[str, str]:
    import deepspeed_autoep

    model = make_model("mixtral")
    kind = getattr(torch.optim, name)
    try:
        deepspeed_autoep.initialize(model=model, optimizer=kind(model.parameters(), lr=1e-3), config=ds_config(Case(ep=4)))
    except Exception as caught:
        return type(caught).__name__, str(caught)
    return "nothing", ""


@pytest.mark.parametrize("name", ["Adagrad", "Adafactor"])
def test_client_optimizers_that_would_not_be_exact(name):
    for kind, message in run_on(4, client_optimizer, name):
        assert kind == "UnsupportedError" and name in message and "AdamW" in message


def torch_style(case: Case) -> float:
    """``loss.backward()`` instead of ``engine.backward(loss)``, with gradient accumulation and an auxiliary loss."""
    engine = build_engine(case)
    plain = make_model(case.family, aux=case.aux)
    dp, worst = case.world // case.tp, 0.0
    stepper = torch.optim.SGD(plain.parameters(), **OPTIMIZERS["SGD"][1])
    for batch in make_batches(case.steps, case.samples, case.length):
        stepper.zero_grad()
        for share in my_share(batch, case).chunk(2):
            engine(input_ids=share, labels=share).loss.backward()
            engine.step()
        for share in batch.chunk(2 * dp):
            (plain(input_ids=share, labels=share).loss / (2 * dp)).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), case.clip)
        stepper.step()
        worst = max(worst, relative(float(engine.get_global_grad_norm()), norm.item()))
    engine.destroy()
    return worst


@pytest.mark.parametrize("zero", [1, 2])
def test_torch_style_backward_with_accumulation(zero):
    case = Case(ep=4, zero=zero, optimizer="SGD", aux=True, config=(("gradient_accumulation_steps", 2),))
    assert max(run_on(4, torch_style, case)) < 1e-5
