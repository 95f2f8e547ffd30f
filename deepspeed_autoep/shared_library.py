"""Load the package's optional C++ libraries. They have a plain C ABI: no torch headers, and no install can fail on them."""

from __future__ import annotations

import ctypes
import glob
import os

# Set to 1 to run the torch forms of everything that has a C++ one.
DISABLE_VARIABLE = "DEEPSPEED_AUTOEP_DISABLE_CPP"


def load_library(*stems: str) -> ctypes.CDLL | None:
    """The first of the named libraries (file names up to Python's suffix) that was built and loads here, or None."""
    if os.environ.get(DISABLE_VARIABLE) == "1":
        return None
    package = os.path.dirname(os.path.abspath(__file__))
    for stem in stems:
        for path in sorted(glob.glob(os.path.join(package, f"{stem}.*so"))):
            try:
                return ctypes.CDLL(path)
            except OSError:
                continue
    return None
