"""``training_state.pt``: the client's state and the scheduler's, any Python objects."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import torch

from deepspeed_autoep.errors import CheckpointError


def training_state_bytes(client_state: Any, others: dict[str, Any]) -> bytes:
    """The file: ``client_state`` beside ``others``. Raises :class:`CheckpointError` that names what cannot be pickled."""
    if not isinstance(client_state, dict | None):
        raise CheckpointError(f"client_state is a {type(client_state).__name__}: legal are a dict and None")
    client_state = dict(client_state or {})
    try:
        return saved_bytes({"client_state": client_state, **others})
    except Exception:
        for key, value in client_state.items():
            _require(saved_bytes, value, f"client_state[{key!r}]", _PICKLED)
        for name, state in others.items():
            for key, value in state.items() if isinstance(state, dict) else ():
                _require(saved_bytes, value, f"{name}'s {key!r}", _PICKLED)
        raise


_PICKLED = "pickled: legal are objects of classes and functions that a module has"


def config_bytes(config: Any, name: str) -> bytes:
    """A transformers configuration as its JSON file. Raises :class:`CheckpointError` that names the attribute that JSON has nothing for."""
    try:
        return config.to_json_string(use_diff=False).encode()
    except Exception:
        for key, value in config.to_dict().items():
            _require(json.dumps, value, f"{name}.{key}", "written as JSON: legal are numbers, strings, lists and dicts of them")
        raise


def _require(write: Callable, value: Any, name: str, how: str) -> None:
    try:
        write(value)
    except Exception as error:
        raise CheckpointError(f"{name} is a {type(value).__name__} that cannot be {how} ({type(error).__name__}: {error})") from None


def saved_bytes(value: Any) -> bytes:
    """As torch.save writes it. Raises whatever that does."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
