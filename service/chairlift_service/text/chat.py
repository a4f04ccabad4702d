"""From a conversation to a prompt, as the model's own chat template makes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from chairlift_service.text.chat_templates import ChatTemplates
from chairlift_service.text.control_tokens import Span
from chairlift_service.text.renderer import Renderer
from chairlift_service.text.rendering import TemplateError
from chairlift_service.text.tokenizer import Tokenizer


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

    @classmethod
    def load(cls, folder: str, *, tokenizer: Tokenizer) -> ChatPrompts | None:
        """With the templates of a tokenizer's folder; None if it has none. Raises ValueError, one line."""
        templates = ChatTemplates.load(folder)
        if templates is None:
            return None
        renderer = Renderer(
            tokens={"added_tokens": tokenizer.added_tokens(), "control_tokens": templates.control_tokens}
        )
        return cls(templates=templates, tokenizer=tokenizer, renderer=renderer)

    async def render(self, conversation: Conversation) -> RenderedChat:
        """The prompt. The conversation's template must be there (`templates.choose`).

        Raises TemplateError with the template's own words, also where it hides whose a control token is, or does not
        show the end of a message that is to be continued; ServiceError QUEUE_FULL if too many conversations wait.
        """
        template = self.templates.choose(conversation.template, with_tools=bool(conversation.tools))
        assert template is not None
        answer = await self._renderer.render(
            {
                "template": template,
                "given": {
                    **conversation.arguments,
                    "messages": list(conversation.messages),
                    "tools": list(conversation.tools) or None,
                    "documents": list(conversation.documents) or None,
                },
                "own": {
                    **self.templates.special_tokens,
                    "add_generation_prompt": conversation.add_generation_prompt,
                },
                "continued": conversation.continue_final_message,
                "allow_special_tokens": conversation.allow_special_tokens,
            }
        )
        return RenderedChat(text=answer["text"], plain=[(start, stop) for start, stop in answer["plain"]])

    async def encode(self, rendered: RenderedChat) -> list[int]:
        """The prompt's ids. Raises TemplateError where a control token's text cannot be ordinary text."""
        try:
            return await self._tokenizer.encode_rendered(rendered.text, plain=rendered.plain)
        except ValueError as error:
            raise TemplateError(str(error)) from None

    async def close(self) -> None:
        """Ends the processes that render."""
        await self._renderer.close()
