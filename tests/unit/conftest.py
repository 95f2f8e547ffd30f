import gc
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are decorated

import pytest

from tests.unit.pool import close_pools


@pytest.fixture(scope="session", autouse=True)
def _pools():
    gc.freeze()  # what was imported for the tests, which each collection would look through
    yield
    close_pools()
    gc.unfreeze()
