"""Saves that die, at every kind of moment: the last good checkpoint is always there, whole, and named by ``latest``."""

import errno
import os
import random
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed_autoep.checkpoint import folders, save
from deepspeed_autoep.checkpoint.metadata import Manifest, TensorEntry, Topology
from deepspeed_autoep.checkpoint.reader import CheckpointReader
from deepspeed_autoep.checkpoint.save import SaveJob, write_checkpoint
from deepspeed_autoep.checkpoint.tensors import Piece
from deepspeed_autoep.errors import CheckpointError
from tests.unit.pool import WorkerError, WorkerPool, run_on

WORLD, TENSORS, COLUMNS = 2, 6, 40_000
FILE_EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")


def job(folder: str, tag: str, value: float, expected=None) -> SaveJob:
    """A few tensors full of ``value``; each rank has a row of each."""
    rank = dist.get_rank()
    keys = [f"model.{index}" for index in range(TENSORS)]
    row = ((rank, rank + 1), (0, COLUMNS))
    return SaveJob(
        Path(folder),
        tag,
        True,
        [Piece(key, (WORLD, COLUMNS), row, torch.full((1, COLUMNS), value)) for key in keys],
        dict.fromkeys(expected or keys, ((WORLD, COLUMNS), torch.float32)),
        {f"rng.{rank}": b"state"},
        {"training_state.pt": b"a" * 1000} if rank == 0 else {},
        Manifest(
            created="",
            libraries={},
            model="",
            topology=Topology(world_size=WORLD, tp=1, ep=1, etp=1, zero_stage=0),
            counters={},
            tensors={
                str(index): TensorEntry(shape=(WORLD, COLUMNS), dtype="float32", model_dtype="float32", kind="parameter", trained=True)
                for index in range(TENSORS)
            },
            optimizer=None,
            loss_scale=None,
            random_states=True,
        ),
    )


_GROUPS: dict = {}


def checkpoint_group():
    """Of this process's world, once."""
    if dist.group.WORLD not in _GROUPS:
        _GROUPS[dist.group.WORLD] = dist.new_group(backend="gloo")
    return _GROUPS[dist.group.WORLD]


def count_events(folder: str, at_moment) -> None:
    """Call ``at_moment()`` at every file operation under ``folder``, and at every write of the tensors' files."""

    def hook(event: str, arguments) -> None:
        if event in FILE_EVENTS and str(arguments[0]).startswith(folder):
            at_moment()

    sys.addaudithook(hook)
    original = save._HashedStream.write

    def write(self, data):
        at_moment()
        return original(self, data)

    save._HashedStream.write = write


def save_twice(folder: str, second_tag: str, dying: tuple[int, ...], moment: int) -> int:
    """A good save, then one in which the ranks in ``dying`` are killed at their file operation number ``moment``.
    Returns the number of operations of the second save."""
    write_checkpoint(job(folder, "good", 1.0), checkpoint_group())
    seen = 0

    def at_moment() -> None:
        nonlocal seen
        seen += 1
        if dist.get_rank() in dying and seen == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    count_events(folder, at_moment)
    write_checkpoint(job(folder, second_tag, 2.0), checkpoint_group())
    return seen


def stored_value(folder: Path) -> float:
    """What ``latest`` names, verified: the one value of all elements."""
    reader = CheckpointReader(folder)
    assert len(list(reader.verify())) == len(reader.manifest.files)
    values = {value for name in reader.tensors() for value in reader.read(name).unique().tolist()}
    assert len(values) == 1, values
    return values.pop()


def in_fresh_pool(function, *arguments) -> list:
    pool = WorkerPool(WORLD)
    try:
        return pool.run(function, *arguments, timeout=60)
    finally:
        pool.close()


RANKS = {"rank 0": (0,), "rank 1": (1,), "all": (0, 1)}


@pytest.mark.parametrize("second_tag", ["good", "next"])
@pytest.mark.parametrize("who", RANKS)
def test_a_killed_save_loses_nothing(who, second_tag, tmp_path):
    """24 moments: four of each."""
    counts = in_fresh_pool(save_twice, str(tmp_path / "whole"), second_tag, (), 0)
    assert stored_value(tmp_path / "whole") == 2.0
    total = min(counts[rank] for rank in RANKS[who])
    assert total > 20 or who == "rank 1"
    generator = random.Random(f"{who} {second_tag}")
    moments = [total, *generator.sample(range(1, total), 3)]
    outcomes = []
    for moment in moments:
        folder = tmp_path / f"killed{moment}"
        with pytest.raises(WorkerError):
            in_fresh_pool(save_twice, str(folder), second_tag, RANKS[who], moment)
        outcomes.append(stored_value(folder))
    assert outcomes[1:].count(1.0), outcomes  # the old one where it died early enough
    assert set(outcomes) <= {1.0, 2.0}


@pytest.mark.full
@pytest.mark.parametrize("second_tag", ["good", "next"])
def test_rank_0_killed_at_every_moment(second_tag, tmp_path):
    (total, _) = in_fresh_pool(save_twice, str(tmp_path / "whole"), second_tag, (), 0)
    outcomes = []
    for moment in range(1, total + 1):
        folder = tmp_path / f"killed{moment}"
        with pytest.raises(WorkerError):
            in_fresh_pool(save_twice, str(folder), second_tag, (0,), moment)
        outcomes.append(stored_value(folder))
    assert sorted(outcomes) == outcomes and set(outcomes) == {1.0, 2.0}


def save_after_crash(folder: str, tag: str) -> None:
    write_checkpoint(job(folder, tag, 3.0), checkpoint_group())


@pytest.mark.parametrize("moment_from_end", [0, 1, 2, 3, 4, 5, 6, 8, 12])
def test_the_next_save_mends_what_a_crash_left(moment_from_end, tmp_path):
    """Near the end are the renames: between them the tag has no folder of its own name."""
    (total, _) = in_fresh_pool(save_twice, str(tmp_path / "whole"), "good", (), 0)
    folder = tmp_path / "killed"
    with pytest.raises(WorkerError):
        in_fresh_pool(save_twice, str(folder), "good", (0,), total - moment_from_end)
    before = stored_value(folder)
    assert before in (1.0, 2.0)
    run_on(WORLD, save_after_crash, str(folder), "good")
    assert stored_value(folder) == 3.0
    assert sorted(path.name for path in folder.iterdir()) == ["good", "latest"]


def renamed_in_place(folder: str) -> None:
    """A save that writes where the checkpoint is."""
    folders.aside = lambda save_dir, tag: save_dir / tag
    folders.commit = lambda save_dir, tag: None
    save_twice(folder, "good", (1,), 12)


def test_a_save_in_place_would_lose_it(tmp_path):
    """What the tests above are worth."""
    with pytest.raises(WorkerError):
        in_fresh_pool(renamed_in_place, str(tmp_path))
    with pytest.raises((CheckpointError, AssertionError)):
        stored_value(tmp_path)


# Writes that fail


def save_with_limit(folder: str, rank: int, limit: int) -> str:
    """One rank's files may have ``limit`` bytes; then the limit goes and the save is tried again."""
    write_checkpoint(job(folder, "good", 1.0), checkpoint_group())
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited[1]))
    try:
        write_checkpoint(job(folder, "next", 2.0), checkpoint_group())
        message = "saved"
    except CheckpointError as error:
        message = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    if dist.get_rank() == 0:
        assert stored_value(Path(folder)) == 1.0
        assert sorted(path.name for path in Path(folder).iterdir()) == ["good", "latest"]
    dist.barrier()
    write_checkpoint(job(folder, "next", 3.0), checkpoint_group())
    return message


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("limit", [0, 500, 5_000, 100_000, 900_000])
def test_a_file_that_cannot_be_written_is_named_on_every_rank(rank, limit, tmp_path):
    messages = run_on(WORLD, save_with_limit, str(tmp_path), rank, limit)
    for message in messages:
        assert "could not be written" in message and "File too large" in message and "as they were" in message
    assert stored_value(tmp_path) == 3.0


def save_until_full(folder: str) -> list[str]:
    outcomes = []
    for step in range(8):
        try:
            write_checkpoint(job(folder, f"step{step}", float(step)), checkpoint_group())
            outcomes.append("saved")
        except CheckpointError as error:
            outcomes.append(str(error))
    return outcomes


@pytest.mark.parametrize("size", [3_000, 4_500])
def test_a_full_disk_keeps_the_last_good_checkpoint(size, tmp_path):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(tmp_path)], capture_output=True).returncode:
        pytest.skip("mounting a small file system is not allowed here; test_a_file_that_cannot_be_written has a limit in its place")
    try:
        outcomes = run_on(WORLD, save_until_full, str(tmp_path))
        saved = outcomes[0].count("saved")
        assert 0 < saved < 8 and outcomes[0] == outcomes[1]
        assert all("No space left on device" in outcome for outcome in outcomes[0][saved:])
        assert stored_value(tmp_path) == float(saved - 1)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def save_where_folders_answer(folder: str, number: int) -> str:
    """``os.fsync`` of a folder fails with error ``number``, of a file it does not."""
    write_checkpoint(job(folder, "good", 1.0), checkpoint_group())
    original = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        original(descriptor)

    with mock.patch.object(os, "fsync", fsync):
        try:
            write_checkpoint(job(folder, "next", 2.0), checkpoint_group())
        except CheckpointError as error:
            return str(error)
    return "saved"


@pytest.mark.parametrize(("number", "value"), [(errno.EINVAL, 2.0), (errno.ENOTSUP, 2.0), (errno.EIO, 1.0)])
def test_a_file_system_that_cannot_sync_folders_will_do(number, value, tmp_path):
    """One that can and fails is an error."""
    messages = run_on(WORLD, save_where_folders_answer, str(tmp_path), number)
    assert all(message == "saved" if value == 2.0 else os.strerror(number) in message for message in messages), messages
    assert stored_value(tmp_path) == value


# The union of slices


def save_wrong(folder: str, fault: str) -> str:
    wrong = job(folder, "wrong", 1.0)
    rank = dist.get_rank()
    if fault == "missing" and rank == 1:
        wrong.pieces.pop(2)
    elif fault == "twice" and rank == 1:
        wrong.pieces[3] = Piece("model.3", (WORLD, COLUMNS), ((0, 1), (0, COLUMNS)), torch.zeros(1, COLUMNS))
    elif fault == "shape" and rank == 1:
        wrong.pieces[3] = Piece("model.3", (3, COLUMNS), ((1, 2), (0, COLUMNS)), torch.zeros(1, COLUMNS))
    elif fault == "unknown" and rank == 1:
        wrong.pieces.append(Piece("model.x", (1,), ((0, 1),), torch.zeros(1)))
    try:
        write_checkpoint(wrong, checkpoint_group())
    except CheckpointError as error:
        return str(error)
    return "saved"


WRONG = {
    "missing": ["'model.2'", "no rank has the slice [1:2, 0:40000]"],
    "twice": ["'model.3'", "rank 0", "rank 1", "[0:1, 0:40000]", "overlap"],
    "shape": ["rank 1", "'model.3'", "[3, 40000]"],
    "unknown": ["rank 1", "'model.x'"],
}


@pytest.mark.parametrize("fault", WRONG)
def test_slices_that_do_not_make_up_a_tensor_are_refused_before_anything_is_written(fault, tmp_path):
    messages = run_on(WORLD, save_wrong, str(tmp_path), fault)
    for message in messages:
        assert all(word in message for word in WRONG[fault]), message
    assert list(tmp_path.iterdir()) == []


def save_apart(folder: str) -> str:
    """Every rank has a folder of its own under the same name, as without a shared file system."""
    if dist.get_rank() == 1:
        original = save._write_tensors
        save._write_tensors = lambda job, path, group: original(job, Path(f"{path}-of-another-machine"), group)
    try:
        write_checkpoint(job(folder, "apart", 1.0), checkpoint_group())
    except CheckpointError as error:
        return str(error)
    finally:
        if dist.get_rank() == 1:
            save._write_tensors = original
    return "saved"


def test_storage_that_ranks_do_not_share_is_an_error(tmp_path):
    for message in run_on(WORLD, save_apart, str(tmp_path)):
        assert "storage that all ranks share" in message


def save_in_portions(folder: str) -> None:
    save._FILE_BYTES = 2 * 4 * COLUMNS
    try:
        write_checkpoint(job(folder, "parts", 5.0), checkpoint_group())
    finally:
        save._FILE_BYTES = 1 << 27


def test_large_parts_are_several_files(tmp_path):
    run_on(WORLD, save_in_portions, str(tmp_path))
    files = sorted(path.name for path in (tmp_path / "parts" / "tensors").glob("*.distcp"))
    assert files == [f"__{rank}_{number}_0.distcp" for rank in range(WORLD) for number in range(TENSORS // 2)]
    assert stored_value(tmp_path) == 5.0


def save_over(folder: str, fault: str | None) -> str:
    """With a fault that comes after the checkpoint is in its place."""
    original = folders.write_latest
    if fault == "latest":
        folders.write_latest = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    try:
        write_checkpoint(job(folder, "good", 2.0), checkpoint_group())
    except CheckpointError as error:
        return str(error)
    finally:
        folders.write_latest = original
    return "saved"


def save_good(folder: str) -> None:
    write_checkpoint(job(folder, "good", 1.0), checkpoint_group())


def test_a_failure_after_the_commit_says_so(tmp_path):
    run_on(WORLD, save_good, str(tmp_path))
    for message in run_on(WORLD, save_over, str(tmp_path), "latest"):
        assert "is saved, but 'latest' does not name it" in message and "No space left" in message
    assert stored_value(tmp_path) == 2.0
    assert run_on(WORLD, save_over, str(tmp_path), None) == ["saved"] * WORLD
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "latest"]


def test_a_folder_that_is_no_checkpoint_is_not_replaced(tmp_path):
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "notes.txt").write_text("mine")
    for message in run_on(WORLD, save_over, str(tmp_path), None):
        assert "is no checkpoint" in message and "another tag" in message
    assert (tmp_path / "good" / "notes.txt").read_text() == "mine"
    (tmp_path / "good" / "notes.txt").unlink()
    assert run_on(WORLD, save_over, str(tmp_path), None) == ["saved"] * WORLD  # an empty one is
    assert stored_value(tmp_path) == 2.0
