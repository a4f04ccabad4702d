"""What can be wrong with a constraint."""

from __future__ import annotations


class ConstraintError(Exception):
    """A grammar cannot be followed; the text is a reason of errors.py, a colon, a sentence."""
