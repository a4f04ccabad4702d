"""The program `chairlift`, run inside the test: as a process of its own it would spend most of its time starting."""

from __future__ import annotations

import contextlib
import io
import subprocess
from unittest import mock

from chairlift_client.cli import main


def chairlift(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command line. Returns its exit code and what it wrote."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch("sys.stdin", io.StringIO(stdin)),
    ):
        try:
            code = main(args)
        except SystemExit as exit_:  # argparse
            code = int(exit_.code or 0)
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())
