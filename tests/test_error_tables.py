"""One table of errors: what the API's comments, the service and the client say of it, and what tests see of it."""

from __future__ import annotations

import re
from pathlib import Path

from chairlift_client._errors import ErrorTable
from chairlift_service.errors import TABLE, Reason

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos/chairlift/v1"
CODES = {reason.value: row.code.name for reason, row in TABLE.items()}


def comments(path: Path) -> str:
    """A proto's comments as running text."""
    lines = re.findall(r"^\s*//(.*)$", path.read_text(), re.MULTILINE)
    return " ".join(" ".join(lines).split())


def test_the_list_of_the_api_is_the_services_table() -> None:
    head = (PROTOS / "generation_service.proto").read_text().partition("package")[0]
    text = " ".join(re.sub(r"^//", "", line) for line in head.splitlines())
    listed = {
        reason: code
        for code, reasons in re.findall(r"- ([A-Z_]+): ([A-Z_, ]+)", text)
        for reason in reasons.split(", ")
    }
    assert {reason.strip(): code for reason, code in listed.items()} == CODES


def test_each_status_that_a_comment_names_with_a_reason_is_that_reasons() -> None:
    found = [
        pair
        for path in sorted(PROTOS.glob("*.proto"))
        for pair in re.findall(r"\b([A-Z][A-Z_]+), ([A-Z][A-Z_]+)\b", comments(path))
        if pair[1] in CODES and pair[0] not in CODES
    ]
    assert len(found) >= 6
    assert [pair for pair in found if CODES[pair[1]] != pair[0]] == []


def test_the_client_has_a_class_for_every_status_and_knows_no_other_reasons() -> None:
    assert {code.name for code in ErrorTable.by_code} >= set(CODES.values())
    assert set(CODES) >= ErrorTable.by_reason.keys()


def test_every_reason_is_seen_by_a_test_that_calls_a_service() -> None:
    tests = [*(ROOT / "tests/service").rglob("test_*.py"), *(ROOT / "tests/blackbox").glob("test_*.py")]
    seen = {
        reason
        for text in (path.read_text() for path in tests)
        if "serving(" in text or "live_server(" in text or "program(" in text
        for reason in Reason
        if f'"{reason}"' in text
    }
    assert set(Reason) - seen == set()
