"""From a conversation to a prompt, as the model's own chat template makes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from chairlift_service.text.chat_templates import ChatTemplates
from chairlift_service.text.control_tokens import ControlTokens, Marks, Span
from chairlift_service.text.renderer import Renderer, TemplateError
from chairlift_service.text.tokenizer import Tokenizer

LONG_CHAT_BYTES: Final = 64 * 1024  # larger ones are searched for control tokens off the event loop
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a template is given; all of it JSON values, as transformers' `apply_chat_template` prepares them."""

    messages: Sequence[Mapping[str, Any]]  # at least one
    tools: Sequence[Mapping[str, Any]] = ()
    documents: Sequence[Mapping[str, Any]] = ()
    arguments: Mapping[str, Any]
    template: str = ""  # its name; empty: what `ChatTemplates.choose` takes
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    allow_special_tokens: bool = False
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """A prompt as text. At `plain` stand control tokens that callers wrote, which are ordinary text."""

    text: str
    plain: Sequence[Span] = ()


class ChatPrompts:
    """Renders and tokenises conversations for one model."""

    def __init__(self, *, templates: ChatTemplates, tokenizer: Tokenizer, renderer: Renderer) -> None:
        self.templates: Final = templates
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._control_tokens: dict[str, ControlTokens] = {}  # by template

    @classmethod
    def load(cls, folder: str, *, tokenizer: Tokenizer) -> ChatPrompts | None:
        """With the templates of a tokenizer's folder; None if it has none. Raises ValueError, one line."""
        templates = ChatTemplates.load(folder)
        return cls(templates=templates, tokenizer=tokenizer, renderer=Renderer()) if templates is not None else None

    async def render(self, conversation: Conversation) -> RenderedChat:
        """The prompt. The conversation's template must be there (`templates.choose`).

        Raises TemplateError with the template's own words, also where it hides whose a control token is, or does not
        show the end of a message that is to be continued; ServiceError QUEUE_FULL if too many conversations wait.
        """
        template = self.templates.choose(conversation.template, with_tools=bool(conversation.tools))
        assert template is not None
        marks, given = await _off_loop(conversation, lambda: _given(conversation, template))
        plain = await self._text(template, conversation, given, marks)
        if conversation.allow_special_tokens:
            return RenderedChat(text=plain)
        control_tokens = await self._of_template(template)
        marked_given = await _off_loop(conversation, lambda: control_tokens.marked(given, marks))
        if marked_given == given:
            return RenderedChat(text=plain)
        marked = await self._text(template, conversation, marked_given, marks)
        spans = await _off_loop(conversation, lambda: control_tokens.callers(plain, marked, marks))
        if spans is None:
            raise TemplateError(
                "the template changes, cuts or acts on text of control tokens in the conversation; "
                "leave that text out, or set allow_special_tokens if you trust it"
            )
        return RenderedChat(text=plain, plain=spans)

    async def encode(self, rendered: RenderedChat) -> list[int]:
        """The prompt's ids. Raises TemplateError where a control token's text cannot be ordinary text."""
        try:
            return await self._tokenizer.encode_rendered(rendered.text, plain=rendered.plain)
        except ValueError as error:
            raise TemplateError(str(error)) from None

    async def close(self) -> None:
        """Ends the processes that render."""
        await self._renderer.close()

    async def _text(self, template: str, conversation: Conversation, given: Mapping[str, Any], marks: Marks) -> str:
        """What the template writes, with the marks that are in what it is given, but for the one at the end."""
        variables = {
            **self.templates.special_tokens,
            **given,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        try:
            text = marks.written_out(await self._renderer.render(template, variables))
        except TemplateError as error:
            raise TemplateError(marks.removed_from(str(error))) from None
        if not conversation.continue_final_message:
            return text
        return _open_ended(text, marks, content=given["messages"][-1]["content"])

    async def _of_template(self, template: str) -> ControlTokens:
        """Special tokens, and those added ones that the template itself writes, or that the model names."""
        if template not in self._control_tokens:
            literals, named = await self._renderer.literals(template), self.templates.control_tokens
            texts = [
                text
                for text, special in self._tokenizer.added_tokens().items()
                if special or (text in named if named is not None else text in literals and not text.isspace())
            ]
            self._control_tokens[template] = ControlTokens(texts=texts)
        return self._control_tokens[template]


def _given(conversation: Conversation, template: str) -> tuple[Marks, dict[str, Any]]:
    """Marks, and what callers give the template, the end of a message to be continued marked."""
    given: dict[str, Any] = {
        **conversation.arguments,
        "messages": [dict(message) for message in conversation.messages],
        "tools": list(conversation.tools) or None,
        "documents": list(conversation.documents) or None,
    }
    marks = Marks.absent_from(template, given)
    if conversation.continue_final_message:
        last = given["messages"][-1]
        last["content"] = _with_end(last.get("content"), marks)
    return marks, given


def _with_end(content: Any, marks: Marks) -> Any:
    """The content of a message with the end of its text marked, the space being there to see whether it is stripped."""
    if isinstance(content, str):
        return content + marks.end + " "
    for i, part in reversed(list(enumerate(content if isinstance(content, list) else ()))):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            return [*content[:i], {**part, "text": part["text"] + marks.end + " "}, *content[i + 1 :]]
    raise TemplateError("the last message has no text to continue")


def _open_ended(text: str, marks: Marks, *, content: Any) -> str:
    """`text` up to the end of the message that is to be continued, whose content has its end marked."""
    parts = [content] if isinstance(content, str) else [part.get("text") for part in content if isinstance(part, dict)]
    last = next(part for part in reversed(parts) if isinstance(part, str) and marks.end in part)
    at = text.rfind(marks.end)
    if at < 0 or last.partition(marks.end)[0].strip() not in text:
        raise TemplateError("the template leaves out or changes the message that is to be continued")
    return text[:at] if text[at : at + 2] == marks.end + " " else text[:at].rstrip()


async def _off_loop(conversation: Conversation, work: Callable[[], _T]) -> _T:
    return work() if conversation.num_bytes <= LONG_CHAT_BYTES else await asyncio.to_thread(work)
