"""The files of single experts: ``layer_<block>_expert_<expert>_mp_rank_<tp>_model_states.pt``, with a row of each of its block's stacks."""

from __future__ import annotations

from pathlib import Path

from deepspeed_autoep.checkpoint.stock.files import StockFiles
from deepspeed_autoep.checkpoint.stock.kinds import EXPERT_FILE, numbered
from deepspeed_autoep.checkpoint.stock.names import ExpertLayer
from deepspeed_autoep.checkpoint.stock.sources import Joined, Row, Source, Stored
from deepspeed_autoep.errors import CheckpointError


class ExpertFiles:
    """Those of a checkpoint."""

    def __init__(self, files: StockFiles) -> None:
        self._files = files
        # TP ranks that hold the same expert write a file each, all alike: the first is as good as any.
        self._paths: dict[tuple[int, int], Path] = {}
        for (layer, expert, _), path in numbered(files.folder, EXPERT_FILE).items():
            self._paths.setdefault((layer, expert), path)
        self._stacks: dict[ExpertLayer, dict[str, Source]] = {}

    def stacks(self, layer: ExpertLayer) -> dict[str, Source]:
        """The stacks of a block, [E, ., .] in the model's dtype, by stock's names.

        Raises :class:`CheckpointError` that names a file that is missing, or whose tensor is of another shape or dtype.
        """
        if layer not in self._stacks:
            rows: dict[str, list[Stored]] = {stack: [] for stack in layer.stacks()}
            for expert in range(layer.num_experts):
                for stack, have in rows.items():
                    have.append(self._row(layer, expert, stack, have[0] if have else None))
            self._stacks[layer] = {stack: Joined(tuple(Row(row) for row in have), 0) for stack, have in rows.items()}
        return self._stacks[layer]

    def _row(self, layer: ExpertLayer, expert: int, stack: str, first: Stored | None) -> Stored:
        expected = self._files.folder / f"layer_{layer.index}_expert_{expert}_mp_rank_00_model_states.pt"
        path = self._paths.get((layer.index, expert), expected)
        row = Stored.of(self._files, path, (f"{stack}.{expert}",))
        like = first or row
        if len(row.shape) != 2 or (row.shape, row.dtype) != (like.shape, like.dtype):
            raise CheckpointError(
                f"{path}: '{stack}.{expert}' has the shape {list(row.shape)} and is {row.dtype}: a matrix is expected, {list(like.shape)} and {like.dtype} as "
                f"of the block's first expert"
            )
        return row
