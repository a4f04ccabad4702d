"""README.md says what is true."""

from __future__ import annotations

import re
from pathlib import Path

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


def test_every_test_that_the_table_of_capabilities_names_is_there() -> None:
    table = README.split("## Capability by capability")[1].split("\n## ")[0]
    known = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    named = re.findall(r"(test_\w+\.py)", table)
    assert len(named) > 20
    assert set(named) <= known
    for folder in re.findall(r"(tests(?:/\w+)+)(?![\w./])", table):
        assert (ROOT / folder).is_dir(), folder
