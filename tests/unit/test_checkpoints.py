"""A run that is saved at one topology and goes on at another: losses and norms of the next steps are the uninterrupted run's."""

import functools
from dataclasses import replace

import pytest
import torch

from tests.unit.models import FAMILIES, make_model
from tests.unit.pool import run_on
from tests.unit.runs import SAVED_AFTER, STEPS, load_and_train, train_and_save
from tests.unit.training import Case, build_engine, reference_of, relative

# (world, tp, ep, etp, ZeRO stage)
TOPOLOGIES = [(2, 1, 2, 1, 0), (4, 2, 2, 1, 1), (4, 2, 1, 2, 2), (4, 4, 2, 1, 2), (8, 4, 2, 2, 1), (8, 2, 8, 1, 0)]
SAVED_FAMILIES = ["mixtral", "gpt_oss", "deepseek_v3"]


def at(family: str, topology: tuple[int, ...]) -> Case:
    world, tp, ep, etp, zero = topology
    return Case(family, world, tp, ep, zero, etp=etp, steps=STEPS, samples=8)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saves each case once: case -> its folder."""

    @functools.cache
    def save(case: Case) -> str:
        folder = str(tmp_path_factory.mktemp("saved"))
        run_on(case.world, train_and_save, case, folder)
        return folder

    return save


def check(curve, case: Case, first: int = SAVED_AFTER) -> None:
    right = reference_of(case)
    for (loss, norm), right_loss, right_norm in zip(curve, right.losses[first:], right.norms[first:], strict=True):
        assert relative(loss, right_loss) < 1e-5
        assert relative(norm, right_norm) < 1e-5


def pairs():
    for place, family in enumerate(SAVED_FAMILIES):
        for one, before in enumerate(TOPOLOGIES):
            for other, after in enumerate(TOPOLOGIES):
                always = (other - one) % len(TOPOLOGIES) == 1 + place  # each saved once and loaded once for each family
                yield pytest.param(at(family, before), at(family, after), marks=[] if always else pytest.mark.full, id=f"{family}-{before}-to-{after}")


@pytest.mark.parametrize("before, after", list(pairs()))
def test_a_run_goes_on_under_another_topology(before, after, saved):
    curve = run_on(after.world, load_and_train, after, saved(before))[0]
    check(curve, after)


BASE = at("mixtral", TOPOLOGIES[1])
BUCKETS = replace(BASE, world=2, tp=1, ep=1, zero=2, zero_config=(("reduce_bucket_size", 3000), ("round_robin_gradients", True)))


def test_other_buckets_and_order_of_gradients(saved):
    check(run_on(2, load_and_train, BUCKETS, saved(BASE))[0], BUCKETS)
    check(run_on(4, load_and_train, BASE, saved(BUCKETS))[0], BASE)


@pytest.mark.parametrize("optimizer", ["SGD"])
def test_other_optimizers(optimizer, saved):
    before, after = replace(BASE, optimizer=optimizer), replace(BASE, world=2, tp=1, ep=1, zero=0, optimizer=optimizer)
    check(run_on(2, load_and_train, after, saved(before))[0], after)


def largest_difference(curve, case: Case) -> float:
    """Of the losses after the save, relative to the uninterrupted run's."""
    return max(relative(loss, right) for (loss, _), right in zip(curve, reference_of(case).losses[SAVED_AFTER:], strict=True))


def test_without_its_optimizer_states_the_run_is_another(saved):
    """What the comparison above is worth: without moments it fails."""
    curve = run_on(4, load_and_train, BASE, saved(BASE), {"load_optimizer_states": False})[0]
    assert relative(curve[0][0], reference_of(BASE).losses[SAVED_AFTER]) < 1e-5  # the weights are there
    assert largest_difference(curve, BASE) > 1e-5


def forgotten_steps(entry, masters, families) -> None:
    for parameter, info in families.items():
        for state in entry.values[info.name]:
            masters.set_value(parameter, state, torch.tensor(0.0))


def load_with_fault(case: Case, folder: str, fault: str):
    """Load with one thing switched off."""
    import deepspeed_autoep.engine.checkpointing as checkpointing

    originals = checkpointing.publish_masters, checkpointing.restore_optimizer
    try:
        if fault == "publish":
            checkpointing.publish_masters = lambda optimizer: None
        else:
            checkpointing.restore_optimizer = forgotten_steps
        return load_and_train(case, folder)
    finally:
        checkpointing.publish_masters, checkpointing.restore_optimizer = originals


@pytest.mark.parametrize("fault", ["publish", "step counts"])
def test_a_fault_in_loading_shows(fault, saved):
    assert largest_difference(run_on(4, load_with_fault, BASE, saved(BASE), fault)[0], BASE) > 1e-5


# Dtypes

LOW = [("bf16", 1), ("bf16", 2), ("bf16", 0), ("fp16", 1), ("fp16", 0)]


@pytest.mark.parametrize("dtype, zero", LOW)
def test_a_low_precision_run_goes_on_bit_for_bit(dtype, zero, tmp_path):
    """At its own topology nothing is rounded: the curve is the uninterrupted one, and a dynamic loss scale goes on."""
    case = replace(BASE, dtype=dtype, zero=zero)
    first = run_on(4, train_and_save, case, str(tmp_path), True)[0]
    assert run_on(4, load_and_train, case, str(tmp_path))[0] == first[SAVED_AFTER:]


def everything(engine) -> dict[str, torch.Tensor]:
    """The whole model on every rank, and its masters."""
    import torch.distributed as dist

    import deepspeed_autoep

    state = [deepspeed_autoep.consolidated_state_dict(engine)]
    dist.broadcast_object_list(state, 0)
    return state[0]


def save_in(case: Case, folder: str):
    engine = build_engine(case)
    from tests.unit.runs import run_steps

    run_steps(engine, case, 0, 2)
    engine.save_checkpoint(folder)
    state = everything(engine)
    engine.destroy()
    return state


def load_in(case: Case, folder: str):
    engine = build_engine(case, make_model(case.family, seed=5))
    engine.load_checkpoint(folder)
    state = everything(engine)
    engine.destroy()
    return state


def test_a_bf16_run_is_saved_in_fp32_and_loads_in_either(tmp_path):
    """The stored weights are the masters: a bf16 engine rounds them to what it had, an fp32 engine has their 24 bits."""
    low = replace(BASE, dtype="bf16")
    before = run_on(4, save_in, low, str(tmp_path))[0]
    again = run_on(2, load_in, replace(low, world=2, tp=1, zero=2), str(tmp_path))[0]
    assert all(torch.equal(again[name], before[name]) for name in before)
    full = run_on(2, load_in, replace(BASE, world=2, tp=2, ep=1, zero=0), str(tmp_path))[0]
    trained = [name for name in before if before[name].dtype == torch.bfloat16]
    assert trained and all(torch.equal(full[name].bfloat16(), before[name]) for name in trained)
    assert any(not torch.equal(full[name], before[name].float()) for name in trained)


def test_an_fp32_run_loads_in_bf16(tmp_path):
    before = run_on(4, save_in, BASE, str(tmp_path))[0]
    low = run_on(4, load_in, replace(BASE, dtype="bf16", tp=4, ep=1), str(tmp_path))[0]
    assert all(torch.equal(low[name], before[name].bfloat16()) for name in before)


def test_families_are_there():
    assert set(SAVED_FAMILIES) <= set(FAMILIES)
