"""Package metadata and the one C++ file, which is optional: without it the torch form of the same function runs."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import Extension, find_packages, setup

ROOT = Path(__file__).parent


def version() -> str:
    """Read, not imported: the package's dependencies need not be there yet."""
    text = (ROOT / "deepspeed_autoep" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE).group(1)


setup(
    name="deepspeed-autoep",
    version=version(),
    description="DeepSpeed training of Hugging Face mixture-of-experts models under folded tensor and expert parallelism",
    packages=find_packages(include=["deepspeed_autoep", "deepspeed_autoep.*"]),
    include_package_data=False,
    python_requires=">=3.10",
    install_requires=[
        "deepspeed>=0.19.8,<0.20",
        "torch>=2.9",
        "transformers>=5.17,<6",
        "pydantic>=2",
    ],
    extras_require={
        "test": ["pytest", "hypothesis", "ruff"],
        "examples": ["matplotlib", "tqdm"],
    },
    ext_modules=[
        # optional: a missing or failing compiler is a warning of the build, never an error.
        Extension(
            "deepspeed_autoep._dispatch_plan",
            sources=["csrc/dispatch_plan.cpp"],
            language="c++",
            extra_compile_args=["-O2", "-std=c++17"],
            optional=True,
        )
    ],
    zip_safe=False,
)
