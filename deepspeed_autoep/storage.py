"""Files and folders that are on storage when a call returns."""

from __future__ import annotations

import errno
import os
from pathlib import Path

# What file systems answer that cannot sync folders, some network and user-space ones among them.
_CANNOT = (errno.EBADF, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


def write_file(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Its entries: renames before the call are on storage before those after it, where the file system can say so. Raises
    ``OSError`` where it can and fails."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
    finally:
        os.close(handle)
