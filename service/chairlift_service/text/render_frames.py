"""What goes over the socket between `renderer` and `render_program`: four bytes of length, then JSON."""

from __future__ import annotations

import struct
from typing import Final

HEADER: Final = struct.Struct("=I")
MAX_TEXT_BYTES: Final = 16 * 2**20
"""No prompt is longer; a template that writes more is at fault."""
MAX_ANSWER_BYTES: Final = 6 * MAX_TEXT_BYTES + 1024
"""JSON takes six bytes for one, at most."""
