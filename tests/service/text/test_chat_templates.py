"""Where chat templates are found, and which is taken: as transformers reads the same folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chairlift_service.text.chat_templates import ChatTemplates
from support import chat_templates as made

NAMED = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}, {"name": "rag", "template": "r"}]


def write(folder: Path, *, entry: object, files: dict[str, str]) -> ChatTemplates | None:
    made.chat_folder(folder, template=entry)
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return ChatTemplates.load(folder)


PLACES = [
    ("one ř", {}),
    (NAMED, {}),
    (NAMED, {"chat_template.jinja": "from a file"}),
    (None, {"chat_template.jinja": "from a file"}),
    ("entry", {"additional_chat_templates/tool_use.jinja": "tools"}),
    (None, {"chat_template.jinja": "x", "additional_chat_templates/tool_use.jinja": "y"}),
]


@pytest.mark.parametrize(("entry", "files"), PLACES)
def test_templates_are_those_that_transformers_finds(tmp_path: Path, entry: object, files: dict[str, str]) -> None:
    templates = write(tmp_path, entry=entry, files=files)
    assert templates is not None
    found = made.reference(tmp_path).chat_template
    assert templates.by_name == ({"default": found} if isinstance(found, str) else found)
    for tools in (None, [{}]):
        try:
            wanted = made.reference(tmp_path).get_chat_template(None, tools)
        except ValueError:
            wanted = None
        assert templates.choose("", with_tools=bool(tools)) == wanted


def test_a_template_can_be_named(tmp_path: Path) -> None:
    templates = write(tmp_path, entry=NAMED, files={})
    assert templates is not None
    assert templates.choose("rag", with_tools=True) == "r"
    assert templates.choose("other", with_tools=False) is None


def test_a_folder_without_templates_has_none(tmp_path: Path) -> None:
    assert write(tmp_path, entry=None, files={}) is None
    assert ChatTemplates.load(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"eos_token": {"__type": "AddedToken", "content": "</s>"}, "pad_token": "<|im_end|>", "unk_token": None},
        {"extra_special_tokens": ["<|im_start|>"], "mask_token": "<|eot_id|>"},
    ],
)
def test_special_tokens_are_variables_as_in_transformers(tmp_path: Path, config: dict[str, object]) -> None:
    made.chat_folder(tmp_path, template="x", config=config)
    templates = ChatTemplates.load(tmp_path)
    assert templates is not None
    assert templates.special_tokens == made.reference(tmp_path).special_tokens_map


def test_special_tokens_of_old_folders_stand_in_a_file_of_their_own(tmp_path: Path) -> None:
    made.chat_folder(tmp_path, template="x")
    tokens = {"bos_token": {"content": "<|im_start|>"}, "sep_token": "</s>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    templates = ChatTemplates.load(tmp_path)
    assert templates is not None
    assert templates.special_tokens == made.reference(tmp_path).special_tokens_map
    assert templates.special_tokens["bos_token"] == "<|im_start|>"


def test_control_tokens_that_the_model_names_are_kept(tmp_path: Path) -> None:
    made.chat_folder(tmp_path, template="x", config={"chat_control_tokens": ["<think>"]})
    templates = ChatTemplates.load(tmp_path)
    assert templates is not None
    assert templates.control_tokens == ["<think>"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", '{"chat_template": [1]}'),
        ("tokenizer_config.json", '{"chat_template": 5}'),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_in_one_line(tmp_path: Path, name: str, content: str | bytes) -> None:
    made.chat_folder(tmp_path)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match="chat template") as caught:
        ChatTemplates.load(tmp_path)
    assert "\n" not in str(caught.value)
