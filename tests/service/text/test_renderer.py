"""Templates that do not end, take all memory or break: each ends alone, and the next one is rendered."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from chairlift_service.errors import Reason, ServiceError
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
    made = Renderer(tokens=NO_TOKENS, limits=RenderLimits(cpu_s=0.3, memory_bytes=200 * 2**20))
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


@pytest.mark.parametrize("name", ENDLESS)
async def test_a_template_that_does_not_end_is_ended_while_the_event_loop_goes_on(renderer, name: str) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.01)
            turns += 1

    counter = asyncio.create_task(count())
    with pytest.raises(TemplateError, match=r"0\.3 s of processor time"):
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
