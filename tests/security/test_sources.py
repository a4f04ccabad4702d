"""What our own code never does, and that SECURITY.md names tests that are there."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml", "xml"}
NAMES = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {("torch", "load"), ("os", "system"), ("os", "popen"), ("numpy", "load"), ("tempfile", "mktemp")}


def dangers(tree: ast.AST) -> Iterator[str]:
    """What of it a source uses."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if name.name.partition(".")[0] in IMPORTS)
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in IMPORTS:
                yield module
            case ast.Call(func=ast.Name(id=name)) if name in NAMES:
                yield name
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name)) if (owner, name) in ATTRIBUTES:
                yield f"{owner}.{name}"
            case ast.keyword(arg="shell" | "allow_pickle", value=ast.Constant(value=True)):
                yield node.arg or ""
            case ast.keyword(arg="weights_only" | "use_safetensors", value=ast.Constant(value=False)):
                yield node.arg or ""


def test_no_source_unpickles_evaluates_or_starts_a_shell() -> None:
    files = [path for folder in ("service", "worker", "client") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 150
    found = {(str(path.relative_to(ROOT)), danger) for path in files for danger in dangers(ast.parse(path.read_text()))}
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "eval('1')",
        "import subprocess\nsubprocess.run('x', shell=True)",
        "f(weights_only=False)",
        "import yaml",
    ],
)
def test_each_of_them_would_be_found(source: str) -> None:
    assert list(dangers(ast.parse(source)))


def test_ruffs_rules_on_security_are_on() -> None:
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert "S" in lint["select"]
    assert {rule for rule in lint["ignore"] if rule.startswith("S") and rule[1:].isdigit()} == {"S101", "S603"}
    for folder, rules in lint["per-file-ignores"].items():
        assert "S" not in rules or folder in {"tests/**", "bench/**"}


def test_every_test_that_the_page_names_is_there() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    tests = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "worker/native/tests").glob("*.cpp")]
    files = set(re.findall(r"\b((?:test|ipc|ring)_\w+\.(?:py|cpp))\b", page))
    assert len(files) > 15
    assert files <= {path.name for path in tests}
    assert all((ROOT / path).is_file() for path in re.findall(r"\b((?:tests|worker)/[\w/]+\.(?:py|cpp))", page))
    functions = set(re.findall(r"`(test_\w+)`", page))
    assert len(functions) > 12
    text = "\n".join(path.read_text() for path in tests)
    assert {name for name in functions if f"def {name}(" not in text} == set()
