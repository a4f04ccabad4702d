"""The tokenizer as files that the service reads without transformers: tokenizer.json and its companions."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from chairlift_worker.model.cache_folder import cache_folder, made_once
from chairlift_worker.model.errors import ModelError

TOKENIZER_FILE = "tokenizer.json"


def tokenizer_folder(asked: str, location: str, *, revision: str | None, trust_remote_code: bool) -> Path:
    """A folder that holds tokenizer.json: the model's own if it has one, else a converted copy in the cache.

    `location` is a folder or a hub id, `revision` the commit of a hub id. Raises ModelError if there is no tokenizer,
    or none that converts.
    """
    folder = Path(location)
    if (folder / TOKENIZER_FILE).is_file():
        return folder
    state = [location, str(revision)]
    if folder.is_dir():
        state += [f"{f.name}:{f.stat().st_size}:{f.stat().st_mtime_ns}" for f in sorted(folder.iterdir())]
    key = hashlib.sha256("\n".join(state).encode()).hexdigest()[:32]

    def fill(target: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(location, trust_remote_code=trust_remote_code)
        tokenizer.save_pretrained(target)
        if not (target / TOKENIZER_FILE).is_file():
            raise ModelError(
                f"model = {asked}: its tokenizer {type(tokenizer).__name__} cannot be made a {TOKENIZER_FILE}"
            )

    return made_once(cache_folder() / "tokenizer" / key, fill)


def eos_of_tokenizer(folder: Path) -> int | None:
    """The id of the EOS token that tokenizer_config.json names; None if it names none that exists."""
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return None
    eos = json.loads(file.read_text(encoding="utf-8")).get("eos_token")
    if isinstance(eos, dict):  # an AddedToken, written out
        eos = eos.get("content")
    if not isinstance(eos, str):
        return None
    found: int | None = Tokenizer.from_file(str(folder / TOKENIZER_FILE)).token_to_id(eos)
    return found
