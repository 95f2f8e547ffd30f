"""ZeRO-1/2's optimizer files, one per rank: each of its groups is a flat partition that holds parts of parameters.

A file says for each of its groups at which place of the partition a parameter's elements begin and how many there are; which
elements of the parameter these are follows from the order of the ranks: a parameter's parts lie in consecutive partitions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from deepspeed_autoep.checkpoint.stock.expert_files import ExpertFiles
from deepspeed_autoep.checkpoint.stock.files import StockFiles, pick, pick_tensor
from deepspeed_autoep.checkpoint.stock.kinds import ZERO_FILE, conversion, numbered
from deepspeed_autoep.checkpoint.stock.model_files import ModelFiles
from deepspeed_autoep.checkpoint.stock.names import ExpertLayer
from deepspeed_autoep.checkpoint.stock.sources import Flat, Fragment, Joined, Source
from deepspeed_autoep.checkpoint.stock.table import MASTER, StockTensor, number
from deepspeed_autoep.compat import stock_keys
from deepspeed_autoep.errors import CheckpointError


@dataclass(frozen=True)
class _Part:
    """What one file holds of a parameter: a fragment in each flat state, the fp32 values under DeepSpeed's own key."""

    path: Path
    group: int
    start: int
    numel: int
    states: dict[str, tuple[tuple, torch.dtype]]  # state -> (where its partition is in the file, dtype)
    end: bool  # does the partition end with this fragment?
    step: float | None


@dataclass(frozen=True)
class _Group:
    """One group of a file's own optimizer: where its ``state`` is in the file, and what its options are."""

    keys: tuple
    state: dict[str, Any]
    options: dict[str, Any]


@dataclass(frozen=True)
class _Shard:
    """One rank's file, by its ranks in the data-parallel and the TP group."""

    path: Path
    parts: dict[str, _Part]
    folding: dict[str, Any] | None


class ZeroShards:
    """All optimizer files of a checkpoint.

    Raises :class:`CheckpointError` for a missing, damaged or surplus file, and for layouts that are not read; that names the file,
    and what to do instead.
    """

    def __init__(self, files: StockFiles, model: ModelFiles, experts: ExpertFiles) -> None:
        self.files, self.model, self.experts, self.folder = files, model, experts, files.folder
        if (self.folder / "offloaded_tensors").exists():
            raise CheckpointError(f"{self.folder / 'offloaded_tensors'} holds optimizer states that were swapped to NVMe: these are not read")
        self.paths: dict[tuple[int, int], Path] = numbered(self.folder, ZERO_FILE)
        self._check_files()
        self.stacks: dict[str, ExpertLayer] = {name: layer for layer in model.layers for name in layer.stacks()}
        self.shards = {place: self._read(path) for place, path in self.paths.items()}

    def _check_files(self) -> None:
        every = [path.name for path in self.folder.iterdir() if ZERO_FILE.fullmatch(path.name)]
        expected = {(data, tensor) for data in range(self.model.dp_size) for tensor in range(self.model.tp_size)}
        if not self.paths:
            raise CheckpointError(f"{self.folder} lacks the optimizer files zero_pp_rank_*_mp_rank_*_optim_states.pt, which the model file promises")
        for data, tensor in sorted(expected - self.paths.keys()):
            raise CheckpointError(
                f"{self.folder / f'zero_pp_rank_{data}_mp_rank_{tensor:02d}_optim_states.pt'} is missing (or bf16_zero_pp_rank_...): "
                f"{self.model.paths[0].name} is of {self.model.dp_size} data-parallel and {self.model.tp_size} TP ranks"
            )
        if len(every) != len(expected):
            surplus = sorted(set(every) - {self.paths[place].name for place in expected})
            raise CheckpointError(
                f"{self.folder} holds {surplus[0]}, which is none of the {len(expected)} optimizer files of {self.model.dp_size} data-parallel and "
                f"{self.model.tp_size} TP ranks: it is left of another checkpoint. Remove it"
            )

    def optimizer(self, path: Path) -> dict[str, Any]:
        """``optimizer_state_dict`` of a file."""
        state = pick(self.files.load(path), (stock_keys.OPTIMIZER_STATE_DICT,), path)
        if not isinstance(state, dict) or stock_keys.SINGLE_PARTITION_OF_FP32_GROUPS not in state:
            raise CheckpointError(
                f"{path} is not of ZeRO-1 or ZeRO-2 (it lacks {stock_keys.SINGLE_PARTITION_OF_FP32_GROUPS!r}), and other partitions are not read. "
                f"{conversion(self.folder)}"
            )
        return state

    def first(self) -> dict[str, Any]:
        return self.optimizer(next(iter(self.paths.values())))

    def base(self, path: Path) -> list[_Group]:
        """The groups of a file's own optimizer."""
        root = (stock_keys.OPTIMIZER_STATE_DICT, stock_keys.BASE_OPTIMIZER_STATE)
        base = pick(self.optimizer(path), root[1:], path)
        try:
            if isinstance(base, list):  # zero_optimization.elastic_checkpoint: states only
                step = self.optimizer(path).get(stock_keys.BASE_OPTIMIZER_STATE_STEP)
                options = {} if step is None else {"step": step}
                return [_Group((*root, index), dict(state), options) for index, state in enumerate(base)]
            groups = []
            for options in base[stock_keys.PARAM_GROUPS]:
                number_in_file = options["params"][0]
                groups.append(_Group((*root, "state", number_in_file), dict(base["state"].get(number_in_file, {})), options))
            return groups
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path}: its optimizer's state is damaged: {error!r}") from None

    def _read(self, path: Path) -> _Shard:
        state = self.optimizer(path)
        groups = pick(state, (stock_keys.PARAM_SLICE_MAPPINGS,), path)
        fp32 = pick(state, (stock_keys.SINGLE_PARTITION_OF_FP32_GROUPS,), path)
        base = self.base(path)
        if not len(groups) == len(fp32) == len(base):
            raise CheckpointError(f"{path} has {len(groups)} groups of names, {len(fp32)} of fp32 values and {len(base)} of optimizer states")
        parts: dict[str, _Part] = {}
        for index, names in enumerate(groups):
            self._check_count(state, index, names, path)
            states, size = self._flat_states(path, index, base[index])
            step = base[index].state.get("step", base[index].options.get("step"))
            step = None if step is None else number(step, path)
            place = 0
            for name, address in sorted(names.items(), key=lambda item: item[1].start):
                if name in parts or address.start < place or address.start + address.numel > size:
                    raise CheckpointError(f"{path}: {name!r} has elements {address.start}:{address.start + address.numel} of group {index}, whose {size} are not laid out so")
                place = address.start + address.numel
                parts[name] = _Part(path, index, address.start, address.numel, states, False, step)
            last = next((name for name in parts if parts[name].group == index and parts[name].start + parts[name].numel == place), None)
            if last is not None:
                parts[last] = _Part(**{**vars(parts[last]), "end": True})
        return _Shard(path, parts, self.files.load(path).get(stock_keys.FOLDING_METADATA_KEY))

    def _check_count(self, state: Mapping[str, Any], index: int, names: Mapping[str, Any], path: Path) -> None:
        """The group was cut into as many partitions as there are files for it."""
        count = pick(state, (stock_keys.PARTITION_COUNT, index), path)
        layer = next((self.stacks[name] for name in names if name in self.stacks), None)
        ranks = self.model.dp_size * self.model.tp_size
        expected = self.model.dp_size if layer is None else ranks // layer.ep_size
        if count != expected:
            raise CheckpointError(f"{path}: group {index} was cut into {count} partitions, and {expected} files hold it")

    def _flat_states(self, path: Path, index: int, group: _Group) -> tuple[dict[str, tuple[tuple, torch.dtype]], int]:
        """The flat tensors of a group with their places in the file, and how many elements of it are no padding."""
        keys = (stock_keys.OPTIMIZER_STATE_DICT, stock_keys.SINGLE_PARTITION_OF_FP32_GROUPS, index)
        values = pick_tensor(self.files.load(path), keys, path)
        found = {stock_keys.FP32_WEIGHT_KEY: (keys, values.dtype)}
        for name, value in group.state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                if value.dim() != 1 or value.numel() < values.numel():
                    raise CheckpointError(f"{path}: {name!r} of group {index} has the shape {list(value.shape)}, its fp32 values {list(values.shape)}")
                found[name] = ((*group.keys, name), value.dtype)
        return found, values.numel()

    def tensors(self) -> Iterator[StockTensor]:
        """The parameters that the optimizer trains, whole, under stock's names.

        Raises :class:`CheckpointError` where the parts of one do not make it up.
        """
        names: dict[str, None] = {}
        for shard in self.shards.values():
            names |= dict.fromkeys(shard.parts)
        for name in names:
            if name in self.stacks:
                yield self._stack(name, self.stacks[name])
            else:
                yield self._dense(name)
        for name in self.model.trained_shapes:
            if name not in names and prod(self.model.trained_shapes[name]):
                raise CheckpointError(f"{self.model.paths[0]} says that {name!r} was trained, and no optimizer file holds it")

    def _dense(self, name: str) -> StockTensor:
        lanes = []
        for tensor in range(self.model.tp_size):
            shape = self.model.local_shape(name, tensor)
            if shape is None:
                raise CheckpointError(f"{self.model.paths[tensor]} lacks {name!r}, which was trained")
            if tensor == 0:
                self._check_shape(name, shape)
            shards = [self.shards[data, tensor] for data in range(self.model.dp_size)]
            lanes.append(self._assembled(name, shape, shards))
        self._check_alike(name, [lane[0] for lane in lanes], [lane[1] for lane in lanes])
        states = {state: self.model.joined(name, [lane[0][state] for lane in lanes], state) for state in lanes[0][0]}
        return StockTensor(name, _with_master(states), trained=True, step=lanes[0][1])

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        noted = self.model.trained_shapes.get(name, shape)
        if noted != shape:
            raise CheckpointError(f"{self.model.paths[0]} has {name!r} of shape {list(shape)} and says that {list(noted)} was trained")

    def _stack(self, name: str, layer: ExpertLayer) -> StockTensor:
        """A stack of experts, [E, ., .], from each EP rank's block of it, which is cut over the ranks that hold the same block."""
        shape = (layer.num_experts // layer.ep_size, *self.experts.stacks(layer)[name].shape[1:])
        self._check_shape(name, shape)
        blocks = [self._assembled(name, shape, shards) for shards in self._replicas(layer, name)]
        self._check_alike(name, [block[0] for block in blocks], [block[1] for block in blocks])
        states: dict[str, Source] = {state: Joined(tuple(block[0][state] for block in blocks), 0) for state in blocks[0][0]}
        return StockTensor(name, _with_master(states), trained=True, step=blocks[0][1])

    def _replicas(self, layer: ExpertLayer, name: str) -> list[list[_Shard]]:
        """For each EP rank the files of the ranks that hold its block, in the order of their partitions."""
        ep, total = layer.ep_size, self.model.dp_size * self.model.tp_size
        if self.model.tp_size == 1:
            if total % ep:
                raise CheckpointError(f"{self.folder} is of {total} ranks, which {ep} EP ranks do not divide")
            if self.model.ds_config.get("use_data_before_expert_parallelism", False):
                return [[self.shards[data, 0] for data in range(rank * total // ep, (rank + 1) * total // ep)] for rank in range(ep)]
            return [[self.shards[data, 0] for data in range(rank, total, ep)] for rank in range(ep)]
        found: list[dict[int, _Shard]] = [{} for _ in range(ep)]
        for shard in self.shards.values():
            folding = shard.folding or {}
            rank = pick(folding, (stock_keys.FOLDING_EP_RANK,), shard.path)
            keys = (stock_keys.FOLDING_PARAM_FAMILIES, name, stock_keys.FOLDING_ZERO_PARTITION_RANK)
            found[rank][pick(folding, keys, shard.path)] = shard
        for rank, shards in enumerate(found):
            if sorted(shards) != list(range(total // ep)):
                raise CheckpointError(f"{self.folder} holds the partitions {sorted(shards)} of EP rank {rank}'s block of {name!r}: {total // ep} are expected")
        return [[shards[index] for index in sorted(shards)] for shards in found]

    def _assembled(self, name: str, shape: tuple[int, ...], shards: Sequence[_Shard]) -> tuple[dict[str, Flat], float | None]:
        """A tensor of ``shape`` from the parts that consecutive partitions hold of it, and its step count."""
        parts = [(position, shard.parts[name]) for position, shard in enumerate(shards) if name in shard.parts]
        held = sum(part.numel for _, part in parts)
        if held != prod(shape):
            raise CheckpointError(
                f"{name!r} has the shape {list(shape)}, and {', '.join(shard.path.name for shard in shards)} in {self.folder} hold {held} elements of it"
            )
        for (before, left), (after, right) in zip(parts, parts[1:], strict=False):
            if after != before + 1 or right.start or not left.end:
                raise CheckpointError(f"{left.path.name} and {right.path.name} in {self.folder} hold parts of {name!r} that do not follow each other")
        first = parts[0][1]
        for _, part in parts[1:]:
            if {state: dtype for state, (_, dtype) in part.states.items()} != {state: dtype for state, (_, dtype) in first.states.items()}:
                raise CheckpointError(f"{part.path} has the states {sorted(part.states)} of {name!r}, {first.path.name} {sorted(first.states)}, perhaps of other dtypes")
            if part.step != first.step:
                raise CheckpointError(f"{part.path} is of {part.step} optimizer steps, {first.path.name} of {first.step}")
        states = {
            state: Flat(shape, dtype, tuple(Fragment(part.path, part.states[state][0], part.start, part.numel) for _, part in parts))
            for state, (_, dtype) in first.states.items()
        }
        return states, first.step

    def _check_alike(self, name: str, states: Sequence[Mapping[str, Flat]], steps: Sequence[float | None]) -> None:
        found = [({state: flat.dtype for state, flat in part.items()}, step) for part, step in zip(states, steps, strict=True)]
        if any(item != found[0] for item in found):
            raise CheckpointError(f"{self.folder}: the ranks' files differ in the states, dtypes or steps that they have of {name!r}: {found}")


def _with_master(states: dict[str, Source]) -> dict[str, Source]:
    return {MASTER if state == stock_keys.FP32_WEIGHT_KEY else state: source for state, source in states.items()}

