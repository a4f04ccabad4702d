"""Templates that do not end, take all memory or break: each ends alone, and the next one is rendered."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from chairlift_service.errors import Reason, ServiceError
from chairlift_service.text import render_program as program
from chairlift_service.text import renderer as module
from chairlift_service.text.render_frames import AddedTokens
from chairlift_service.text.renderer import Renderer, RenderLimits
from chairlift_service.text.rendering import TemplateError
from support.served import eventually

NESTED = "{% for a in range(99999) %}" * 3
ENDLESS = {
    "a loop": NESTED + "{% endfor %}" * 3,
    "one long operation": "{{ (9 ** 9999999) | string | length }}",
}


NO_TOKENS: AddedTokens = {"added_tokens": {}, "control_tokens": None}


async def render(renderer: Renderer, template: str, variables: dict[str, Any]) -> str:
    given = {"messages": [], **variables}
    answer = await renderer.render(
        {"template": template, "given": given, "own": {}, "continued": False, "allow_special_tokens": False}
    )
    return answer["text"]


@pytest.fixture
async def renderer() -> AsyncIterator[Renderer]:
    made = Renderer(tokens=NO_TOKENS, limits=RenderLimits(cpu_s=1.5, memory_bytes=200 * 2**20))
    yield made
    await made.close()
    assert not made._helpers


def pids(renderer: Renderer) -> set[int]:
    return {helper._process.pid for helper in renderer._helpers}


async def test_a_process_is_kept_for_the_next_render(renderer: Renderer) -> None:
    assert pids(renderer) == set(), "none before it is needed"
    assert await render(renderer, "{{ a }}-{{ b.c }}", {"a": "ř", "b": {"c": 2**70}}) == f"ř-{2**70}"
    first = pids(renderer)
    assert await render(renderer, "{% if x %}{{ x }}{% endif %}", {}) == ""
    assert pids(renderer) == first
    assert len(first) == 1


def descriptors(pid: int) -> set[str]:
    """What a process has open."""
    return {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}


async def test_a_process_gets_none_of_the_services_descriptors(renderer: Renderer) -> None:
    memory = os.memfd_create("shared with the worker")
    os.set_inheritable(memory, True)
    await render(renderer, "fine", {})
    (pid,) = pids(renderer)
    held = descriptors(pid)
    os.close(memory)
    assert "/memfd:shared with the worker (deleted)" not in held
    assert len([name for name in held if name.startswith("socket:")]) <= 2  # its own; standard error may be one
    assert "/dev/null" in held


@pytest.mark.parametrize("name", ENDLESS)
async def test_a_template_that_does_not_end_is_ended_while_the_event_loop_goes_on(renderer, name: str) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.01)
            turns += 1

    counter = asyncio.create_task(count())
    with pytest.raises(TemplateError, match=r"1\.5 s of processor time"):
        await render(renderer, ENDLESS[name], {})
    counter.cancel()
    assert turns >= 5
    assert await render(renderer, "fine", {}) == "fine"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 10 ** 9 }}",
        "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    ],
)
async def test_a_template_that_takes_all_memory_is_refused_it(renderer: Renderer, template: str) -> None:
    with pytest.raises(TemplateError, match="memory"):
        await render(renderer, template, {})
    assert await render(renderer, "fine", {}) == "fine"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('čau') }}", "čau"),
        ("{% for %}", "line 1"),
        ("{{ nothing.at.all }}", "nothing"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% set ns = namespace(_a=1) %}", "_a"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{% include 'other' %}", "loader"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ '\\ud800' }}", "UnicodeEncodeError"),
        ("{{ range(10 ** 6) | list }}", "OverflowError"),
        ("{{ 'x' * (16 * 2 ** 20 + 1) }}", "16777217 bytes"),
    ],
)
async def test_a_failing_template_tells_why_and_nothing_of_the_service(renderer, template: str, words: str) -> None:
    with pytest.raises(TemplateError) as caught:
        await render(renderer, template, {"messages": []})
    assert words in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert "/" not in str(caught.value).replace("1 / 0", "")


ATTACK = """
import os, socket, sys
from chairlift_service.text import render_program as program
found = []
def attempt(name, do):
    try:
        found.append((name, do()))
    except OSError:
        pass
class Template:  # one that has left the sandbox
    def render(self, values):
        attempt("a file", lambda: open("/etc/passwd").read())
        attempt("itself", lambda: open("/proc/self/environ").read())
        attempt("a socket", lambda: socket.socket())
        attempt("a folder", lambda: os.listdir("/"))
        attempt("a pipe", lambda: os.pipe())
        found.extend(os.environ.items())
        return f"found {found}"
original = program._compiled
program._compiled = lambda template: Template() if template == "attack" else original(template)
program.main()
"""


async def test_a_template_that_left_the_sandbox_finds_no_file_no_socket_and_no_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "attack.py").write_text(ATTACK)
    monkeypatch.setenv("SECRET", "of the service")
    monkeypatch.setattr(module, "_PROGRAM", (str(tmp_path / "attack.py"),))
    renderer = Renderer(tokens=NO_TOKENS)
    assert await render(renderer, "attack", {}) == "found []"
    with pytest.raises(TemplateError, match="'nothing' is undefined"):
        await render(renderer, "{{ nothing.at.all }}", {})
    with pytest.raises(TemplateError, match="line 1"):
        await render(renderer, "{% for %}", {})
    await renderer.close()


async def test_every_filter_does_shut_in_what_it_does_outside(renderer: Renderer) -> None:
    """None of them may need a file that is not read yet."""
    outside = program.Answerer(NO_TOKENS)
    for name in sorted(program._environment().filters.keys() - {"random"}):
        for value in ("'a <b> 1'", "['x']", "7", "{'k': [1]}"):
            template = f"{{{{ {value} | {name} }}}}"
            there = outside.answer(
                {
                    "template": template,
                    "given": {"messages": []},
                    "own": {},
                    "continued": False,
                    "allow_special_tokens": False,
                }
            )
            try:
                here = await render(renderer, template, {})
            except TemplateError as error:
                here = f"refused: {error}"
            if "0x" not in here:  # an object's address
                assert here == there.get("text", f"refused: {there.get('error')}"), template


async def test_the_date_is_that_of_the_machines_time_zone(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Etc/GMT-14")
    far_east = datetime.now(timezone(timedelta(hours=14))).strftime("%z %Y-%m-%d")
    assert await render(renderer, "{{ strftime_now('+1400 %Y-%m-%d') }}", {}) == far_east


async def test_a_render_whose_caller_left_is_ended_at_once(renderer: Renderer) -> None:
    task = asyncio.create_task(render(renderer, ENDLESS["a loop"], {}))
    await eventually(lambda: len(renderer._helpers) == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await eventually(lambda: not renderer._helpers)
    assert await render(renderer, "fine", {}) == "fine"


async def test_one_template_that_does_not_end_leaves_room_for_another_and_a_crowd_is_refused(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_RENDERS", 2)
    endless = asyncio.create_task(render(renderer, ENDLESS["a loop"], {}))
    await eventually(lambda: len(renderer._helpers) == 1)
    assert await render(renderer, "fine", {}) == "fine"
    assert not endless.done()
    other = asyncio.create_task(render(renderer, ENDLESS["a loop"], {}))
    await asyncio.sleep(0)
    with pytest.raises(ServiceError) as caught:
        await render(renderer, "fine", {})
    assert caught.value.reason is Reason.QUEUE_FULL
    await asyncio.gather(endless, other, return_exceptions=True)


async def test_a_killed_process_fails_its_render_alone(renderer: Renderer) -> None:
    task = asyncio.create_task(render(renderer, ENDLESS["a loop"], {}))
    await eventually(lambda: len(renderer._helpers) == 1)
    os.kill(*pids(renderer), signal.SIGKILL)
    with pytest.raises(TemplateError, match="SIGKILL"):
        await task
    assert await render(renderer, "fine", {}) == "fine"


async def test_processes_see_the_end_of_the_service_and_end(tmp_path: Path) -> None:
    program = (
        "import asyncio, os, signal\n"
        "from chairlift_service.text.renderer import Renderer\n"
        "async def main():\n"
        "    renderer = Renderer(tokens={'added_tokens': {}, 'control_tokens': None})\n"
        "    await renderer.render({'template': 'x', 'given': {}, 'own': {}, 'continued': False,\n"
        "                           'allow_special_tokens': True})\n"
        "    print([helper._process.pid for helper in renderer._helpers], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    (pid,) = json.loads(out)
    await eventually(lambda: not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text())
