"""Constrained outputs on the real service: whatever the model likes, what ends well has its form."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from chairlift_client import (
    Client,
    Constraint,
    Delta,
    Finished,
    FinishReason,
    InternalError,
    InvalidRequestError,
    StructuralTag,
)
from support.live_server import LiveServer, live_server
from support.tiny_models import EOS_ID, tiny_model

HOT: dict[str, Any] = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "timeout": 120.0}
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": -3, "maximum": 12}, "s": {"enum": ["x", "yy"]}},
    "required": ["n", "s"],
    "additionalProperties": False,
}
PATTERN = "[a-c]{2,5}(-[0-9]+){1,2}!"


@pytest.fixture(scope="module", params=["plain", "ahead"])
def server(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    """A cache for a part of what comes at once; drafts, or a step ahead."""
    args = ("--dtype", "float32", "--page-size", "8", "--num-blocks", "60", "--cpu-offload-space", "0.001")
    args += ("--use-async-batching",) if request.param == "ahead" else ("--speculative", "ngram")
    with live_server(tiny_model("llama"), *args, "--fault-injection", "slow:3") as running:
        yield running


def prompt(number: int) -> list[int]:
    return [4 + (number * 37 + i * i * 11) % 370 for i in range(10 + number % 20)]


def fits_schema(text: str) -> bool:
    value = json.loads(text)
    return value.keys() == {"n", "s"} and -3 <= value["n"] <= 12 and value["s"] in {"x", "yy"}


FORMS = [
    (Constraint.json_schema(SCHEMA), fits_schema),
    (Constraint.regex(PATTERN), lambda text: re.fullmatch(PATTERN, text) is not None),
    (Constraint.choices(["yes", "no", "no way"]), lambda text: text in {"yes", "no", "no way"}),
    (Constraint.grammar('start: "(" start ")" | "x"'), lambda text: re.fullmatch(r"(\(*)x(\)*)", text) is not None),
]


def test_whatever_ends_with_stop_has_its_form_beside_others_and_through_evictions(client: Client) -> None:
    def ask(number: int) -> Any:
        constraint = FORMS[number % 4][0] if number % 5 else None
        options = {"constraint": constraint, "seed": number, "max_new_tokens": 80, **HOT}
        return client.complete(prompt(number), num_choices=2, **options)

    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(ask, range(40)))
    num_stopped = 0
    for number, answer in enumerate(answers):
        for choice in answer.choices if number % 5 else ():
            assert choice.finished.reason in {FinishReason.STOP, FinishReason.LENGTH}
            if choice.finished.reason is FinishReason.STOP:
                num_stopped += 1
                assert FORMS[number % 4][1](choice.text), choice.text
                assert choice.finished.stop_constraint or choice.finished.stop_token_id == EOS_ID
            else:
                assert len(choice.token_ids) == 80
    assert num_stopped > 20


def test_who_is_not_constrained_is_what_it_is_alone(client: Client) -> None:
    wanted = client.complete(prompt(3), max_new_tokens=40, seed=5, ignore_eos=True, **HOT)
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        others = [
            pool.submit(client.complete, prompt(n), max_new_tokens=60, constraint=FORMS[n % 4][0], **HOT)
            for n in range(8)
        ]
        again = client.complete(prompt(3), max_new_tokens=40, seed=5, ignore_eos=True, **HOT)
        concurrent.futures.wait(others)
    assert again.token_ids == wanted.token_ids


def test_a_constrained_answer_is_the_same_whatever_runs_beside(client: Client) -> None:
    options = {"max_new_tokens": 60, "constraint": FORMS[0][0], **HOT}
    alone = [client.complete(prompt(n), seed=n, **options).token_ids for n in range(6)]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda n: client.complete(prompt(n % 6), seed=n % 6, **options).token_ids, range(12)))
    assert together == [*alone, *alone]


def test_a_worker_that_dies_leaves_the_form_whole(client: Client) -> None:
    pattern = "(ab|cd|[xyz]){200,300}"
    options = {"constraint": Constraint.regex(pattern), "seed": 3, "max_new_tokens": 400, **HOT}
    undisturbed = client.complete(prompt(7), **options)
    (pid,) = client.get_server().worker_pids
    text, finished = "", None
    for event in client.generate(prompt(7), **options):
        if isinstance(event, Delta):
            text += event.text
            if pid and len(text) > 60:
                os.kill(pid, signal.SIGKILL)
                pid = 0
        elif isinstance(event, Finished):
            finished = event
    assert finished is not None
    assert not pid
    assert text == undisturbed.text
    assert re.fullmatch(pattern, text)
    assert finished.reason is FinishReason.STOP


def test_what_a_limit_cuts_short_is_a_beginning_and_says_so(client: Client) -> None:
    answer = client.complete(prompt(1), max_new_tokens=3, constraint=Constraint.regex("a{50}"), **HOT)
    assert answer.reason is FinishReason.LENGTH
    assert set(answer.text) == {"a"}


def test_the_last_token_of_a_form_ends_it_without_another_step(client: Client) -> None:
    answer = client.complete(prompt(1), max_new_tokens=100, constraint=Constraint.choices(["x"]), **HOT)
    assert (answer.text, len(answer.token_ids)) == ("x", 1)
    finished = answer.choices[0].finished
    assert (finished.reason, finished.stop_constraint, finished.stop_token_id) == (FinishReason.STOP, True, None)


def test_parts_of_a_text_have_forms_of_their_own(client: Client) -> None:
    tag = StructuralTag(begin="a", json_schema={"type": "integer"}, end=";")
    constraint, num_parts = Constraint.tagged_text([tag]), 0
    likely = {client.tokenize(char).token_ids[-1]: 4.0 for char in "a;"}
    for seed in range(12):
        answer = client.complete(
            prompt(seed), max_new_tokens=90, seed=seed, constraint=constraint, logit_bias=likely, **HOT
        )
        parts = re.split(r"a(-?(?:0|[1-9][0-9]*));", answer.text)
        num_parts += len(parts) // 2
        *free, rest = parts[::2]
        assert "a" not in "".join(free), answer.text
        if answer.reason is FinishReason.LENGTH:
            rest = re.sub(r"a-?[0-9]*$", "", rest)
        assert "a" not in rest, answer.text
    assert num_parts > 12


def test_bans_that_leave_nothing_fail_that_request_alone(client: Client) -> None:
    options = {"constraint": Constraint.choices(["x"]), "banned_words": ["x"], **HOT}
    with pytest.raises(InternalError, match="no token has any probability"):
        client.complete(prompt(2), max_new_tokens=5, **options)
    with pytest.raises(InvalidRequestError) as refused:
        client.complete(prompt(2), max_new_tokens=5, constraint=Constraint.regex("(a"))
    assert [violation.field for violation in refused.value.field_violations] == ["request.constraint.regex"]


def test_logprobs_are_of_what_may_come(client: Client) -> None:
    options = {"constraint": Constraint.choices(["yes", "no"]), "logprobs": 20, "seed": 1, **HOT}
    answer = client.complete(prompt(4), max_new_tokens=5, **options)
    first = answer.choices[0].logprobs[0]
    assert 1 <= len(first.top) < 10, "of all that begins with y or n, whole or in part"
    assert sum(2.718281828459045**logprob for _, logprob in first.top) == pytest.approx(1, abs=1e-4)
