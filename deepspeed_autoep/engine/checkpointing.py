"""``save_checkpoint`` and ``load_checkpoint`` of the engine, with DeepSpeed's signatures and return values.

Saving describes what this rank holds (:mod:`logical_tensors`) and hands it to :mod:`deepspeed_autoep.checkpoint.save`. Loading
checks all that can be checked, fills the same views, and then publishes what follows from them: the model's own weights from its
masters, step counts, schedules, random states.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch

from deepspeed_autoep.checkpoint import folders
from deepspeed_autoep.checkpoint.load import check_tensors, read_pieces, read_training_state, verify_files
from deepspeed_autoep.checkpoint.metadata import (
    MANIFEST,
    TRAINING_STATE,
    Manifest,
    TensorEntry,
    Topology,
    dtype_name,
    read_manifest,
)
from deepspeed_autoep.checkpoint.quantized import QUANTIZATION, saved_structure
from deepspeed_autoep.checkpoint.save import SaveJob, Saver
from deepspeed_autoep.checkpoint.stock.kinds import detect
from deepspeed_autoep.checkpoint.tensors import LogicalTensor, pieces_to_read, pieces_to_write
from deepspeed_autoep.checkpoint.training_state import config_bytes, saved_bytes, training_state_bytes
from deepspeed_autoep.engine.construction import FoldedConstruction
from deepspeed_autoep.engine.export_source import EngineTensors
from deepspeed_autoep.engine.logical_tensors import foreign_tensors, logical_tensors
from deepspeed_autoep.engine.master_state import (
    MasterState,
    loss_scale_state,
    master_state,
    publish_masters,
    set_loss_scale_state,
)
from deepspeed_autoep.engine.optimizer_entry import (
    check_optimizer_entry,
    describe_optimizer,
    joined_scheduler_state,
    prepare_states,
    restore_optimizer,
    split_scheduler_state,
)
from deepspeed_autoep.engine.param_groups import ORIGIN_KEY, is_by_group
from deepspeed_autoep.engine.placements import placements
from deepspeed_autoep.engine.random_states import random_states, set_random_states
from deepspeed_autoep.engine.replicas import differing_tensors
from deepspeed_autoep.engine.stock_checkpoint import StockCheckpoint, open_stock_checkpoint, read_stock
from deepspeed_autoep.errors import AutoEPError, CheckpointError, RankMismatchError, UnsupportedError
from deepspeed_autoep.folding.groups import collectively, validate_folding_agreement
from deepspeed_autoep.peft_adapters import transformers_model
from deepspeed_autoep.quantization import check_structure, structure_of
from deepspeed_autoep.weights.export import export_folder

logger = logging.getLogger("deepspeed_autoep")

_LIBRARIES = ("torch", "deepspeed", "transformers", "deepspeed_autoep")
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
# Of DeepSpeed's signature.
_DEFAULT_FILE = "pytorch_model.bin"
_COMPARED = (bool, int, str, type(None))
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class _Opened:
    """A checkpoint that has been checked against the engine, before anything is changed."""

    folder: Path
    manifest: Manifest
    masters: MasterState
    optimizer: bool  # whether its states and options are taken
    starts_anew: bool = False  # where they are wanted, and the checkpoint has none
    stock: StockCheckpoint | None = None  # where DeepSpeed has written it


class CheckpointingEngine(FoldedConstruction):
    """The part of the engine that saves and loads."""

    _autoep_saver: Saver | None = None

    @property
    def autoep_saver(self) -> Saver:
        if self._autoep_saver is None:
            self._autoep_saver = Saver(self.autoep.handles.stage_group, self.device)
        return self._autoep_saver

    # Saving

    def save_checkpoint(
        self,
        save_dir,
        tag=None,
        client_state=None,
        save_latest=True,
        exclude_frozen_parameters=False,
        *,
        asynchronous: bool | None = None,
        exclude_optimizer_states: bool = False,
    ) -> bool:
        """Write ``save_dir/tag`` and, with ``save_latest``, the file ``save_dir/latest``. Collective over all ranks.

        As DeepSpeed's: ``tag`` is ``global_step<N>`` by default, ``client_state`` is rank 0's. ``asynchronous`` (by default
        ``expert_parallel.async_checkpoint``): copy this rank's part to host memory and write beside the training; the next save waits for
        this one, and its failure is raised by the next ``step()`` or save.

        Raises :class:`CheckpointError` on every rank if any rank could not write; other checkpoints are as they were then.
        """
        self.autoep_saver.wait()
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        use_thread = self.autoep.config.expert.async_checkpoint if asynchronous is None else bool(asynchronous)
        flags = {
            "save_latest": bool(save_latest),
            "exclude_frozen_parameters": bool(exclude_frozen_parameters),
            "exclude_optimizer_states": bool(exclude_optimizer_states),
        }
        self._agree("save_checkpoint", save_dir=save_dir, tag=tag, asynchronous=use_thread, **flags)
        _check_path("save_dir", save_dir)
        self._warn_before_save()
        foreign = foreign_tensors(self)
        job = self._collectively(lambda: self._save_job(Path(save_dir), tag, client_state, foreign, **flags))
        self.autoep_saver.save(job, use_thread)
        return True

    def _agree(self, call: str, **arguments) -> None:
        """Before anything else is done with them: a rank that checks or does something else leaves the others waiting."""
        settings = {f"{call}({name}=...)": value if isinstance(value, _COMPARED) else str(value) for name, value in arguments.items()}
        validate_folding_agreement(self.autoep.handles.spec, settings, self.autoep.handles.stage_group)

    def _collectively(self, check: Callable[[], _Result]) -> _Result:
        """Also where one rank alone fails the error is a :class:`CheckpointError` on all of them."""

        def named() -> _Result:
            try:
                return check()
            except AutoEPError:
                raise
            except Exception as error:
                raise CheckpointError(f"{type(error).__name__}: {error}") from error

        try:
            return collectively(named, self.autoep.handles.stage_group)
        except RankMismatchError as error:
            raise CheckpointError(str(error)) from None

    def _warn_before_save(self) -> None:
        places = placements(self.module, self.autoep.sites, self.autoep.plan, self.autoep.handles)
        whole = [(name, buffer) for name, buffer in self.module.named_buffers() if buffer not in places or places[buffer].holders == "stage"]
        differing = differing_tensors(whole, self.autoep.handles, self.device)
        if self.global_rank == 0:
            if differing:
                logger.warning("%d buffers differ between ranks, first %r: rank 0's are saved where rank 0 writes them", len(differing), differing[0][0])
            if self.micro_steps % self.gradient_accumulation_steps():
                logger.warning("the checkpoint is saved between backward and step: the gradients of %d passes are not in it", self.micro_steps % self.gradient_accumulation_steps())

    def _save_job(
        self,
        save_dir: Path,
        tag: str,
        client_state,
        foreign: list[LogicalTensor],
        save_latest: bool,
        exclude_frozen_parameters: bool,
        exclude_optimizer_states: bool,
    ) -> SaveJob:
        folders.check_tag(tag)
        masters = master_state(self.optimizer)
        tensors = logical_tensors(self, masters) + foreign
        saved = [tensor for tensor in tensors if tensor.trained or tensor.is_buffer or not exclude_frozen_parameters]
        if exclude_optimizer_states:
            saved = [tensor.weight_only() for tensor in saved]
        return SaveJob(
            save_dir=save_dir,
            tag=tag,
            save_latest=save_latest,
            pieces=pieces_to_write(saved),
            expected={key: (tensor.cut.shape, dtype) for tensor in saved for key, dtype in tensor.keys.items()},
            blobs={f"rng.{self.global_rank}": random_states()},
            files=self._files(client_state) if self.global_rank == 0 else {},
            manifest=self._manifest(masters, tensors, {tensor.name for tensor in saved}, exclude_optimizer_states),
        )

    def _manifest(self, masters: MasterState, tensors: list[LogicalTensor], saved: set[str], without_states: bool) -> Manifest:
        spec = self.autoep.handles.spec
        return Manifest(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            libraries={"python": platform.python_version(), **{name: _version(name) for name in _LIBRARIES}},
            model=type(transformers_model(self.module)).__name__,
            topology=Topology(
                world_size=spec.world_size, tp=spec.tp_size, ep=spec.ep_size, etp=spec.etp_size, zero_stage=self.zero_optimization_stage()
            ),
            counters={name: int(getattr(self, name)) for name in _COUNTERS} | {"pending_passes": self.micro_steps % self.gradient_accumulation_steps()},
            tensors={
                tensor.name: TensorEntry(
                    shape=tensor.cut.shape,
                    dtype=dtype_name(tensor.weight_dtype),
                    model_dtype=dtype_name(tensor.model_dtype),
                    kind="buffer" if tensor.is_buffer else "parameter",
                    trained=tensor.trained,
                    stored=tensor.name in saved,
                    aliases=tensor.aliases,
                )
                for tensor in tensors
            },
            optimizer=None if masters.base is None else describe_optimizer(masters, self.autoep_families, self._autoep_groups, not without_states),
            loss_scale=None if without_states else loss_scale_state(self.optimizer),
            random_states=True,
        )

    def _files(self, client_state: dict | None) -> dict[str, bytes]:
        state: dict[str, Any] = {"lr_scheduler": None}
        if self.lr_scheduler is not None:
            if not callable(getattr(self.lr_scheduler, "state_dict", None)):
                raise CheckpointError(f"the scheduler is a {type(self.lr_scheduler).__name__} without state_dict(), so it cannot be saved")
            state["lr_scheduler"] = joined_scheduler_state(self.lr_scheduler.state_dict(), self._origins(), self._autoep_groups, is_by_group)
            state["lr_scheduler_type"], state["lr_scheduler_groups"] = type(self.lr_scheduler).__name__, self._autoep_groups
        for name, part in self._data_efficiency().items():
            state[name] = part.state_dict()
        files = {TRAINING_STATE: training_state_bytes(client_state, state)}
        if structure := structure_of(self.module):
            files[QUANTIZATION] = saved_bytes(structure)
        model = transformers_model(self.module)
        for name, attribute in (("config.json", "config"), ("generation_config.json", "generation_config")):
            config = getattr(model, attribute, None)
            if hasattr(config, "to_json_string"):
                files[name] = config_bytes(config, f"model.{attribute}")
        return files

    def _origins(self) -> list[int]:
        return [part[ORIGIN_KEY] for part in self.basic_optimizer.param_groups]

    def _data_efficiency(self) -> dict[str, Any]:
        """What DeepSpeed's data efficiency library keeps from step to step, where it is used."""
        found = {}
        if self.training_dataloader is not None and self.curriculum_learning_enabled():
            found["data_sampler"] = self.training_dataloader.data_sampler
        if self.random_ltd_enabled() and self.random_ltd_scheduler is not None:
            found["random_ltd"] = self.random_ltd_scheduler
        return found

    def wait_for_checkpoint(self) -> None:
        """Until an asynchronous save has ended, on all ranks; raises its failure. Before a script ends, for one: ``destroy()`` does so too.
        Collective over all ranks."""
        self.autoep_saver.wait()

    # Exporting

    def save_16bit_model(
        self,
        save_dir,
        save_filename=_DEFAULT_FILE,
        exclude_frozen_parameters=False,
        *,
        max_shard_bytes: int = 5 * 10**9,
        tokenizer=None,
        overwrite: bool = False,
    ) -> bool:
        """Write the model, in the dtype in which it trains, as a Hugging Face folder that ``from_pretrained`` loads: safetensors files of at
        most ``max_shard_bytes``, its configuration, and the tokenizer files of the folder ``tokenizer``. Collective over all ranks; rank 0
        writes, and holds one file's tensors in host memory.

        Raises, on every rank, what :func:`deepspeed_autoep.weights.export.export_folder` does on rank 0.
        """
        options = {"max_shard_bytes": max_shard_bytes, "tokenizer": tokenizer, "overwrite": overwrite}
        self._agree("save_16bit_model", save_dir=save_dir, save_filename=save_filename, exclude_frozen_parameters=bool(exclude_frozen_parameters), **options)
        _check_path("save_dir", save_dir)
        if save_filename != _DEFAULT_FILE:
            raise UnsupportedError(f"save_filename={save_filename!r} is not supported: the files have the names that from_pretrained looks for; leave it out")
        if exclude_frozen_parameters:
            raise UnsupportedError("exclude_frozen_parameters=True is not supported: from_pretrained needs the whole model")
        if transformers_model(self.module) is not self.module:
            raise UnsupportedError(
                "save_16bit_model of a PEFT model is not supported: engine.module.save_pretrained(folder, state_dict="
                "deepspeed_autoep.consolidated_state_dict(engine)) on rank 0 writes its adapter"
            )
        self.autoep_saver.wait()
        group = self.autoep_saver.group
        source = self._collectively(lambda: EngineTensors(self, group))
        source.run(lambda: export_folder(Path(save_dir), source, self.module, **options))
        return True

    # Loading

    def load_checkpoint(
        self,
        load_dir,
        tag=None,
        load_module_strict=True,
        load_optimizer_states=True,
        load_lr_scheduler_states=True,
        load_module_only=False,
        custom_load_fn=None,
    ):
        """Load ``load_dir/tag``, or what ``load_dir/latest`` names, saved under any topology. Collective over all ranks.

        Returns (path of the checkpoint, client_state); (None, None) with a warning where ``tag`` is None and there is no ``latest``.
        ``load_module_only``: weights, and nothing else.

        Raises :class:`CheckpointError` on every rank: files that are missing or damaged, tensors that are missing or of another shape, an
        optimizer of another kind. Nothing is changed then.
        """
        self.autoep_saver.wait()
        tag = None if tag is None else str(tag)
        flags = {
            "load_module_strict": bool(load_module_strict),
            "load_optimizer_states": bool(load_optimizer_states),
            "load_lr_scheduler_states": bool(load_lr_scheduler_states),
            "load_module_only": bool(load_module_only),
            "custom_load_fn": custom_load_fn is not None,
        }
        self._agree("load_checkpoint", load_dir=load_dir, tag=tag, **flags)
        if custom_load_fn is not None:
            raise UnsupportedError("custom_load_fn is not supported: the files hold slices of tensors. load_module_strict=False takes what both have")
        _check_path("load_dir", load_dir)
        folder = self._collectively(lambda: folders.find_or_latest(Path(load_dir), tag, self.load_universal_checkpoint()))
        self._agree("load_checkpoint", checkpoint=folder)  # files, and 'latest' itself, as each rank sees them
        if folder is None:
            logger.warning("%s has no file %r: nothing is loaded. Give a tag to load a checkpoint that it does not name", load_dir, folders.LATEST)
            return None, None

        foreign = foreign_tensors(self)
        with_optimizer = bool(load_optimizer_states and not load_module_only)
        opened, tensors = self._collectively(lambda: self._open(folder, with_optimizer, bool(load_module_strict), foreign))
        if opened.stock is None:
            verify_files(opened.folder, opened.manifest, self.autoep.config.expert.verify_checkpoint, self.autoep_saver.group)
        state = self._collectively(lambda: self._training_state(opened, load_lr_scheduler_states and not load_module_only))

        if opened.optimizer:
            self._collectively(lambda: prepare_states(opened.manifest, opened.masters, self.autoep_families))
            present = {tensor.name for tensor in tensors}
            tensors = [tensor for tensor in logical_tensors(self, opened.masters) if tensor.name in present]
        else:
            tensors = [tensor.weight_only() for tensor in tensors]
        source = None if load_module_only else self._random_source(opened.manifest)
        with torch.no_grad():
            blobs = self._read(opened, tensors, [] if source is None else [source])
            publish_masters(self.optimizer)
        if opened.optimizer:
            restore_optimizer(opened.manifest.optimizer, opened.masters, self.autoep_families)
            set_loss_scale_state(self.optimizer, opened.manifest.loss_scale)
        elif opened.starts_anew:
            opened.masters.base.state.clear()
        if not load_module_only:
            self._restore_training(opened.manifest, state, load_lr_scheduler_states, opened.optimizer)
            if source is not None:
                set_random_states(blobs[source])
        self.zero_grad()
        return str(opened.folder), state["client_state"]

    def _read(self, opened: _Opened, tensors: list[LogicalTensor], blob_keys: list[str]) -> dict[str, bytes]:
        if opened.stock is None:
            return read_pieces(opened.folder, pieces_to_read(tensors), blob_keys, self.autoep_saver.group)
        self._collectively(lambda: read_stock(opened.stock, tensors))
        return {}

    def _training_state(self, opened: _Opened, with_scheduler: bool) -> dict[str, Any]:
        if opened.stock is None:
            state = read_training_state(opened.folder)
            if with_scheduler and self.lr_scheduler is not None and state["lr_scheduler"] is not None:
                saved = state["lr_scheduler_type"], state["lr_scheduler_groups"]
                own = type(self.lr_scheduler).__name__, self._autoep_groups
                if saved != own:
                    raise CheckpointError(
                        f"the checkpoint's scheduler is {saved[0]!r} over {saved[1]} parameter groups, the engine's {own[0]!r} over {own[1]}: "
                        "load_lr_scheduler_states=False leaves the engine's as it is"
                    )
            return state
        reader, origins = opened.stock.reader, opened.stock.scheduler_origins
        scheduler = reader.lr_scheduler
        if scheduler is not None and origins is not None:
            scheduler = joined_scheduler_state(scheduler, origins, self._autoep_groups, is_by_group)
        return {"client_state": reader.client_state, "lr_scheduler": scheduler}

    def _open(self, folder: Path, with_optimizer: bool, strict: bool, foreign: list[LogicalTensor]) -> tuple[_Opened, list[LogicalTensor]]:
        """The checkpoint and those of this rank's tensors that it holds. Local; nothing is changed."""
        masters = master_state(self.optimizer)
        tensors = logical_tensors(self, masters) + foreign
        stock = None
        if not (folder / MANIFEST).exists() and detect(folder) is not None:
            stock = open_stock_checkpoint(folder, tensors, masters, self.autoep_families, self._autoep_groups)
        manifest = read_manifest(folder) if stock is None else stock.manifest
        if stock is None:
            check_structure(saved_structure(folder, manifest), self.module)
        tensors = check_tensors(folder, manifest, tensors, strict)
        entry = manifest.optimizer
        with_optimizer = with_optimizer and masters.base is not None
        if with_optimizer and (entry is None or not entry.has_states) and self.global_rank == 0:
            reason = "" if stock is None else f" ({stock.reader.states_missing})"
            logger.warning("checkpoint %s has no optimizer states%s: weights are loaded, the optimizer starts anew", folder, reason)
        if with_optimizer and entry is not None:
            check_optimizer_entry(entry, masters, self.autoep_families, self._autoep_groups)
        if manifest.counters.get("pending_passes") and self.global_rank == 0:
            logger.warning("checkpoint %s was saved between backward and step: the gradients of those passes are not in it", folder)
        return _Opened(folder, manifest, masters, with_optimizer and entry is not None, with_optimizer, stock), tensors

    def _random_source(self, manifest: Manifest) -> str | None:
        """Whose random states this rank takes: its own, or under another topology those of its samples' data-parallel index."""
        if not manifest.random_states:
            return None
        spec, saved = self.autoep.handles.spec, manifest.topology
        if (spec.world_size, spec.tp_size) == (saved.world_size, saved.tp):
            return f"rng.{self.global_rank}"
        index = self.global_rank // spec.tp_size
        if saved.world_size // saved.tp == spec.dp_size:
            return f"rng.{index * saved.tp}"
        if self.global_rank == 0:
            logger.warning(
                "the checkpoint is of %d data-parallel ranks and this run has %d: random states (dropout) are not those of the checkpoint",
                saved.world_size // saved.tp,
                spec.dp_size,
            )
        return None

    def _take_scheduled_rates(self) -> None:
        """Schedulers that go on from the last learning rate need it in the groups, whose options were not loaded."""
        rates = getattr(self.lr_scheduler, "_last_lr", None)
        parts = self.basic_optimizer.param_groups
        if rates is not None and len(rates) == len(parts):
            for part, rate in zip(parts, rates, strict=True):
                part["lr"] = part["lr"].fill_(rate) if isinstance(part["lr"], torch.Tensor) else rate

    def _restore_training(self, manifest: Manifest, state: dict[str, Any], with_scheduler: bool, with_options: bool) -> None:
        for name in _COUNTERS:
            setattr(self, name, manifest.counters[name])
        # At the beginning of a step, whatever the accumulation was: the boundary is counted from here.
        self.micro_steps = self.global_steps * self.gradient_accumulation_steps()
        self.loaded_checkpoint_mp_world_size = manifest.topology.tp
        self.loaded_checkpoint_dp_world_size = manifest.topology.world_size // manifest.topology.tp
        if with_scheduler and self.lr_scheduler is not None:
            if state["lr_scheduler"] is None:
                logger.warning("the checkpoint has no state of a learning rate scheduler: the engine's stays as it is")
            else:
                split = split_scheduler_state(state["lr_scheduler"], self._origins(), self._autoep_groups, is_by_group)
                self.lr_scheduler.load_state_dict(split)
                if not with_options:
                    self._take_scheduled_rates()
        for name, part in self._data_efficiency().items():
            if name in state:
                part.load_state_dict(state[name])


def _check_path(key: str, value) -> None:
    if not value or not isinstance(value, str | os.PathLike):
        raise CheckpointError(f"{key}={value!r}: legal are paths")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
