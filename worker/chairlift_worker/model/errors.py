"""Why a model cannot be served."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ModelError(Exception):
    """The model cannot be loaded or served. The message is one line that names the model setting and the cause."""


class WeightsError(Exception):
    """Weights cannot take the place of those that run. The text is what `WeightsMsg.error` says."""


@contextmanager
def told_in_one_line(model: str) -> Iterator[None]:
    """Whatever loading raises becomes a ModelError that begins with the model's name."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(f"model = {model}: {lines[0].strip()}") from error
