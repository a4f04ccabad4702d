"""Tokenizers that are costly to make, once for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import tokenizer_files


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_files.smollm2(tmp_path_factory.mktemp("smollm2"))
