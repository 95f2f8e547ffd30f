"""Package metadata and the C++ files, which are optional: without them the torch forms of the same functions run."""

from __future__ import annotations

import platform
import re
from pathlib import Path

from setuptools import Extension, find_packages, setup

ROOT = Path(__file__).parent
# Model-Optimizer 0.47 imports requests and does not ask for it.
QUANTIZATION = ["nvidia-modelopt>=0.47,<0.48", "requests"]


def version() -> str:
    """Read, not imported: the package's dependencies need not be there yet."""
    text = (ROOT / "deepspeed_autoep" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE).group(1)


def extensions() -> list[Extension]:
    """optional: a missing or failing compiler is a warning of the build, never an error."""

    headers = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("csrc/*.h"))]

    def extension(name: str, source: str, *flags: str) -> Extension:
        return Extension(
            f"deepspeed_autoep.{name}",
            sources=[f"csrc/{source}.cpp"],
            depends=headers,
            language="c++",
            extra_compile_args=["-std=c++17", *flags],
            extra_link_args=["-pthread"],
            optional=True,
        )

    found = [extension("_dispatch_plan", "dispatch_plan", "-O2"), extension("_gradient_ops", "gradient_ops", "-O3")]
    if platform.machine().lower() in ("x86_64", "amd64"):  # chosen when it is loaded, by what the processor has
        avx2 = ("-mavx2", "-mfma", "-mf16c")
        avx512 = (*avx2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
        found.append(extension("_gradient_ops_avx2", "gradient_ops", "-O3", *avx2))
        found.append(extension("_gradient_ops_avx512", "gradient_ops", "-O3", *avx512))
    return found


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
        "safetensors",
        "tqdm",
    ],
    entry_points={"console_scripts": ["deepspeed-autoep = deepspeed_autoep.cli.main:main"]},
    extras_require={
        "gpu": ["triton"],  # comes with torch's CUDA wheels
        "quantization": QUANTIZATION,
        "test": ["pytest", "hypothesis", "ruff", "triton", "peft", *QUANTIZATION],
        "examples": ["matplotlib"],
    },
    ext_modules=extensions(),
    zip_safe=False,
)
