"""torch.distributed.checkpoint's planners for boxes of logical tensors.

DCP's own planners take state dicts of DTensors, which cannot say what a rank holds under ZeRO, nor gate and up halves under expert
TP. These say it box by box.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from math import prod

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from deepspeed_autoep.checkpoint.slices import Box, box_shape, check_union
from deepspeed_autoep.checkpoint.tensors import Piece
from deepspeed_autoep.errors import CheckpointError


def chunk_of(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(start for start, _ in box), torch.Size(box_shape(box)))


def box_of(chunk: ChunkStorageMetadata) -> Box:
    return tuple((start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))


class PieceSavePlanner(SavePlanner):
    """Writes ``pieces`` and ``blobs`` (key -> bytes) of this rank.

    ``expected``: key -> (shape, dtype) of every tensor that all ranks' pieces must make up; the first rank checks it before any rank
    writes, and :class:`CheckpointError` then names the tensor, the ranks and their slices.
    """

    def __init__(
        self,
        pieces: Iterable[Piece],
        expected: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        blobs: Mapping[str, bytes] | None = None,
    ) -> None:
        self.pieces = {(piece.key, tuple(start for start, _ in piece.box)): piece for piece in pieces}
        self.expected = expected
        self.blobs = dict(blobs or {})

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        tensors = [
            WriteItem(
                MetadataIndex(piece.key, torch.Size(start for start, _ in piece.box)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk_of(piece.box), TensorProperties(dtype=piece.view.dtype), torch.Size(piece.shape)),
            )
            for piece in self.pieces.values()
        ]
        blobs = [
            WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(len(value)))
            for key, value in self.blobs.items()
        ]
        return SavePlan(tensors + blobs)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        held: dict[str, list[tuple[Box, int]]] = {key: [] for key in self.expected}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                if item.tensor_data is not None:
                    self._check_item(item, rank)
                    held[item.index.fqn].append((box_of(item.tensor_data.chunk), rank))
        for key, boxes in held.items():
            check_union(key, self.expected[key][0], boxes)
        return create_default_global_save_plan(all_plans)

    def _check_item(self, item: WriteItem, rank: int) -> None:
        found = tuple(item.tensor_data.size), item.tensor_data.properties.dtype
        if self.expected.get(item.index.fqn) != found:
            raise CheckpointError(
                f"rank {rank} would write {item.index.fqn!r} of shape {list(found[0])} and {found[1]}, rank 0 expects "
                f"{self.expected.get(item.index.fqn, 'no such tensor')}"
            )

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self.blobs[write_item.index.fqn])
        # In C order: torch.save would keep the strides of a transposed parameter.
        return self.pieces[write_item.index.fqn, tuple(write_item.index.offset)].view.detach().contiguous()


class PieceLoadPlanner(LoadPlanner):
    """Fills the views of ``pieces``, cast to their dtypes, from whatever boxes the files hold; reads the blobs of ``blob_keys``."""

    def __init__(self, pieces: Iterable[Piece], blob_keys: Iterable[str] = ()) -> None:
        self.targets: dict[str, list[Piece]] = {}
        for piece in pieces:
            self.targets.setdefault(piece.key, []).append(piece)
        self.blob_keys = list(blob_keys)
        self.blobs: dict[str, bytes] = {}

    def set_up_planner(self, state_dict, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for key, pieces in self.targets.items():
            stored = self.metadata.state_dict_metadata.get(key)
            if not isinstance(stored, TensorStorageMetadata) or tuple(stored.size) != pieces[0].shape:
                raise CheckpointError(f"tensor {key!r} of shape {list(pieces[0].shape)} is not in the files, which have {stored and getattr(stored, 'size', None)}")
            reads = create_read_items_for_chunk_list(key, stored, [chunk_of(piece.box) for piece in pieces])
            found = sum(prod(read.lengths) for read in reads)
            if found != sum(piece.view.numel() for piece in pieces):
                raise CheckpointError(f"tensor {key!r}: the files hold {found} of the {sum(piece.view.numel() for piece in pieces)} elements that a rank needs")
            items += reads
        for key in self.blob_keys:
            if not isinstance(self.metadata.state_dict_metadata.get(key), BytesStorageMetadata):
                raise CheckpointError(f"{key!r} is not in the files")
            index, none = MetadataIndex(key), torch.Size((0,))
            items.append(ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.blobs[read_item.dest_index.fqn] = value.getvalue()

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        view = self.targets[read_item.dest_index.fqn][read_item.dest_index.index].view.detach()
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, start, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass
