from __future__ import annotations

import importlib
import subprocess
import sys
import types

import chairlift_client
import pytest


@pytest.mark.parametrize("name", ["chairlift_client", "chairlift_client.manager", "chairlift_client.testing"])
def test_all_is_exactly_what_is_public(name: str) -> None:
    module = importlib.import_module(name)
    public = {
        attribute
        for attribute, value in vars(module).items()
        if not attribute.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert set(module.__all__) == public


def test_every_error_is_exported() -> None:
    errors = importlib.import_module("chairlift_client._errors")
    classes = {name for name, value in vars(errors).items() if isinstance(value, type) and name.endswith("Error")}
    assert classes <= set(chairlift_client.__all__)


def test_the_package_is_marked_as_typed() -> None:
    assert importlib.resources.files(chairlift_client).joinpath("py.typed").is_file()


def test_the_client_imports_where_only_grpc_and_protobuf_are_installed() -> None:
    program = """
import sys
allowed = {"chairlift", "chairlift_client", "google", "grpc", "typing_extensions", *sys.stdlib_module_names}
class OnlyThose:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0].lstrip("_") not in {name.lstrip("_") for name in allowed}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, OnlyThose())
import chairlift_client, chairlift_client.cli, chairlift_client.testing
try:
    import msgspec
except ModuleNotFoundError:
    print("fine")
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert out.stdout == "fine\n", out.stderr
