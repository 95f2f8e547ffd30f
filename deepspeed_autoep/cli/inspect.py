"""``deepspeed-autoep inspect``."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from tqdm import tqdm

from deepspeed_autoep.checkpoint.metadata import dtype_name
from deepspeed_autoep.checkpoint.reader import CheckpointReader
from deepspeed_autoep.checkpoint.slices import show


def inspect(options: argparse.Namespace) -> None:
    """Print what a checkpoint holds; damage is a :class:`CheckpointError`."""
    reader = CheckpointReader(options.checkpoint, options.tag)
    if options.verify:
        verify(reader)
    document = describe(reader, options.match, options.slices, options.verify)
    if options.json:
        print(json.dumps(document, indent=1))
    else:
        _print(document)


def verify(reader: CheckpointReader) -> None:
    """With a progress bar on a terminal."""
    total = sum(entry.bytes for entry in reader.manifest.files.values())
    with tqdm(total=total, unit="B", unit_scale=True, desc="verify", leave=False, disable=None) as bar:
        for _, size in reader.verify():
            bar.update(size)


def describe(reader: CheckpointReader, match: str, with_slices: bool, verified: bool) -> dict[str, Any]:
    manifest = reader.manifest
    tensors = {}
    for name, entry in manifest.tensors.items():
        if match not in name:
            continue
        tensors[name] = {
            "shape": list(entry.shape),
            "dtype": entry.model_dtype,
            "kind": entry.kind,
            "trained": entry.trained,
            "stored": {state: dtype_name(dtype) for state, dtype in reader.states(name).items()} if entry.stored else {},
            "bytes": _bytes(reader, name) if entry.stored else 0,
        }
        if entry.aliases:
            tensors[name]["also"] = list(entry.aliases)
        if with_slices and entry.stored:
            tensors[name]["slices"] = {
                state: [{"slice": show(piece.box), "file": piece.file, "offset": piece.offset, "bytes": piece.bytes} for piece in reader.slices(name, state)]
                for state in reader.states(name)
            }
    return {
        "checkpoint": str(reader.folder),
        "verified": verified,
        "model": manifest.model,
        "created": manifest.created,
        "topology": manifest.topology.model_dump(),
        "counters": manifest.counters,
        "optimizer": manifest.optimizer.type if manifest.optimizer else None,
        "loss_scale": manifest.loss_scale,
        "libraries": manifest.libraries,
        "parameters": sum(math.prod(entry.shape) for entry in manifest.tensors.values() if entry.kind == "parameter"),
        "files": {name: entry.bytes for name, entry in manifest.files.items()},
        "tensors": tensors,
    }


def _bytes(reader: CheckpointReader, name: str) -> int:
    size = math.prod(reader.manifest.tensors[name].shape)
    return sum(size * dtype.itemsize for dtype in reader.states(name).values())


def _print(document: dict[str, Any]) -> None:
    from deepspeed_autoep.cli.main import show_size

    topology = document["topology"]
    total = sum(document["files"].values())
    print(f"{document['checkpoint']}: {document['model']}, {document['parameters']:,} parameters, {document['created']}")
    print(f"files      {len(document['files'])}, {show_size(total)}, {'whole, by their checksums' if document['verified'] else 'sizes compared only'}")
    print(f"saved by   {topology['world_size']} ranks, tp {topology['tp']}, ep {topology['ep']}, etp {topology['etp']}, ZeRO-{topology['zero_stage']}")
    print("counters   " + ", ".join(f"{name} {value}" for name, value in document["counters"].items()))
    print(f"optimizer  {document['optimizer'] or 'none'}" + (f", loss scale {document['loss_scale']}" if document["loss_scale"] else ""))
    print("libraries  " + ", ".join(f"{name} {value}" for name, value in document["libraries"].items()))
    print()
    width = max((len(name) for name in document["tensors"]), default=0)
    for name, tensor in document["tensors"].items():
        stored = ", ".join(f"{state} {dtype}" for state, dtype in tensor["stored"].items()) or "left out"
        marks = "".join(f", {mark}" for mark, on in (("frozen", not tensor["trained"] and tensor["kind"] == "parameter"), (tensor["kind"], tensor["kind"] == "buffer")) if on)
        also = f", also {', '.join(tensor['also'])}" if "also" in tensor else ""
        print(f"{name:{width}}  {tensor['dtype']} {tensor['shape']}{marks}{also}: {stored}, {show_size(tensor['bytes'])}")
        for state, pieces in tensor.get("slices", {}).items():
            for piece in pieces:
                print(f"    {state} {piece['slice']}: {piece['file']} at {piece['offset']}, {show_size(piece['bytes'])}")
