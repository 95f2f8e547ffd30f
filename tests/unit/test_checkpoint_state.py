"""What is beside the tensors: schedules, options, step counts, counters, random states, accumulation."""

import random
from dataclasses import replace

import numpy
import pytest
import torch
import torch.distributed as dist

from tests.unit.models import make_batches, make_model
from tests.unit.pool import run_on
from tests.unit.runs import SAVED_AFTER, STEPS, run_steps, save_or_load
from tests.unit.training import Case, build_engine, ds_config, my_share, relative

CASE = Case("mixtral", 4, 2, 2, 1, steps=STEPS, samples=8)
SMALL = replace(CASE, world=2, tp=1, ep=2, zero=2)


def scheduled_anew(case: Case, folder: str, load: bool, options: dict):
    """A schedule that goes on from the last rate; the optimizer of the loading engine has stepped before."""
    import deepspeed_autoep

    model = make_model(case.family, seed=5 if load else 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    engine, *_ = deepspeed_autoep.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=ds_config(case))
    run_steps(engine, case, 0, 1 if load else 3)
    if load:
        engine.load_checkpoint(folder, **options)
        states = len(engine.basic_optimizer.state)
    else:
        engine.save_checkpoint(folder, exclude_optimizer_states=options.get("exclude", False))
        states = 0
    rates = []
    for step in range(3, 5):
        rates.append(engine.get_lr()[0])
        run_steps(engine, case, step, step + 1)
    engine.destroy()
    return rates, states


@pytest.mark.parametrize("excluded", [True, False])
def test_schedules_go_on_without_optimizer_states(excluded, tmp_path):
    """Left out by the save, or by the load, which leaves the engine's own states."""
    right, _ = run_on(2, scheduled_anew, SMALL, str(tmp_path), False, {"exclude": excluded})[0]
    options = {} if excluded else {"load_optimizer_states": False}
    rates, states = run_on(2, scheduled_anew, SMALL, str(tmp_path), True, options)[0]
    assert rates == pytest.approx(right, rel=1e-12)
    assert states == 0 if excluded else states > 0


def other_schedule(case: Case, folder: str, options: dict) -> str:
    import deepspeed_autoep
    from deepspeed_autoep.errors import CheckpointError

    model = make_model(case.family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    engine, *_ = deepspeed_autoep.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=ds_config(case))
    try:
        engine.load_checkpoint(folder, **options)
        return f"loaded {engine.lr_scheduler.last_epoch}"
    except CheckpointError as error:
        return str(error)
    finally:
        engine.destroy()


def test_another_schedule_is_refused(tmp_path):
    run_on(2, scheduled_anew, SMALL, str(tmp_path), False, {})
    for message in run_on(2, other_schedule, SMALL, str(tmp_path), {}):
        assert "'CosineAnnealingLR'" in message and "'StepLR'" in message and "load_lr_scheduler_states=False" in message
    assert run_on(2, other_schedule, SMALL, str(tmp_path), {"load_lr_scheduler_states": False}) == ["loaded 0"] * 2


def accumulating(case: Case, folder: str, load: bool, accumulation: int):
    """Three steps before the save, so that no multiple of the other accumulation; two after it."""
    import deepspeed_autoep
    from tests.unit.models import OPTIMIZERS

    model = make_model(case.family, seed=5 if load else 0)
    kind, options = OPTIMIZERS[case.optimizer]
    config = ds_config(case) | {
        "train_micro_batch_size_per_gpu": case.samples // (case.world // case.tp) // accumulation,
        "gradient_accumulation_steps": accumulation,
    }
    engine, *_ = deepspeed_autoep.initialize(model=model, optimizer=kind(model.parameters(), **options), config=config)

    def step(batch) -> float:
        for share in my_share(batch, case).chunk(accumulation):
            engine.backward(engine(input_ids=share, labels=share).loss)
            engine.step()
        return float(engine.get_global_grad_norm())

    batches = make_batches(case.steps, case.samples, case.length)
    norms = [] if load else [step(batch) for batch in batches[:3]]
    if load:
        engine.load_checkpoint(folder)
    else:
        engine.save_checkpoint(folder)
    norms += [step(batch) for batch in batches[3:]]
    steps = engine.global_steps
    engine.destroy()
    return norms, steps


@pytest.mark.parametrize("before, after", [(1, 2), (4, 2), (2, 1)])
def test_another_accumulation(before, after, tmp_path):
    norms, steps = run_on(2, accumulating, SMALL, str(tmp_path), False, before)[0]
    other, other_steps = run_on(1, accumulating, replace(SMALL, world=1, ep=1, zero=1), str(tmp_path), True, after)[0]
    assert steps == other_steps == STEPS
    assert all(relative(mine, right) < 1e-5 for mine, right in zip(other, norms[3:], strict=True))


def schedule_and_groups(case: Case, folder: str, load: bool):
    """A scheduler, two groups of the user's own with options that change while training, and a buffer."""
    import deepspeed_autoep

    model = make_model(case.family, seed=5 if load else 0)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}], lr=1e-3)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)],
        milestones=[3],
    )
    engine, *_ = deepspeed_autoep.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=ds_config(case))
    save_or_load(engine, case, folder, load)
    curve = run_steps(engine, case, SAVED_AFTER, STEPS)
    rates = sorted({(group["autoep_origin"], group["lr"], group["weight_decay"]) for group in engine.basic_optimizer.param_groups})
    engine.destroy()
    return curve, rates


def test_schedules_and_groups_go_on_under_another_topology(tmp_path):
    """The optimizer has other groups there: of each of the user's, other parts."""
    curve, rates = run_on(4, schedule_and_groups, CASE, str(tmp_path), False)[0]
    other, other_rates = run_on(2, schedule_and_groups, replace(CASE, world=2, tp=1, ep=1, zero=0), str(tmp_path), True)[0]
    assert len(rates) == 2 and rates == other_rates
    for mine, right in zip(other, curve, strict=True):
        assert relative(mine[0], right[0]) < 1e-5 and relative(mine[1], right[1]) < 1e-5


def dropped(case: Case, folder: str, load: bool):
    """With dropout: the curve after the save."""
    engine = build_engine(case, make_model(case.family, seed=5 if load else 0, attention_dropout=0.3))
    torch.manual_seed(100 + dist.get_rank() // case.tp + (50 if load else 0))
    random.seed(load)
    numpy.random.seed(int(load))
    save_or_load(engine, case, folder, load)
    curve = run_steps(engine, case, SAVED_AFTER, STEPS)
    engine.destroy()
    return curve, random.random(), numpy.random.rand()


def test_random_states_go_on(tmp_path):
    """Bit for bit at the same topology."""
    case = replace(CASE, world=2, tp=1, ep=2)
    before = run_on(2, dropped, case, str(tmp_path), False)
    assert run_on(2, dropped, case, str(tmp_path), True) == before


def random_numbers(case: Case, folder: str, load: bool) -> float:
    engine = build_engine(case)
    torch.manual_seed(1000 * load + dist.get_rank() // case.tp)
    if load:
        engine.load_checkpoint(folder)
    else:
        engine.save_checkpoint(folder)
    engine.destroy()
    return torch.rand(()).item()


def test_random_states_of_other_topologies(tmp_path):
    """Those of the same data-parallel index where there are as many; else the process's own."""
    before = run_on(4, random_numbers, replace(CASE, tp=2), str(tmp_path), False)
    assert before[0] == before[1] != before[2] == before[3]
    assert run_on(2, random_numbers, replace(CASE, world=2, tp=1), str(tmp_path), True) == before[::2]
    after = run_on(4, random_numbers, replace(CASE, tp=1, ep=4), str(tmp_path), True)
    assert len(set(after)) == 4 and not set(after) & set(before)


ADAMW = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


def configured(case: Case, folder: str, load: bool, torch_adam: bool):
    """The optimizer and a schedule of the configuration: torch's AdamW or DeepSpeed's FusedAdam, and its WarmupLR."""
    import deepspeed_autoep
    from tests.unit.training import allow_fp16_on_cpu

    if case.dtype == "fp16":
        allow_fp16_on_cpu()
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 4, "warmup_type": "linear"}}
    config = ds_config(case) | {"optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": torch_adam}}, "scheduler": scheduler}
    engine, *_ = deepspeed_autoep.initialize(model=make_model(case.family, seed=5 if load else 0), config=config)
    save_or_load(engine, case, folder, load)
    curve = run_steps(engine, case, SAVED_AFTER, STEPS)
    kind, rate = type(engine.basic_optimizer).__name__, engine.get_lr()[0]
    engine.destroy()
    return curve, kind, rate


@pytest.mark.parametrize("dtype, zero", [("fp32", 0), ("fp32", 2), ("fp16", 0), ("bf16", 0)])
@pytest.mark.parametrize("torch_adam", [True, False], ids=["torch", "fused"])
def test_optimizers_and_schedules_of_the_configuration(torch_adam, dtype, zero, tmp_path):
    case = replace(CASE, dtype=dtype, zero=zero)
    before, kind, rate = run_on(4, configured, case, str(tmp_path), False, torch_adam)[0]
    assert kind == ("AdamW" if torch_adam else "FusedAdam")
    if dtype != "fp32":
        assert run_on(4, configured, case, str(tmp_path), True, torch_adam)[0] == (before, kind, rate)
        return
    after, _, other_rate = run_on(2, configured, replace(case, world=2, tp=1, ep=1, zero=1), str(tmp_path), True, torch_adam)[0]
    assert rate == other_rate
    for mine, right in zip(after, before, strict=True):
        assert relative(mine[0], right[0]) < 1e-5 and relative(mine[1], right[1]) < 1e-5
