"""Chat templates in the styles of well-known model families, and folders that hold one with a tokenizer for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from support import tokenizer_files

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
    "'\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

LLAMA_3 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim \
+ '<|eot_id|>' %}
    {{- content }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if not (message.role == 'tool' or message.tool_calls is defined) %}
        {%- if (message['role'] == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('After the optional system message, roles must alternate user/assistant') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{%- for message in loop_messages %}
    {%- if message['role'] == 'user' %}
        {%- if tools is not none and loop.last %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": ' + (tool.function | tojson) + '}' }}
                {{- ', ' if not loop.last else '' }}
            {%- endfor %}
            {{- '][/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- '[INST] ' + system_message + '\n\n' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + '[/INST]' }}
        {%- endif %}
    {%- elif message.tool_calls is defined %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {{- call.function | tojson }}{{ ', ' if not loop.last else '' }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- elif message['role'] == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + '}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('Only user, assistant and tool roles are supported, got ' + message['role']) }}
    {%- endif %}
{%- endfor %}
"""

GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}\
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

# As reasoning models' do: the reasoning of earlier answers is cut out of their text.
THINKING = """\
{%- for message in messages %}
    {%- set content = message.content %}
    {%- set reasoning = '' %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if reasoning and loop.last %}
        {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}
    {%- endif %}
    {{- content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""

SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "<start_of_turn>",
    "<end_of_turn>",
]


def byte_level() -> Tokenizer:
    """Llama 3 style: byte-level, BOS put in front."""
    tokenizer = tokenizer_files.byte_level()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bos)]
    )
    return tokenizer


def first_prefix() -> Tokenizer:
    """Newer Llama 2 and Mistral style: ▁ in front of the whole text only, not after each special token."""
    tokenizer = tokenizer_files.byte_fallback()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


TOKENIZERS = {
    "byte level": byte_level,
    "prefix for each piece": tokenizer_files.byte_fallback,
    "prefix for the whole": first_prefix,
    "gemma": tokenizer_files.gemma,
}


def chat_folder(
    folder: Path,
    *,
    tokenizer: Tokenizer | None = None,
    template: object = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """A tokenizer's folder with this entry `chat_template`, and every control token of the templates above."""
    tokenizer = tokenizer or byte_level()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    entries = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        **({} if template is None else {"chat_template": template}),
        **(config or {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(entries), encoding="utf-8")
    return folder


def reference(folder: Path) -> PreTrainedTokenizerFast:
    """transformers' own reading of the folder."""
    return PreTrainedTokenizerFast.from_pretrained(folder)
