"""Write a checkpoint: every rank its pieces, the first rank what is small; all or nothing.

The bytes go to a folder aside, which is renamed once every file of it is on storage (:mod:`folders`). Failures of any rank are
raised on all of them.
"""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from deepspeed.accelerator import get_accelerator
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from deepspeed_autoep.checkpoint import folders
from deepspeed_autoep.checkpoint.metadata import MANIFEST, TENSORS, FileEntry, Manifest, manifest_bytes
from deepspeed_autoep.checkpoint.planner import PieceSavePlanner
from deepspeed_autoep.checkpoint.tensors import Piece
from deepspeed_autoep.errors import CheckpointError
from deepspeed_autoep.folding.groups import collectively
from deepspeed_autoep.storage import sync_folder, write_file

logger = logging.getLogger("deepspeed_autoep")

# A rank waits so long for the slowest one to write.
_TIMEOUT = timedelta(hours=4)
_FILE_BYTES = 1 << 27


@dataclass(frozen=True)
class SaveJob:
    """One rank's part of a checkpoint that is to be written."""

    save_dir: Path
    tag: str
    save_latest: bool
    pieces: list[Piece]
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]]  # of all ranks, see PieceSavePlanner
    blobs: dict[str, bytes]  # beside the tensors, of this rank
    files: dict[str, bytes]  # of the first rank: written beside the manifest
    manifest: Manifest

    def staged(self) -> SaveJob:
        """With copies of the tensors in host memory: training may go on."""
        return replace(self, pieces=[replace(piece, view=piece.view.detach().to("cpu", copy=True)) for piece in self.pieces])


class _HashedStream:
    """A file that is written from its beginning to its end, with its length and CRC-32."""

    def __init__(self, stream) -> None:
        self._stream = stream
        self.length = self.crc = 0
        self.failure: OSError | None = None

    def write(self, data) -> int:
        view = memoryview(data).cast("B")
        try:
            self._stream.write(view)
        except OSError as error:
            self.failure = error
            raise
        self.crc = zlib.crc32(view, self.crc)
        self.length += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self.length

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        self.flush()  # fsync follows
        return self._stream.fileno()

    def close(self) -> None:
        self._stream.close()


class _HashedFiles(FileSystem):
    def __init__(self) -> None:
        self.entries: dict[str, FileEntry] = {}  # by name

    @contextlib.contextmanager
    def create_stream(self, path, mode: str) -> Iterator:
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            hashed = _HashedStream(stream)
            try:
                yield hashed
            except Exception:
                # torch.save reports a failed write as a wrong position in its archive.
                if hashed.failure is not None:
                    raise OSError(hashed.failure.errno, hashed.failure.strerror, str(path)) from None
                raise
            # torch.distributed.checkpoint renames what it has written under .tmp.
            self.entries[Path(path).name.removesuffix(".tmp")] = FileEntry(bytes=hashed.length, crc32=hashed.crc)


class _Writer(FileSystemWriter):
    """Files of at most ``_FILE_BYTES`` of tensors (a larger one alone): DCP keeps copies of all tensors of a file until it is written."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = _HashedFiles()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        results: list[WriteResult] = []
        for number, items in enumerate(_portions(plan.items)):
            prefix = replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{number}_")
            results += super().write_data(replace(plan, items=items, storage_data=prefix), planner).wait()
        future: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        future.set_result(results)
        return future


def _portions(items: list[WriteItem]) -> Iterator[list[WriteItem]]:
    portion: list[WriteItem] = []
    size = 0
    for item in items:
        own = 0 if item.tensor_data is None else prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
        if portion and size + own > _FILE_BYTES:
            yield portion
            portion, size = [], 0
        portion.append(item)
        size += own
    if portion:
        yield portion


def write_checkpoint(job: SaveJob, group: dist.ProcessGroup) -> None:
    """Collective over ``group``. Raises :class:`CheckpointError` on every rank; no other checkpoint is touched then."""
    try:
        folder = folders.aside(job.save_dir, job.tag)
        _on_first(lambda: folders.begin(job.save_dir, job.tag), group)
        written = _write_tensors(job, folder, group)
        _on_first(lambda: _finish(job, folder, written), group)
    except BaseException as error:
        if dist.get_rank(group) == 0:
            folders.abandon(job.save_dir, job.tag)
        if not isinstance(error, Exception):
            raise
        raise CheckpointError(
            f"checkpoint {job.tag!r} could not be written to {job.save_dir}: {_reason(error)}. Checkpoints before it are as they were"
        ) from error
    try:
        _on_first(lambda: folders.conclude(job.save_dir, job.tag, job.save_latest), group)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {job.save_dir / job.tag} is saved, but {folders.LATEST!r} does not name it: {error}") from None


def _write_tensors(job: SaveJob, folder: Path, group: dist.ProcessGroup) -> dict[str, FileEntry]:
    """The entries of all ranks' files, on the first rank."""
    writer = _Writer(folder / TENSORS)
    planner = PieceSavePlanner(job.pieces, job.expected, job.blobs)
    try:
        dcp.save({}, storage_writer=writer, planner=planner, process_group=group)
    except dcp.CheckpointException as error:  # not an Exception
        raise CheckpointError(failures_of(error)) from None
    entries: list | None = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    dist.gather_object(writer.fs.entries, entries, group_dst=0, group=group)
    return {f"{TENSORS}/{name}": entry for part in entries or () for name, entry in part.items()}


def failures_of(error: dcp.CheckpointException) -> str:
    """Of all ranks; equal ones once."""
    ranks: dict[str, list[int]] = {}
    for rank, (failure, _) in sorted(error.failures.items()):
        ranks.setdefault(_reason(failure), []).append(rank)
    return "; ".join(f"{reason} (rank {', '.join(map(str, where))})" for reason, where in ranks.items())


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _finish(job: SaveJob, folder: Path, written: dict[str, FileEntry]) -> None:
    for name, entry in written.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry.bytes:
            raise CheckpointError(f"{path}, which a rank has written, is not seen by rank 0: save_dir must be on storage that all ranks share")
    for name, content in job.files.items():
        write_file(folder / name, content)
        written[name] = FileEntry(bytes=len(content), crc32=zlib.crc32(content))
    sync_folder(folder / TENSORS)
    write_file(folder / MANIFEST, manifest_bytes(job.manifest.model_copy(update={"files": written})))
    folders.commit(job.save_dir, job.tag)


def _on_first(action: Callable[[], object], group: dist.ProcessGroup) -> None:
    """Run by the first rank; its failure is every rank's."""
    failure: list = [None]
    if dist.get_rank(group) == 0:
        try:
            action()
        except Exception as error:
            failure = [_reason(error)]
    dist.broadcast_object_list(failure, group_src=0, group=group)
    if failure[0] is not None:
        raise CheckpointError(failure[0])


class Saver:
    """An engine's saves, one at a time; the asynchronous one in a thread beside the training.

    Calls are collective over ``stage_group``, the main thread's; the files have a group of their own, so that the thread's collectives
    meet no others.
    """

    def __init__(self, stage_group, device: torch.device) -> None:
        self._stage_group, self._device = stage_group, device
        self._group: dist.ProcessGroup | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._pending: Future | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks, on the CPU. Collective over the world, once."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        return self._group

    def save(self, job: SaveJob, asynchronous: bool) -> None:
        """An earlier save must have been waited for: :meth:`wait`."""
        group = self.group
        if not asynchronous:
            write_checkpoint(job, group)
            return
        staged = collectively(job.staged, self._stage_group)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "deepspeed_autoep-save", initializer=self._use_device)
        self._pending = self._executor.submit(write_checkpoint, staged, group)
        self._pending.add_done_callback(_log_failure)

    def _use_device(self) -> None:
        """A new thread begins on the first device."""
        if self._device.type != "cpu":
            get_accelerator().set_device(self._device.index)

    def wait(self) -> None:
        """Until the save under way has ended, on all ranks; raises its failure on all of them."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            collectively(pending.result, self._stage_group)

    def check(self) -> None:
        """Raise the failure of a save that has ended, on all ranks in the same step. Nothing where none is under way."""
        if self._pending is None:
            return
        ended = torch.tensor([int(self._pending.done())], dtype=torch.int32, device=self._device)
        dist.all_reduce(ended, op=dist.ReduceOp.MIN, group=self._stage_group)
        if ended.item():
            self.wait()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            if self._executor is not None:
                self._executor.shutdown()
            if self._group is not None:
                dist.destroy_process_group(self._group)
            self._executor = self._group = None


def _log_failure(save: Future) -> None:
    """At once: a script may end before a step or another save raises it."""
    if not save.cancelled() and save.exception() is not None:
        logger.error("an asynchronous save failed: %s", save.exception())
