"""The chat templates that a model brings, and what they may refer to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_DEFAULT: Final = "default"
_WITH_TOOLS: Final = "tool_use"
_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplates:
    """Templates by name; at least one. Read as transformers reads them (PreTrainedTokenizerBase.from_pretrained)."""

    by_name: Mapping[str, str]
    special_tokens: Mapping[str, str]  # variables of every template, such as bos_token
    control_tokens: list[str] | None  # which added tokens are control tokens, where the model says so

    @classmethod
    def load(cls, folder: str | Path) -> ChatTemplates | None:
        """Those of a tokenizer's folder; None if there are none.

        chat_template.jinja and additional_chat_templates/*.jinja go before the entry in tokenizer_config.json, which is
        one template or a list of named ones. Raises ValueError, one line, for files that cannot be read.
        """
        folder = Path(folder)
        try:
            config = _config(folder)
            files = {_DEFAULT: folder / "chat_template.jinja"}
            files |= {file.stem: file for file in (folder / "additional_chat_templates").glob("*.jinja")}
            by_name = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
            by_name = by_name or _of_config(config.get("chat_template"))
            special = {name: config[name] for name in _SPECIAL_TOKENS if config.get(name) is not None}
            control = config.get("chat_control_tokens")
            if not by_name:
                return None
            return cls(
                by_name=by_name,
                special_tokens={
                    name: str(token["content"] if isinstance(token, dict) else token) for name, token in special.items()
                },
                control_tokens=None if control is None else [str(token) for token in control],
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"cannot read the chat template in {folder}: {error!r}") from error

    def choose(self, name: str, *, with_tools: bool) -> str | None:
        """The template of that name, or the one to take where none is named; None if there is none."""
        if name:
            return self.by_name.get(name)
        if with_tools and _WITH_TOOLS in self.by_name:
            return self.by_name[_WITH_TOOLS]
        return self.by_name.get(_DEFAULT)


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if "added_tokens_decoder" not in config and (old := folder / "special_tokens_map.json").is_file():
        config |= json.loads(old.read_text(encoding="utf-8"))
    return config


def _of_config(entry: Any) -> dict[str, str]:
    """The entry `chat_template` of tokenizer_config.json."""
    if isinstance(entry, str):
        return {_DEFAULT: entry}
    return {str(each["name"]): str(each["template"]) for each in entry or []}
