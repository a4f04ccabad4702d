"""The tokenizer's files as one zip, for gateways that have no folder of the model."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from pathlib import Path
from typing import Final

NAMES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""What goes along, as far as it is there; nothing else of the folder does."""

CHUNK_BYTES: Final = 32 * 1024
"""Half of the least `max_message_bytes`."""

_LONG_AGO: Final = (1980, 1, 1, 0, 0, 0)  # for every file, so that the same files are the same zip


class TokenizerBundle:
    """Packs the files of a folder when they are first asked for, and keeps the zip."""

    def __init__(self) -> None:
        self._packing = asyncio.Lock()
        self._packed: bytes | None = None

    async def data(self, folder: str) -> bytes:
        """The zip. `folder` is always the same."""
        async with self._packing:
            if self._packed is None:
                self._packed = await asyncio.to_thread(pack, Path(folder))
            return self._packed


def pack(folder: Path) -> bytes:
    """A zip of the tokenizer's files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in NAMES:
            if (folder / name).is_file():
                entry = zipfile.ZipInfo(name, date_time=_LONG_AGO)
                archive.writestr(entry, (folder / name).read_bytes(), compress_type=zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def fingerprint(data: bytes) -> str:
    """What the last chunk carries."""
    return hashlib.sha256(data).hexdigest()
