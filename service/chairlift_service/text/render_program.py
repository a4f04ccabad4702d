"""The program that renders chat templates, in a process of its own: `python -m chairlift_service.text.render_program`.

A template is code that came with a model. It runs sandboxed, and under limits that hold whatever it does, also inside
one long operation: the kernel ends this process when a render has used its processor time, and refuses memory above a
bound, files, sockets and other processes. The environment is that of transformers' `apply_chat_template`
(utils/chat_template_utils.py), which templates are written for.

Over the socket `fd`, in the frames of render_frames.py: first the tokenizer's added tokens, then questions, each of
which is answered. Searching a conversation for control tokens takes its time in here, too.
"""

from __future__ import annotations

import argparse
import codecs
import functools
import json
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from chairlift_service.text.control_tokens import ControlTokens
from chairlift_service.text.render_frames import HEADER, MAX_TEXT_BYTES, AddedTokens, Answer, Question
from chairlift_service.text.rendering import TemplateError, rendered

_ENCODINGS: Final = ("ascii", "latin-1", "utf-8", "utf-8-sig", "utf-16", "utf-32", "cp1252", "unicode-escape")
_FAILING: Final[Question] = {
    "template": r"{{ '\n\u010d\N{BULLET}' | striptags | wordwrap }}{{ nothing.at.all }}",
    "given": {"messages": []},
    "own": {},
    "continued": False,
    "allow_special_tokens": True,
}


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training. Here it is its contents and nothing else."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own attribute

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """A namespace without names that lead into Python's own objects."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # As in jinja2's own, so that `namespace(self=...)` works.
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _Dict:
    """`dict` for templates: makes them, and has no other attribute."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """As dict's."""
        return dict.fromkeys(*args, **kwargs)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.exceptions.TemplateError(str(message))


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:  # noqa: FBT001, FBT002 - as templates call it
    # jinja2's own would write `<` as an escape, for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # the machine's own date, as in transformers


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@functools.lru_cache(maxsize=16)
def _literals(template: str) -> str:
    """What the template writes or compares literally; NUL stands between two pieces."""
    tree = _environment().parse(template)
    texts = {node.data for node in tree.find_all(nodes.TemplateData)}
    texts |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return "\0".join(sorted(texts))


class Answerer:
    """Renders for one tokenizer."""

    def __init__(self, tokens: AddedTokens) -> None:
        self._tokens = tokens
        self._control_tokens: dict[str, ControlTokens] = {}  # by template

    def answer(self, question: Question) -> Answer:
        """The prompt, or why there is none."""
        try:
            text, plain = rendered(
                question["given"],
                own=question["own"],
                continued=question["continued"],
                render=_compiled(question["template"]).render,
                template=question["template"],
                control_tokens=None if question["allow_special_tokens"] else self._of(question["template"]),
            )
            num_bytes = len(text.encode())
        except MemoryError:
            return {"error": "the template needs too much memory"}
        except jinja2.exceptions.TemplateSyntaxError as error:
            return {"error": f"line {error.lineno} of the template: {error.message}"}
        except (jinja2.exceptions.TemplateError, TemplateError) as error:
            return {"error": str(error) or type(error).__name__}
        except Exception as error:  # noqa: BLE001 - whatever a template does wrong is the template's error
            return {"error": f"{type(error).__name__}: {error}"}
        if num_bytes > MAX_TEXT_BYTES:
            return {"error": f"the template wrote {num_bytes} bytes, more than {MAX_TEXT_BYTES}"}
        return {"text": text, "plain": plain}

    def _of(self, template: str) -> ControlTokens:
        """Special tokens, and those added ones that the template itself writes, or that the model names."""
        if template not in self._control_tokens:
            named = self._tokens["control_tokens"]
            literals = _literals(template)
            texts = [
                text
                for text, special in self._tokens["added_tokens"].items()
                if special or (text in named if named is not None else text in literals and not text.isspace())
            ]
            self._control_tokens[template] = ControlTokens(texts=texts)
        return self._control_tokens[template]


def _receive(connection: socket.socket, num_bytes: int) -> bytes | None:
    """So many bytes; None where the service has closed its end."""
    received = bytearray()
    while len(received) < num_bytes:
        part = connection.recv(min(num_bytes - len(received), 2**20))
        if not part:
            return None
        received += part
    return bytes(received)


def _frames(connection: socket.socket) -> Iterator[Any]:
    """What the service sends, until it closes its end."""
    while (header := _receive(connection, HEADER.size)) is not None:
        content = _receive(connection, HEADER.unpack(header)[0])
        if content is None:
            return
        yield json.loads(content)


def serve(connection: socket.socket, *, cpu_s: float) -> None:
    """Answers until the service closes its end. Each answer may take `cpu_s` seconds of processor time."""
    frames = _frames(connection)
    tokens = next(frames, None)
    if tokens is None:
        return
    answerer = Answerer(tokens)
    for question in frames:
        # Nothing catches the signal, so the process ends by it, wherever it is.
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        answer = json.dumps(answerer.answer(question)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.sendall(HEADER.pack(len(answer)) + answer)


def _shut_in() -> None:
    """From here on this process can open nothing and start nothing, even if a template has left the sandbox."""
    time.tzset()  # reads the machine's time zone
    # What is imported when it is first needed: by string literals, two filters, and what fails.
    Answerer({"added_tokens": {}, "control_tokens": None}).answer(_FAILING)
    for name in _ENCODINGS:
        codecs.lookup(name)
    os.environ.clear()
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(limit, (0, 0))


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--cpu-seconds", type=float, required=True)
    parser.add_argument("--memory-bytes", type=int, required=True)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (options.memory_bytes, options.memory_bytes))
    _shut_in()
    with socket.socket(fileno=options.fd) as connection:
        serve(connection, cpu_s=options.cpu_seconds)


if __name__ == "__main__":
    main()
