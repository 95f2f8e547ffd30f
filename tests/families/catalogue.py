"""Every transformers model family whose experts class is decorated by ``use_experts_implementation``."""

from __future__ import annotations

import ast
import importlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import transformers

DECORATOR = "use_experts_implementation"


@dataclass(frozen=True)
class Family:
    """One experts class: ``name`` is its folder under transformers/models (with a suffix if the folder has several)."""

    name: str
    module: str
    experts_class: str

    @property
    def experts(self) -> type:
        return getattr(importlib.import_module(self.module), self.experts_class)


def _decorated_classes(source: str) -> list[str]:
    classes = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            called = [each.func if isinstance(each, ast.Call) else each for each in node.decorator_list]
            if any(isinstance(each, ast.Name) and each.id == DECORATOR for each in called):
                classes.append(node.name)
    return classes


def _suffix(name: str, others: list[str]) -> str:
    """The capitalised words of class ``name`` that none of ``others`` has."""
    taken = {word for other in others for word in _words(other)}
    return "".join(f"_{word.lower()}" for word in _words(name) if word not in taken) if others else ""


def _words(name: str) -> list[str]:
    return re.findall(r"[A-Z][a-z]*|\d+", name)


@cache
def _families() -> tuple[Family, ...]:
    families = []
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        if DECORATOR not in source:
            continue
        classes = _decorated_classes(source)
        module = f"transformers.models.{path.parent.name}.{path.stem}"
        for name in classes:
            suffix = _suffix(name, [each for each in classes if each != name])
            families.append(Family(path.parent.name + suffix, module, name))
    return tuple(families)


def list_families() -> list[Family]:
    return list(_families())


def find(name: str) -> Family:
    matches = [each for each in _families() if each.name == name]
    if not matches:
        raise KeyError(f"transformers has no experts family named {name!r}")
    return matches[0]
