"""Text as bytes: one token a byte, a training part and a validation part, batches that every rank draws alike."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

VOCAB = 256
SEPARATOR = b"\0"  # between files; also the models' begin and end token
MAX_BYTES = 16 << 20
VALIDATION_SHARE = 0.05


class CorpusError(ValueError):
    """The text cannot be used."""


@dataclass(frozen=True)
class Corpus:
    """``training`` [N] and ``validation`` [V] bytes: the validation part is the contiguous tail of the text."""

    source: str
    training: torch.Tensor
    validation: torch.Tensor

    def batch(self, step: int, samples: int, length: int, seed: int) -> torch.Tensor:
        """[samples, length] random windows of the training part, a function of the arguments only."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(0, len(self.training) - length + 1, (samples,), generator=generator)
        return _windows(self.training, starts, length)

    def validation_windows(self, samples: int, length: int) -> torch.Tensor:
        """[samples, length] windows, evenly spaced over the validation part."""
        return _windows(self.validation, torch.linspace(0, len(self.validation) - length, samples).long(), length)

    def unigram_entropy(self) -> float:
        """Nats a byte of the validation part: no model that ignores the context has a smaller loss on it."""
        shares = torch.bincount(self.validation.long(), minlength=VOCAB).double() / len(self.validation)
        return torch.special.entr(shares).sum().item()


def _windows(text: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    return text[starts[:, None] + torch.arange(length)].long()


def load_corpus(path: str | None, length: int) -> Corpus:
    """The text of a file, of the text files under a folder, or (None) of the standard library's top-level modules.

    At most the first ``MAX_BYTES`` are used. Raises :class:`CorpusError`.
    """
    if path is None:
        source, files = "the Python standard library", sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    elif Path(path).is_dir():
        source, files = path, sorted(file for file in Path(path).rglob("*") if file.is_file())
    elif Path(path).is_file():
        source, files = path, [Path(path)]
    else:
        raise CorpusError(f"--data {path}: no such file or folder")

    text = _join(files)
    cut = len(text) - int(len(text) * VALIDATION_SHARE)
    if len(text) - cut < length:
        needed = int(length / VALIDATION_SHARE) + 1
        raise CorpusError(f"{source} has {len(text)} bytes of text: --length {length} needs at least {needed}")
    # A bytearray: torch warns about a buffer that it could not write to.
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return Corpus(source, tokens[:cut], tokens[cut:])


def _join(files: list[Path]) -> bytes:
    pieces, size = [], 0
    for file in files:
        with open(file, "rb") as stream:
            content = stream.read(MAX_BYTES - size)
        if SEPARATOR in content:  # not text
            continue
        pieces.append(content)
        size += len(content) + len(SEPARATOR)
        if size >= MAX_BYTES:
            break
    return SEPARATOR.join(pieces)
