"""A run that is saved at one topology and goes on at another: losses and norms of the next steps are the uninterrupted run's."""


import pytest

from tests.unit.models import make_batches
from tests.unit.pool import run_on
from tests.unit.training import Case, build_engine, mean_over_data, my_share, reference_of, relative

SAVED_AFTER, STEPS = 2, 5


def run_steps(engine, case: Case, first: int, last: int) -> list[tuple[float, float]]:
    """(loss, gradient norm) of steps [first, last) of the case's run."""
    curve = []
    for batch in make_batches(case.steps, case.samples, case.length)[first:last]:
        share = my_share(batch, case)
        loss = engine(input_ids=share, labels=share).loss
        engine.backward(loss)
        engine.step()
        curve.append((mean_over_data(loss, engine), float(engine.get_global_grad_norm())))
    return curve


def train_and_save(case: Case, folder: str) -> list[tuple[float, float]]:
    engine = build_engine(case)
    curve = run_steps(engine, case, 0, SAVED_AFTER)
    assert engine.save_checkpoint(folder, client_state={"seen": 7}) is True
    engine.destroy()
    return curve


def load_and_train(case: Case, folder: str) -> list[tuple[float, float]]:
    from tests.unit.models import make_model

    engine = build_engine(case, make_model(case.family, seed=5, **dict(case.overrides)))
    path, client_state = engine.load_checkpoint(folder)
    assert path.endswith(f"global_step{SAVED_AFTER}") and client_state == {"seen": 7}
    assert engine.global_steps == SAVED_AFTER
    curve = run_steps(engine, case, SAVED_AFTER, STEPS)
    engine.destroy()
    return curve


def check(curve, case: Case, first: int) -> None:
    right = reference_of(case)
    for (loss, norm), right_loss, right_norm in zip(curve, right.losses[first:], right.norms[first:], strict=True):
        assert relative(loss, right_loss) < 1e-5
        assert relative(norm, right_norm) < 1e-5


def at(family: str, world: int, tp: int, ep: int, etp: int, zero: int) -> Case:
    return Case(family, world, tp, ep, zero, etp=etp, steps=STEPS, samples=8)


PAIRS = [
    (at("mixtral", 4, 2, 2, 1, 1), at("mixtral", 2, 1, 2, 1, 2)),
    (at("gpt_oss", 4, 2, 2, 2, 1), at("gpt_oss", 4, 1, 4, 1, 0)),
    (at("deepseek_v3", 4, 1, 2, 2, 0), at("deepseek_v3", 4, 4, 2, 1, 2)),
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]}-to-{pair[1]}")
def test_a_run_goes_on_under_another_topology(pair, tmp_path):
    saved, loaded = pair
    right = reference_of(saved)
    assert right.losses
    run_on(saved.world, train_and_save, saved, str(tmp_path))
    check(run_on(loaded.world, load_and_train, loaded, str(tmp_path))[0], loaded, SAVED_AFTER)
