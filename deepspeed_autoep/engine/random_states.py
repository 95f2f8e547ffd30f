"""The random states of a process, as bytes: torch's on the CPU and the accelerator, Python's, NumPy's."""

from __future__ import annotations

import io
import random

import numpy
import torch
from deepspeed.accelerator import get_accelerator


def random_states() -> bytes:
    kind, keys, place, has_gauss, gauss = numpy.random.get_state()
    version, internal, gauss_next = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "python": (version, list(internal), gauss_next),
        "numpy": (kind, torch.from_numpy(keys.astype("int64")), place, has_gauss, gauss),
    }
    if get_accelerator().device_name() != "cpu":
        states["accelerator"] = get_accelerator().get_rng_state().cpu()
    buffer = io.BytesIO()
    torch.save(states, buffer)
    return buffer.getvalue()


def set_random_states(saved: bytes) -> None:
    """States of a kind that is not in ``saved`` stay as they are."""
    states = torch.load(io.BytesIO(saved), map_location="cpu", weights_only=True)
    torch.set_rng_state(states["torch"])
    version, internal, gauss_next = states["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, place, has_gauss, gauss = states["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), place, has_gauss, gauss))
    if "accelerator" in states and get_accelerator().device_name() != "cpu":
        get_accelerator().set_rng_state(states["accelerator"])
