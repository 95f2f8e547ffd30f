"""Saves that are written beside the training."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from deepspeed_autoep.checkpoint import planner, save
from tests.unit.pool import run_on
from tests.unit.runs import SAVED_AFTER, STEPS, load_and_train, run_steps
from tests.unit.training import Case, build_engine

SMALL = Case("mixtral", 2, 1, 2, 2, steps=STEPS, samples=8)


def saves_beside(case: Case, folder: str):
    """Steps go on while the save is held up; it holds the state at its call. A second save waits for the first."""
    engine = build_engine(case)
    curve = run_steps(engine, case, 0, SAVED_AFTER)
    gate, original = threading.Event(), save._write_tensors

    def held_up(job, path, group):
        gate.wait(60)
        return original(job, path, group)

    save._write_tensors = held_up
    try:
        engine.save_checkpoint(folder, client_state={"seen": 7}, asynchronous=True)
        curve += run_steps(engine, case, SAVED_AFTER, STEPS)
        unfinished = not (Path(folder) / "latest").exists()
        gate.set()
        engine.save_checkpoint(folder, tag="second", save_latest=False, asynchronous=True)
        first_is_there = (Path(folder) / "latest").exists()
        engine.destroy()  # waits
        second_is_there = (Path(folder) / "second" / "checkpoint.json").exists()
    finally:
        save._write_tensors = original
    return curve, unfinished, first_is_there, second_is_there


@pytest.mark.parametrize("zero", [0, 2])
def test_an_asynchronous_save(zero, tmp_path):
    case = replace(SMALL, zero=zero)
    curve, unfinished, first_is_there, second_is_there = run_on(2, saves_beside, case, str(tmp_path))[0]
    assert unfinished and first_is_there and second_is_there
    assert run_on(2, load_and_train, case, str(tmp_path))[0] == curve[SAVED_AFTER:]


def fails_beside(case: Case, folder: str) -> list[str]:
    """The save of rank 1 fails; every rank raises in the same step."""
    case = replace(case, expert_config=(("async_checkpoint", True),))
    engine = build_engine(case)
    run_steps(engine, case, 0, 1)
    original = planner.PieceSavePlanner.resolve_data

    def resolve(self, item):
        if dist.get_rank() == 1:
            raise OSError(28, "No space left on device")
        return original(self, item)

    planner.PieceSavePlanner.resolve_data = resolve
    messages = []
    try:
        engine.save_checkpoint(folder)
        for step in range(200):
            try:
                run_steps(engine, case, 1, 2)
            except Exception as error:
                messages.append(f"{step} {error}")
                break
    finally:
        planner.PieceSavePlanner.resolve_data = original
    run_steps(engine, case, 2, 3)  # the engine goes on
    engine.save_checkpoint(folder, asynchronous=False)
    engine.destroy()
    return messages


def test_a_failed_asynchronous_save_is_raised_by_a_step_on_every_rank(tmp_path):
    messages = run_on(2, fails_beside, SMALL, str(tmp_path))
    assert all("No space left" in message and "rank 1" in message for (message,) in messages), messages
    assert len({message.split()[0] for (message,) in messages}) == 1
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def two_engines(case: Case, folder: str) -> list[str]:
    """One saves in its thread, held up on one rank, while the other saves and loads."""
    first, second = build_engine(case), build_engine(case)
    run_steps(first, case, 0, 1)
    run_steps(second, case, 0, 1)
    original = save._write_tensors

    def held_up(job, path, group):
        if job.tag == "first" and dist.get_rank() == 1:
            threading.Event().wait(2)
        return original(job, path, group)

    save._write_tensors = held_up
    try:
        first.save_checkpoint(folder, tag="first", asynchronous=True)
        second.save_checkpoint(folder, tag="second")
        second.load_checkpoint(folder, tag="second")
        first.save_checkpoint(folder, tag="third", asynchronous=True)
        first.wait_for_checkpoint()
        assert (Path(folder) / "third" / "checkpoint.json").exists()
    finally:
        save._write_tensors = original
    first.destroy()
    second.destroy()
    return sorted(path.name for path in Path(folder).iterdir())


def test_two_engines_do_not_meet(tmp_path):
    assert run_on(2, two_engines, SMALL, str(tmp_path))[0] == ["first", "latest", "second", "third"]


def unstaged(case: Case, folder: str) -> list[str]:
    """One rank has no memory for the copy."""
    engine = build_engine(case)
    original, messages = save.SaveJob.staged, []

    def staged(self):
        if dist.get_rank() == 1:
            raise MemoryError("no memory")
        return original(self)

    save.SaveJob.staged = staged
    try:
        engine.save_checkpoint(folder, asynchronous=True)
    except Exception as error:
        messages.append(str(error))
    finally:
        save.SaveJob.staged = original
    run_steps(engine, case, 0, 1)
    engine.save_checkpoint(folder, tag="later", asynchronous=True)
    engine.destroy()
    return messages


def test_a_copy_that_fails_is_raised_on_every_rank(tmp_path):
    assert all("no memory" in message for (message,) in run_on(2, unstaged, SMALL, str(tmp_path)))
    assert (tmp_path / "later" / "checkpoint.json").exists()


def ends_without_a_step(case: Case, folder: str) -> list[str]:
    import logging

    engine, records = build_engine(case), []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("deepspeed_autoep").addHandler(handler)
    original = planner.PieceSavePlanner.resolve_data
    planner.PieceSavePlanner.resolve_data = lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error"))
    try:
        engine.save_checkpoint(folder, asynchronous=True)
        engine.autoep_saver._pending.exception(60)
    finally:
        planner.PieceSavePlanner.resolve_data = original
        logging.getLogger("deepspeed_autoep").removeHandler(handler)
    try:
        engine.destroy()
    except Exception as error:
        records.append(f"destroy: {error}")
    return records


def test_a_failure_is_logged_at_once(tmp_path):
    for records in run_on(2, ends_without_a_step, SMALL, str(tmp_path)):
        assert any("asynchronous save failed" in record and "Input/output error" in record for record in records)
        assert records[-1].startswith("destroy: ")
