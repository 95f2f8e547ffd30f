"""Runs that are saved and go on."""

from __future__ import annotations

from tests.unit.models import make_batches, make_model
from tests.unit.training import Case, build_engine, mean_over_data, my_share

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


def save_or_load(engine, case: Case, folder: str, load: bool, steps: int = SAVED_AFTER) -> None:
    """Load what is in ``folder``; or run the case's first ``steps`` and save there."""
    if load:
        engine.load_checkpoint(folder)
    else:
        run_steps(engine, case, 0, steps)
        engine.save_checkpoint(folder)


def train_and_save(case: Case, folder: str, to_the_end: bool = False, save_options: dict | None = None) -> list[tuple[float, float]]:
    engine = build_engine(case)
    curve = run_steps(engine, case, 0, SAVED_AFTER)
    assert engine.save_checkpoint(folder, client_state={"seen": 7}, **(save_options or {})) is True
    if to_the_end:
        curve += run_steps(engine, case, SAVED_AFTER, STEPS)
    engine.destroy()
    return curve


def load_and_train(case: Case, folder: str, load_options: dict | None = None) -> list[tuple[float, float]]:
    """Into a model of other weights."""
    engine = build_engine(case, make_model(case.family, seed=5, **dict(case.overrides)))
    path, client_state = engine.load_checkpoint(folder, **(load_options or {}))
    assert path.endswith(f"global_step{SAVED_AFTER}") and client_state == {"seen": 7}
    assert engine.global_steps == SAVED_AFTER
    curve = run_steps(engine, case, SAVED_AFTER, STEPS)
    engine.destroy()
    return curve
