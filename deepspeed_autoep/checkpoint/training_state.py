"""``training_state.pt``: the client's state and the scheduler's, any Python objects."""

from __future__ import annotations

import io
from typing import Any

import torch

from deepspeed_autoep.errors import CheckpointError


def training_state_bytes(client_state: Any, others: dict[str, Any]) -> bytes:
    """The file: ``client_state`` beside ``others``. Raises :class:`CheckpointError` that names the key of a client state that cannot be pickled."""
    if not isinstance(client_state, dict | None):
        raise CheckpointError(f"client_state is a {type(client_state).__name__}: legal are a dict and None")
    client_state = dict(client_state or {})
    try:
        return saved_bytes({"client_state": client_state, **others})
    except Exception:
        _raise_unpicklable(client_state)
        raise


def _raise_unpicklable(client_state: dict) -> None:
    for key, value in client_state.items():
        try:
            saved_bytes(value)
        except Exception as error:
            raise CheckpointError(
                f"client_state[{key!r}] is a {type(value).__name__} that cannot be pickled ({type(error).__name__}: {error}): legal are objects of "
                "classes and functions that a module has"
            ) from None


def saved_bytes(value: Any) -> bytes:
    """As torch.save writes it. Raises whatever that does."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
