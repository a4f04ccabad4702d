"""From a conversation to its prompt's text, and to whose the control tokens in it are, by means of a template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from chairlift_service.text.control_tokens import ControlTokens, Marks, Span

Render = Callable[[Mapping[str, Any]], str]
"""From the template's variables to what it writes."""


class TemplateError(Exception):
    """A template refuses what it was given, or fails; the text is the template's own, of any length."""


def rendered(
    given: dict[str, Any],
    *,
    own: Mapping[str, Any],
    continued: bool,
    render: Render,
    template: str,
    control_tokens: ControlTokens | None,
) -> tuple[str, list[Span]]:
    """The prompt, and where in it callers' control tokens are.

    `given` is what the template gets from callers, with `messages`, the last of which stays open if `continued`; `own`
    are its other variables. Without `control_tokens` callers may write them. Raises TemplateError where the template
    hides whose a control token is or the end of a message to be continued; what `render` raises goes through.
    """
    marks = Marks.absent_from(template, given)
    if continued:
        last = given["messages"][-1]
        last["content"] = _with_end(last.get("content"), marks)

    def write(values: dict[str, Any]) -> str:
        text = marks.written_out(render({**own, **values}))
        return _open_ended(text, marks, content=values["messages"][-1]["content"]) if continued else text

    plain = write(given)
    marked_given = control_tokens.marked(given, marks) if control_tokens is not None else given
    if control_tokens is None or marked_given == given:
        return plain, []
    try:
        spans = control_tokens.callers(plain, write(marked_given), marks)
    except Exception:  # noqa: BLE001 - whatever it is, without the marks it did not happen
        spans = None
    if spans is None:
        raise TemplateError(
            "the template changes, cuts or acts on text of control tokens in the conversation; "
            "leave that text out, or set allow_special_tokens if you trust it"
        )
    return plain, spans


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
