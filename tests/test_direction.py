"""Imports point one way only: from what decides to what is decided about (ARCHITECTURE.md)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "stoker"

# From left to right; a module may import what stands further right, and its own package.
LAYERS = [
    {"__main__"},
    {"cli"},
    {"commands"},
    {"tuning", "planning", "checks", "staging", "attach", "tasks"},
    {"output"},
    {"training"},
    {"probe"},
    {"augment", "models"},
    {"data"},
    {"clock"},
    {"run_folder"},
    {"config"},
    {"facts", "environment", "lease", "files"},
    {"redact"},
    {"errors", "version"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
PURE = {"checks", "facts", "errors", "redact"}
HEAVY = {"torch", "torchvision", "timm", "numpy", "cv2", "monai"}
MODULES = sorted(SOURCE.rglob("*.py"))


def part_of(path: Path) -> str:
    relative = path.relative_to(SOURCE)
    return relative.parts[0].removesuffix(".py")


def imports_of(path: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are written in full"
            found.append((node.lineno, node.module or ""))
    return found


def wrong_imports(part: str, imports: list[tuple[int, str]]) -> list[str]:
    wrong = []
    for line, name in imports:
        top, _, rest = name.partition(".")
        if top == "stoker" and rest:
            target = rest.split(".")[0]
            if target != part and RANK[target] <= RANK[part]:
                wrong.append(f"line {line}: {part} must not import {name}")
        elif part in PURE and top in HEAVY:
            wrong.append(f"line {line}: {part} is plain Python and must not import {name}")
    return wrong


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_right(path: Path) -> None:
    part = part_of(path)
    if part == "__init__":
        return
    assert part in RANK, f"{part} has no place in the layers: add it to LAYERS and to ARCHITECTURE.md"
    assert wrong_imports(part, imports_of(path)) == []


def test_a_wrong_import_would_be_found() -> None:
    assert wrong_imports("config", [(1, "stoker.output.text")]) == ["line 1: config must not import stoker.output.text"]
    assert wrong_imports("checks", [(2, "torch.nn")]) != []


def test_only_output_prints() -> None:
    printing = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in MODULES
        if part_of(path) != "output"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert printing == []
