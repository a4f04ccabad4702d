"""What a model writes must not drive the terminal that it is shown in."""

from __future__ import annotations

import os
import pty

import pytest
from chairlift_client.cli._output import for_terminal, write_text

# Sets the title, clears the screen, asks the terminal to type back (DECRQSS), rings, C1's CSI; then what is harmless.
HOSTILE = "a\x1b]0;title\x07b\x1b[2Jc\x1bP$qm\x1b\\d\r\x08\x9b31me\x7f"
HARMLESS = "línea\n\ttab 漢字 \N{FAMILY}\u200d\N{GIRL}"


def test_a_terminal_gets_no_control_characters() -> None:
    shown = for_terminal(HOSTILE)
    assert not [c for c in shown if ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0]
    assert len(shown) == len(HOSTILE)
    assert for_terminal(HARMLESS) == HARMLESS


def test_a_file_gets_the_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    write_text(HOSTILE)
    assert capsys.readouterr().out == HOSTILE


def test_it_is_the_terminal_that_makes_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    try:
        with os.fdopen(slave, "w") as terminal:
            monkeypatch.setattr("sys.stdout", terminal)
            write_text(HOSTILE)
        assert b"\x1b" not in os.read(master, 1000)
    finally:
        os.close(master)
