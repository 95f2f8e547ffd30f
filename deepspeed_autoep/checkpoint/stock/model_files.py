"""The files of a checkpoint that hold the model and the training's counters: ``mp_rank_*_model_states.pt``, one per TP rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from deepspeed_autoep.checkpoint.stock.files import StockFiles, pick
from deepspeed_autoep.checkpoint.stock.kinds import MODEL_FILE, PIPELINE_FILE, ZERO3_MODEL_FILE, conversion, numbered
from deepspeed_autoep.checkpoint.stock.names import ExpertLayer, expert_layers
from deepspeed_autoep.checkpoint.stock.sources import Flat, Fragment, Rebuilt, Source, Stored
from deepspeed_autoep.compat import AFFINE_MAP_FORMAT_VERSION, SCALE_POWER_BY_STATE, ParamAffineMap, stock_keys
from deepspeed_autoep.errors import CheckpointError

# What the engine writes into a model file (0.19.8); the rest is the client's.
_OWN_KEYS = {
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "shared_params",
    "frozen_param_fragments",
    "lr_scheduler",
    "data_sampler",
    "random_ltd",
    "skipped_steps",
    "global_steps",
    "global_samples",
    "dp_world_size",
    "mp_world_size",
    "ds_config",
    "ds_version",
    "num_experts",
    stock_keys.CHECKPOINT_PARALLEL_DIMS,
    stock_keys.AUTOEP_LAYERS_KEY,
    stock_keys.AUTOEP_LAYERS_KEY_LEGACY,
    stock_keys.UNIVERSAL_CHECKPOINT_INFO,
    stock_keys.FOLDING_METADATA_KEY,
}
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


class ModelFiles:
    """The model files of ``folder``, checked against each other.

    Raises :class:`CheckpointError` for a file that is missing or damaged, for files of different steps, and for pipelines.
    """

    def __init__(self, files: StockFiles) -> None:
        self.files, self.folder = files, files.folder
        stage3 = numbered(self.folder, ZERO3_MODEL_FILE)
        plain = numbered(self.folder, MODEL_FILE)
        self.is_stage3 = bool(stage3)
        if stage3 and plain:
            raise CheckpointError(f"{self.folder} holds {next(iter(plain.values())).name} and {next(iter(stage3.values())).name}: it is left of two checkpoints")
        # ZeRO-3 has a file per data-parallel rank as well; what is read of them is the same in all of these.
        self.all_paths = stage3 or plain
        self.paths: list[Path] = [path for (*data, _), path in self.all_paths.items() if not any(data)]
        pipeline = sorted(path.name for path in self.folder.iterdir() if PIPELINE_FILE.fullmatch(path.name))
        if pipeline:
            raise CheckpointError(f"{self.folder} holds {pipeline[0]}, of a pipeline: its layers have no names of the model's. It is not read")
        if not self.paths:
            raise CheckpointError(f"{self.folder} lacks mp_rank_00_model_states.pt (or, of ZeRO-3, zero_pp_rank_0_mp_rank_00_model_states.pt)")
        states = [files.load_dict(path) for path in self.paths]
        self.tp_size = len(self.paths)
        self._check(states)
        first = states[0]
        self.counters: dict[str, int] = {name: int(pick(first, (name,), self.paths[0])) for name in _COUNTERS}
        self.dp_size = int(pick(first, ("dp_world_size",), self.paths[0]))
        self.ds_config: dict[str, Any] = first.get("ds_config") or {}
        self.lr_scheduler = first.get("lr_scheduler")
        self.client_state = {key: value for key, value in first.items() if key not in _OWN_KEYS}
        self.layers: tuple[ExpertLayer, ...] = expert_layers(first, self.paths[0])
        self.buffer_names = set(first.get("buffer_names") or ())
        self.aliases: dict[str, str] = {}
        for state in states:  # rank 0's only are complete
            self.aliases |= state.get("shared_params") or {}
        self.param_shapes = self._param_shapes(first, self.paths[0])
        # What ZeRO's optimizer trains, with TP rank 0's shapes; of experts EP rank 0's.
        self.trained_shapes = {name: shape for group in self.param_shapes or () for name, shape in group.items()}
        module = pick(first, ("module",), self.paths[0])
        if not isinstance(module, dict):
            raise CheckpointError(f"{self.paths[0]}['module'] is a {type(module).__name__}: a dictionary is legal")
        self.module_names = tuple(name for name, value in module.items() if isinstance(value, torch.Tensor))
        self._shapes = [self._module_shapes(state) for state in states]
        self._info = first.get(stock_keys.UNIVERSAL_CHECKPOINT_INFO) or {}
        self._affine = self._affine_maps()

    def _check(self, states: Sequence[dict]) -> None:
        for path, state in zip(self.paths, states, strict=True):
            dims = state.get(stock_keys.CHECKPOINT_PARALLEL_DIMS) or {}
            stages = dims.get(stock_keys.CHECKPOINT_PP_DEGREE, 1) or 1
            if stages != 1:
                raise CheckpointError(f"{path} is of a pipeline of {stages} stages: that is not read")
            tp = dims.get(stock_keys.CHECKPOINT_TP_DEGREE) or state.get("mp_world_size") or 1
            expected = [re.sub(r"mp_rank_\d+", f"mp_rank_{rank:02d}", self.paths[0].name) for rank in range(tp)]
            found = [path.name for path in self.paths]
            for name in expected:
                if name not in found:
                    raise CheckpointError(f"{self.folder / name} is missing: {path.name} is of {tp} TP ranks, and there are {found}")
            if found != expected:
                raise CheckpointError(f"{self.folder} holds {found}, and {path.name} is of {tp} TP ranks: it is left of two checkpoints")
            for name in (*_COUNTERS, "dp_world_size"):
                if state.get(name) != states[0].get(name):
                    raise CheckpointError(f"{path} has {name}={state.get(name)}, {self.paths[0].name} has {states[0].get(name)}: they are of two checkpoints")

    @staticmethod
    def _param_shapes(state: dict, path: Path) -> list[dict[str, tuple[int, ...]]] | None:
        """Of each parameter group what the optimizer trains; None without ZeRO."""
        groups = state.get(stock_keys.PARAM_SHAPES)
        if groups is None:
            return None
        try:
            return [{name: tuple(shape) for name, shape in group.items()} for group in groups]
        except (AttributeError, TypeError):
            raise CheckpointError(f"{path}[{stock_keys.PARAM_SHAPES!r}] is damaged: a list of dictionaries of shapes is legal") from None

    @staticmethod
    def _module_shapes(state: dict) -> dict[str, tuple[int, ...]]:
        return {name: tuple(value.shape) for name, value in state["module"].items() if isinstance(value, torch.Tensor)}

    def _affine_maps(self) -> dict[str, dict]:
        """By pattern of names."""
        info = self._info.get(stock_keys.AFFINE_MAP) or {}
        version = info.get(stock_keys.AFFINE_MAP_VERSION, AFFINE_MAP_FORMAT_VERSION)
        if version != AFFINE_MAP_FORMAT_VERSION:
            raise CheckpointError(
                f"{self.paths[0]}: its {stock_keys.AFFINE_MAP!r} is of version {version}, this DeepSpeed reads {AFFINE_MAP_FORMAT_VERSION}"
            )
        return info.get(stock_keys.AFFINE_MAP_PARAMS, {})

    def local_shape(self, name: str, tp_rank: int) -> tuple[int, ...] | None:
        """Of a TP rank's part of a tensor in the model files, None where it is in none."""
        return self._shapes[tp_rank].get(name)

    def joined(self, name: str, parts: Sequence[Source], state: str) -> Source:
        """The whole of a tensor that is no expert's, from its TP parts; ``state``: fp32 for values, or of the optimizer.

        Raises :class:`CheckpointError` where the files do not say how AutoTP cut it.
        """
        if len(parts) == 1:
            return parts[0]
        # AutoTP's patterns are of one name each; the search is for those that a client made.
        exact = self._affine.get(f"^{re.escape(name)}$")
        entries = [exact] if exact else [entry for pattern, entry in self._affine.items() if re.match(pattern, name)]
        if len(entries) != 1:
            raise CheckpointError(
                f"{self.paths[0]} does not say how {name!r} was cut over {self.tp_size} TP ranks ({stock_keys.AFFINE_MAP!r} has "
                f"{len(entries)} entries for it). {conversion(self.folder)}"
            )
        affine = ParamAffineMap.from_dict(entries[0])
        found = {rank: part.shape for rank, part in enumerate(parts)}
        if found != affine.shard_shapes:
            raise CheckpointError(f"{self.folder}: the TP parts of {name!r} have the shapes {found}, {self.paths[0].name} says {affine.shard_shapes}")
        scaled = any(piece.scale != 1 for pieces in affine.pieces_by_rank.values() for piece in pieces)
        if state not in SCALE_POWER_BY_STATE and scaled:
            raise CheckpointError(f"{self.folder}: {name!r} is scaled on its TP ranks, and how its {state!r} follows is not known")
        return Rebuilt(name, tuple(parts), affine, SCALE_POWER_BY_STATE.get(state, 1))

    def weight(self, name: str) -> Source | None:
        """The value in the model files, in the model's dtype; None where these do not hold it."""
        if self.is_stage3:
            return self._stage3_frozen(name)
        if name not in self.module_names:
            return None
        parts = [Stored.of(self.files, path, ("module", name)) for path in self.paths]
        return self.joined(name, parts, "fp32")

    def buffer(self, name: str) -> Source:
        """A buffer: the same on every TP rank. Raises :class:`CheckpointError` where it is not."""
        parts = [Stored.of(self.files, path, ("module", name)) for path in self.paths]
        values = [self.files.load(path)["module"][name] for path in self.paths]
        for path, value in zip(self.paths, values, strict=True):
            if not torch.equal(value, values[0]):
                raise CheckpointError(f"{path} and {self.paths[0].name} hold different values of the buffer {name!r}")
        return parts[0]

    def _stage3_frozen(self, name: str) -> Source | None:
        """ZeRO-3 keeps frozen parameters in equal parts, the last of them padded, one in each data-parallel rank's file."""
        shape = (self.files.load(self.paths[0]).get(stock_keys.FROZEN_PARAM_SHAPES) or {}).get(name)
        if shape is None:
            return None
        if self.tp_size > 1:
            raise CheckpointError(f"{self.folder}: the frozen parameter {name!r} of ZeRO-3 with {self.tp_size} TP ranks is not read")
        left, fragments, dtype = shape.numel(), [], None
        for path in self.all_paths.values():
            keys = (stock_keys.FROZEN_PARAM_FRAGMENTS, name)
            part = pick(self.files.load(path), keys, path)
            fragments.append(Fragment(path, keys, 0, min(left, part.numel())))
            left -= fragments[-1].numel
            dtype = part.dtype
        if left or len(self.all_paths) != self.dp_size:
            raise CheckpointError(
                f"{self.folder} holds {len(self.all_paths)} of {self.dp_size} files zero_pp_rank_*_model_states.pt: {left} elements of {name!r} are missing"
            )
        return Flat(tuple(shape), dtype, tuple(fragments))
