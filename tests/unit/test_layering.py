"""The order of the packages, read from their import statements."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "deepspeed_autoep"
# A unit (a module or package right under deepspeed_autoep) imports from itself and from lines above its own only.
LAYERS = [
    {"errors", "shared_library", "storage"},
    {"config"},
    {"folding"},
    {"compat"},
    {"moe"},
    {"peft_adapters"},
    {"quantization"},
    {"tensor_parallel"},
    {"ops"},
    {"gradients"},
    {"weights"},
    {"checkpoint"},
    {"engine"},
    {"cli"},
]
LEVEL = {unit: level for level, units in enumerate(LAYERS) for unit in units}
COMPAT_USERS = {"tensor_parallel", "weights", "engine", "checkpoint"}
PRIVATE_DEEPSPEED = {"runtime", "module_inject", "utils", "moe", "checkpoint", "ops"}
# Pure modules -> what they must not import.
PURE = {
    "errors.py": ("torch", "deepspeed"),
    "storage.py": ("torch", "deepspeed"),
    "config.py": ("torch", "deepspeed"),
    "folding/spec.py": ("torch", "deepspeed"),
    "folding/families.py": ("torch", "deepspeed"),
    "moe/weight_layout.py": ("torch", "deepspeed"),
    "checkpoint/slices.py": ("torch", "deepspeed"),
    "checkpoint/tensors.py": ("torch.distributed", "deepspeed"),
    "quantization/buffers.py": ("torch", "deepspeed"),
    **{f"checkpoint/stock/{path.name}": ("torch.distributed", "deepspeed") for path in sorted((ROOT / PACKAGE / "checkpoint" / "stock").glob("*.py"))},
    "gradients/slices.py": ("torch.distributed", "deepspeed"),
    "gradients/buckets.py": ("torch.distributed", "deepspeed"),
    "ops/segments.py": ("torch.distributed", "deepspeed"),
    "ops/reference.py": ("torch.distributed", "deepspeed"),
}
MAX_LINES = 500


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


MODULES = sources(PACKAGE)
every_module = pytest.mark.parametrize("path", MODULES, ids=name_of)


def unit_of(path: Path) -> str:
    return path.relative_to(ROOT / PACKAGE).parts[0].removesuffix(".py")


def imported_names(path: Path) -> Iterator[str]:
    """Full dotted names of everything that a file imports, wherever in it: ``from a.b import c`` gives ``a.b.c``."""
    here = path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = [*here[: len(here) - node.level]] if node.level else []
            base = ".".join(parent + ([node.module] if node.module else []))
            yield from (f"{base}.{alias.name}" for alias in node.names)


def attribute_chains(path: Path) -> Iterator[str]:
    """``deepspeed.a.b`` written out in code, which needs no import of its own."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            parts, inner = [], node
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name):
                yield ".".join([inner.id, *reversed(parts)])


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def imported_units(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imported_names(path) if name.startswith(PACKAGE + ".")}


def test_the_reader_finds_imports(tmp_path, monkeypatch):
    """Every form that an import can take: a form it cannot read would make the tests below empty."""
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / PACKAGE / "moe" / "sample.py"
    path.parent.mkdir(parents=True)
    lines = [
        "import torch.distributed as dist",
        "from deepspeed_autoep import compat",
        "from ..engine import zero",
        "from . import layer",
        "def late():",
        "    from deepspeed.utils import groups",
        "    return deepspeed.runtime.engine",
    ]
    path.write_text("\n".join(lines))
    assert set(imported_names(path)) == {
        "torch.distributed",
        "deepspeed_autoep.compat",
        "deepspeed_autoep.engine.zero",
        "deepspeed_autoep.moe.layer",
        "deepspeed.utils.groups",
    }
    assert imported_units(path) == {"compat", "engine", "moe"}
    assert "deepspeed.runtime.engine" in set(attribute_chains(path))


def test_every_unit_has_a_layer():
    units = {unit_of(path) for path in MODULES} - {"__init__"}
    assert units and units <= LEVEL.keys(), f"place {sorted(units - LEVEL.keys())} in LAYERS"


@every_module
def test_imports_go_one_way(path):
    unit = unit_of(path)
    for other in imported_units(path) - {unit}:
        assert unit != "__init__", f"{PACKAGE}/__init__.py imports {other} at import time"
        assert LEVEL[other] < LEVEL[unit], f"{name_of(path)} ({unit}) imports {other}, which lies above it"
        assert other != "compat" or unit in COMPAT_USERS, (
            f"{name_of(path)} imports compat: legal are {sorted(COMPAT_USERS)}"
        )


@every_module
def test_private_deepspeed_is_reached_through_compat_only(path):
    if unit_of(path) == "compat":
        return
    private = [
        name
        for name in [*imported_names(path), *attribute_chains(path)]
        if any(is_within(name, f"deepspeed.{part}") for part in PRIVATE_DEEPSPEED)
    ]
    assert not private


@pytest.mark.parametrize("name, banned", PURE.items())
def test_pure_modules_import_no_machinery(name, banned):
    for imported in imported_names(ROOT / PACKAGE / name):
        assert not any(is_within(imported, package) for package in banned), imported


def test_the_configuration_loads_without_torch_and_deepspeed():
    code = (
        "import sys; import deepspeed_autoep, deepspeed_autoep.config; "
        "print([name for name in ('torch', 'deepspeed', 'transformers') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("path", sources(PACKAGE, "tests", "examples"), ids=name_of)
def test_files_stay_short(path):
    assert len(path.read_text().splitlines()) <= MAX_LINES
