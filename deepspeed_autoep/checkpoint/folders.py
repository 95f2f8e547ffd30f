"""Folders of checkpoints: written aside, then renamed; ``latest`` names the last one that is whole.

``save_dir/tag`` is a checkpoint. While it is written it is ``save_dir/.tag.saving``; a checkpoint of the same tag that it
replaces is ``save_dir/.tag.replaced`` between two renames. So a save that dies leaves every other checkpoint as it was, and a
folder without a dot is complete.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from pathlib import Path

from deepspeed_autoep.checkpoint.metadata import MANIFEST
from deepspeed_autoep.errors import CheckpointError
from deepspeed_autoep.storage import sync_folder, write_file

logger = logging.getLogger("deepspeed_autoep")

LATEST = "latest"  # DeepSpeed's name


def check_tag(tag: str) -> None:
    """Raise :class:`CheckpointError` for a tag that is no name of a folder inside of the save folder."""
    # 'latest' is read without the whitespace around it, as DeepSpeed does, and is UTF-8.
    whole = tag and tag == tag.strip() and tag == tag.encode(errors="ignore").decode()
    if not whole or tag.startswith(".") or "/" in tag or os.sep in tag or tag == LATEST or "\0" in tag:
        raise CheckpointError(
            f"tag={tag!r}: legal are names of folders without '/' and whitespace around them, that do not begin with '.', other than {LATEST!r}"
        )


def aside(save_dir: Path, tag: str) -> Path:
    return save_dir / f".{tag}.saving"


def _replaced(save_dir: Path, tag: str) -> Path:
    return save_dir / f".{tag}.replaced"


def begin(save_dir: Path, tag: str) -> Path:
    """An empty folder to write to. What an interrupted save of the tag has left is removed, or put back in its place."""
    save_dir.mkdir(parents=True, exist_ok=True)
    _put_back(save_dir, tag)
    _remove(_replaced(save_dir, tag))
    target = save_dir / tag
    if target.exists() and not (target / MANIFEST).is_file() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is no checkpoint of deepspeed_autoep (it has no {MANIFEST}), so it is not replaced: give another tag, or remove it")
    folder = aside(save_dir, tag)
    if folder.exists():
        shutil.rmtree(folder)
    leftovers = sorted(path.name for path in save_dir.glob(".*.saving"))
    if leftovers:
        logger.warning("%s holds %s, which saves write that are under way or were interrupted. Nothing reads them", save_dir, ", ".join(leftovers))
    folder.mkdir()
    return folder


def commit(save_dir: Path, tag: str) -> None:
    """Make what :func:`begin` gave the checkpoint ``tag``."""
    folder, target, old = aside(save_dir, tag), save_dir / tag, _replaced(save_dir, tag)
    sync_folder(folder)
    if target.exists():
        os.rename(target, old)
    os.rename(folder, target)


def conclude(save_dir: Path, tag: str, save_latest: bool) -> None:
    """What follows a commit: storage, ``latest``, and the checkpoint that was replaced goes."""
    sync_folder(save_dir)
    if save_latest:
        write_latest(save_dir, tag)
    _remove(_replaced(save_dir, tag))


def abandon(save_dir: Path, tag: str) -> None:
    """Remove a save that failed before its commit, as far as that goes; what it was about to replace is put back."""
    shutil.rmtree(aside(save_dir, tag), ignore_errors=True)
    with contextlib.suppress(OSError):  # a load finds it where it is, too
        _put_back(save_dir, tag)


def _put_back(save_dir: Path, tag: str) -> None:
    """After a save that died between the two renames of :func:`commit`."""
    if _replaced(save_dir, tag).exists() and not (save_dir / tag).exists():
        os.rename(_replaced(save_dir, tag), save_dir / tag)


def _remove(folder: Path) -> None:
    """Of no use any more; a reader on another machine may keep it from going."""
    if folder.exists():
        shutil.rmtree(folder, onerror=lambda _, path, error: logger.warning("%s could not be removed: %s", path, error[1]))


def write_latest(save_dir: Path, tag: str) -> None:
    temporary = save_dir / f".{LATEST}.{tag}.saving-file"  # its own, where two engines save to one folder
    write_file(temporary, tag.encode())
    os.replace(temporary, save_dir / LATEST)
    sync_folder(save_dir)


def latest_tag(load_dir: Path, universal: bool = False) -> str | None:
    """What ``latest`` names, or None without such a file; with ``universal`` the one that DeepSpeed's conversion writes."""
    for name in (f"{LATEST}_universal", LATEST) if universal else (LATEST,):
        path = load_dir / name
        if not path.exists():
            continue
        try:
            tag = path.read_bytes().decode().strip()
            check_tag(tag)
        except (OSError, UnicodeDecodeError, CheckpointError) as error:
            raise CheckpointError(f"{path} is damaged: it names no checkpoint ({error}). Give a tag") from None
        return tag
    return None


def find_or_latest(load_dir: Path, tag: str | None, universal: bool = False) -> Path | None:
    """The checkpoint ``tag``; without one, ``load_dir`` where it is a checkpoint itself, or what ``latest`` names, if there is one."""
    if tag is None and (load_dir / MANIFEST).is_file():
        return load_dir.absolute()
    tag = latest_tag(load_dir, universal) if tag is None else tag
    return None if tag is None else find(load_dir, tag)


def find(load_dir: Path, tag: str) -> Path:
    """The folder of a checkpoint. Raises :class:`CheckpointError` that says which there are."""
    check_tag(tag)
    for folder in (load_dir / tag, _replaced(load_dir, tag)):
        if folder.is_dir():
            return folder
    present = sorted(path.parent.name for path in load_dir.glob(f"*/{MANIFEST}"))
    unfinished = f"; a save of it did not end ({aside(load_dir, tag).name})" if aside(load_dir, tag).is_dir() else ""
    has = f"has the checkpoints {present}" if present else "has no checkpoints"
    raise CheckpointError(f"{load_dir / tag} does not exist{unfinished}: {load_dir} {has}")
