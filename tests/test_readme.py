"""README.md says what is true."""

from __future__ import annotations

import re
from pathlib import Path

from chairlift.v1 import request_pb2
from chairlift_service.errors import table

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def rendered_errors() -> str:
    rows = "\n".join(f"| {reason} | {status} | {retry} | {meaning} |" for reason, status, retry, meaning in table())
    return f"| reason | status | retry | meaning |\n|---|---|---|---|\n{rows}"


def test_the_error_table_is_the_services() -> None:
    found = re.search(r"<!-- errors -->\n(.*?)\n<!-- /errors -->", README, re.DOTALL)
    assert found is not None
    assert found[1] == rendered_errors(), f"paste this into README.md:\n{rendered_errors()}"


def test_every_file_that_a_readme_links_to_is_there() -> None:
    for readme in [ROOT / "README.md", *ROOT.glob("*/README.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", readme.read_text()):
            assert (readme.parent / link).exists(), f"{readme.name} links to {link}"


def test_the_readme_opens_with_the_two_commands() -> None:
    first_block = README.split("```")[1]
    assert [line.split("#")[0].strip() for line in first_block.strip().splitlines()] == ["make demo", "make test"]


def test_every_test_that_the_tables_name_is_there() -> None:
    known = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    for title in ("Capability by capability", "Option by option", "Promises"):
        table = README.split(f"## {title}")[1].split("\n## ")[0]
        named = re.findall(r"(test_\w+\.py)", table)
        assert len(named) > 10
        assert set(named) <= known
        for place in re.findall(r"(tests(?:/\w+)+(?:\.py)?)(?![\w./])", table):
            assert (ROOT / place).exists(), place


def test_every_option_of_a_request_has_its_row_and_its_test() -> None:
    table = README.split("## Option by option")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    named = {name.split(".")[-1] for row in rows for name in re.findall(r"`([\w.]+)`", row[5])}
    messages = (request_pb2.SamplingParams, request_pb2.StopParams, request_pb2.LogprobParams, request_pb2.OutputParams)
    options = {field.name for message in messages for field in message.DESCRIPTOR.fields}
    shape = {"temperature", "top_k", "top_p"}  # `sampling`
    assert options - named - shape == set()
    for row in rows:
        assert "test_" in row[6] or "not yet" in row[5], row[0]
