"""Sizes that keep the code readable. Raising a number is a commit of its own, with a reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 300
MAX_METHODS = 15
MAX_ATTRIBUTES = 15
MAX_FUNCTION_LINES = 50
MAX_NATIVE_FILE_LINES = 400


def sources() -> Iterator[Path]:
    for folder in ("service", "worker", "client", "bench"):
        yield from (path for path in (ROOT / folder).rglob("*.py"))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def num_code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the function without its docstring."""
    first = function.body[0]
    has_docstring = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    docstring = (first.end_lineno or 0) - first.lineno + 1 if has_docstring else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def self_attributes(cls: ast.ClassDef) -> set[str]:
    return {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def violations(path: Path, *, root: Path = ROOT) -> Iterator[str]:
    text = path.read_text()
    name = path.relative_to(root)
    if text.count("\n") > MAX_FILE_LINES:
        yield f"{name}: {text.count(chr(10))} lines, at most {MAX_FILE_LINES}"
    tree = ast.parse(text)
    for function in functions(tree):
        if num_code_lines(function) > MAX_FUNCTION_LINES:
            yield f"{name}:{function.lineno} {function.name}: {num_code_lines(function)} lines of {MAX_FUNCTION_LINES}"
    for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        methods = [node for node in cls.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        if len(methods) > MAX_METHODS:
            yield f"{name}:{cls.lineno} {cls.name}: {len(methods)} methods, at most {MAX_METHODS}"
        if len(self_attributes(cls)) > MAX_ATTRIBUTES:
            yield f"{name}:{cls.lineno} {cls.name}: {len(self_attributes(cls))} attributes, at most {MAX_ATTRIBUTES}"


def test_no_file_class_or_function_is_larger_than_its_budget() -> None:
    found = [
        line for path in sources() if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")) for line in violations(path)
    ]
    assert not found, "\n".join(found)


def test_no_native_file_is_larger_than_its_budget() -> None:
    files = [path for path in (ROOT / "worker/native").rglob("*") if path.suffix in {".cpp", ".hpp"}]
    found = [path for path in files if path.read_text().count("\n") > MAX_NATIVE_FILE_LINES]
    assert files
    assert not found


def test_the_budget_finds_what_is_too_large(tmp_path: Path) -> None:
    methods = "".join(f"    def m{i}(self):\n        self.a{i} = {i}\n" for i in range(20))
    long = "def long():\n    'Not counted.'\n" + "    pass\n" * 60
    (tmp_path / "big.py").write_text(f"class Big:\n{methods}{long}" + "x = 1\n" * 300)
    found = "\n".join(violations(tmp_path / "big.py", root=tmp_path))
    assert "403 lines, at most 300" in found
    assert "Big: 20 methods" in found
    assert "Big: 20 attributes" in found
    assert "long: 61 lines of 50" in found
