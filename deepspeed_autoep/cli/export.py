"""``deepspeed-autoep export``."""

from __future__ import annotations

import argparse

import torch

from deepspeed_autoep.checkpoint.reader import CheckpointReader, ModelTensors
from deepspeed_autoep.errors import CheckpointError

DTYPES = {"model": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def export(options: argparse.Namespace) -> None:
    """Write a folder for ``from_pretrained``. Peak memory is that of one file, and of one slice of the checkpoint."""
    from deepspeed_autoep.cli.inspect import verify
    from deepspeed_autoep.weights.export import export_folder

    reader = CheckpointReader(options.checkpoint, options.tag)
    if options.verify:
        verify(reader)
    source = ModelTensors(reader, DTYPES[options.dtype])
    report = export_folder(
        options.out,
        source,
        meta_model(reader),
        max_shard_bytes=options.max_shard_size,
        tokenizer=options.tokenizer,
        overwrite=options.overwrite,
    )
    print(f"{report.folder}: {report.num_tensors} tensors, {report.num_bytes:,} bytes in {len(report.weights)} files")


def meta_model(reader: CheckpointReader) -> torch.nn.Module:
    """The model that was saved, by its config.json, on the meta device. Raises :class:`CheckpointError`."""
    import transformers

    name = reader.manifest.model
    if any(".lora_" in tensor or tensor.startswith("base_model.") for tensor in reader.manifest.tensors):
        raise CheckpointError(
            f"checkpoint {reader.folder} is of a model with PEFT adapters, which are not exported: load it into an engine, and write the adapter with "
            "engine.module.save_pretrained(folder, state_dict=deepspeed_autoep.consolidated_state_dict(engine))"
        )
    kind = getattr(transformers, name, None)
    if kind is None:
        raise CheckpointError(
            f"checkpoint {reader.folder} cannot be exported: there is no model class {name!r} in transformers {transformers.__version__}"
        )
    if not (reader.folder / "config.json").is_file():
        raise CheckpointError(f"checkpoint {reader.folder} cannot be exported: it has no config.json; engine.save_16bit_model exports from a running engine")
    try:
        # Not from_dict: numbers without an end are written as objects, which only this reads.
        config = kind.config_class.from_pretrained(reader.folder)
        with torch.device("meta"):
            model = kind(config)
        if (reader.folder / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(reader.folder)
    except Exception as error:
        raise CheckpointError(
            f"checkpoint {reader.folder} cannot be exported: transformers {transformers.__version__} does not take its config.json or "
            f"generation_config.json: {type(error).__name__}: {error}"
        ) from error
    return model
