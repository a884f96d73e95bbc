"""Imports go in one direction only (ARCHITECTURE.md)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "stoker"

# From left to right; a module may import what is further right, and its own package.
LAYERS = [
    {"__main__"},
    {"cli"},
    {"commands"},
    {"report"},
    {"tune", "verify", "stage"},
    {"doctor"},
    {"plan"},
    {"trial"},
    {"tasks"},
    {"train"},
    {"loader"},
    {"io"},
    {"profile"},
    {"run"},
    {"config"},
    {"attach"},
    {"core"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
PURE = {
    "doctor/checks",
    "profile/observed.py",
    "plan/records.py",
    "doctor/diagnosis.py",
    "core/errors.py",
    "core/finding.py",
    "core/redact.py",
    "core/units.py",
}
"""Plain Python: a check gets observations, and neither measures nor computes with arrays."""
HEAVY = {"torch", "torchvision", "timm", "numpy", "cv2", "monai"}
MODULES = sorted(SOURCE.rglob("*.py"))

KNOW_KINDS = {"tasks", "config"}


def imports_of(path: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are written in full"
            found.append((node.lineno, node.module or ""))
    return found


def wrong_imports(module: str, imports: list[tuple[int, str]]) -> list[str]:
    wrong = []
    part = module.split("/")[0].removesuffix(".py")
    for line, name in imports:
        top, _, rest = name.partition(".")
        if top == "stoker" and rest:
            target = rest.split(".")[0]
            # `attach` runs inside anybody's script.
            if target != part and (part == "attach" or RANK[target] <= RANK[part]):
                wrong.append(f"{module}:{line} must not import {name}")
        elif top in HEAVY and any(module.startswith(pure) for pure in PURE):
            wrong.append(f"{module}:{line} is plain Python and must not import {name}")
    return wrong


def prints(module: str, text: str) -> list[str]:
    """Lines where a module writes to the terminal itself, with print or the streams of sys."""
    if module == "core/console.py":
        return []
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            found.append(f"{module}:{node.lineno} prints")
        if (
            isinstance(node, ast.Attribute)
            and node.attr in ("write", "writelines")
            and isinstance(node.value, ast.Attribute)
            and node.value.attr in ("stdout", "stderr")
        ):
            found.append(f"{module}:{node.lineno} writes to {node.value.attr}")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_one_way_and_only_the_console_prints(path: Path) -> None:
    module = path.relative_to(SOURCE).as_posix()
    part = module.split("/")[0].removesuffix(".py")
    if part == "__init__":
        return
    assert part in RANK, f"{part} has no place in the layers: add it to LAYERS and to ARCHITECTURE.md"
    assert wrong_imports(module, imports_of(path)) == []
    assert prints(module, path.read_text()) == []


def asks_for_kind(text: str) -> bool:
    """Whether a module asks which kind of data a config has, or imports one."""
    return re.search(r"segment3d|\.task [!=]=|stoker\.tasks\.(images|volumes)", text) is not None


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_only_tasks_and_config_ask_which_kind_of_data_it_is(path: Path) -> None:
    module = path.relative_to(SOURCE).as_posix()
    if module.split("/")[0] not in KNOW_KINDS:
        assert not asks_for_kind(path.read_text())


def test_violations_are_found() -> None:
    assert wrong_imports("config/keys.py", [(1, "stoker.report.page")]) == [
        "config/keys.py:1 must not import stoker.report.page"
    ]
    assert wrong_imports("doctor/checks/facts.py", [(2, "torch.nn")]) != []
    assert wrong_imports("attach/ring.py", [(2, "stoker.core.units")]) != []
    assert wrong_imports("attach/ring.py", [(2, "stoker.attach.session")]) == []
    assert wrong_imports("doctor/config_trials.py", [(2, "torch.nn"), (3, "stoker.plan.records")]) == []
    assert prints("plan/summary.py", "def f():\n    print(1)\n") == ["plan/summary.py:2 prints"]
    assert prints("cli.py", "import sys\nsys.stdout.write('x')\n") == ["cli.py:2 writes to stdout"]
    assert prints("core/console.py", "print(1)") == []
    assert asks_for_kind('if config.task == "classify":')
    assert not asks_for_kind("if config.tasks == 2:")


def test_every_layer_exists() -> None:
    parts = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in MODULES} - {"__init__"}
    assert parts == set(RANK)


def test_a_class_name_stands_for_one_thing() -> None:
    names = [
        node.name
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert sorted({name for name in names if names.count(name) > 1}) == []
