"""The table of states: what may happen when, what users see of it, and what health says."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
from chairlift.v1 import info_service_pb2
from chairlift_service.errors import Reason, ServiceError
from chairlift_service.health import Health
from chairlift_service.lifecycle import HEALTHY, TRANSITIONS, Happening, Lifecycle, ServedModel, State

# Written out again, as admin_service.proto says it: rows are states, columns what an operator asks for.
ALLOWED = """
            PAUSE   RESUME   DRAIN     STOP     UPDATE    UPDATED  SIGNAL  LOSS
STARTING    -       -        -         -        -         -        ENDING  FAILED
SERVING     PAUSED  -        DRAINING  STOPPED  -         -        ENDING  FAILED
PAUSED      -       SERVING  DRAINING  STOPPED  UPDATING  -        ENDING  FAILED
UPDATING    -       -        -         -        -         PAUSED   ENDING  FAILED
DRAINING    -       SERVING  DRAINING  STOPPED  -         -        ENDING  FAILED
STOPPED     -       SERVING  -         -        -         -        ENDING  FAILED
ENDING      -       -        ENDING    -        -         ENDING   ENDING  FAILED
FAILED      -       -        -         -        -         -        -       FAILED
"""
MODEL = cast("ServedModel", SimpleNamespace(settings=()))


def table() -> dict[tuple[State, Happening], State | None]:
    header, *rows = ALLOWED.strip().splitlines()
    happenings = [Happening[name] for name in header.split()]
    found = {}
    for row in rows:
        state, *after = row.split()
        for happening, name in zip(happenings, after, strict=True):
            found[State[state], happening] = None if name == "-" else State[name]
    return found


def at(state: State) -> tuple[Lifecycle, Health]:
    """A lifecycle that came to this state by the shortest way."""
    for length in range(5):
        for way in itertools.product((h for h in Happening if h is not Happening.READY), repeat=length):
            health = Health(services=())
            lifecycle = Lifecycle(healths=(health,))
            if state is not State.STARTING:
                lifecycle.serve(MODEL)
            for happening in way:
                if lifecycle.may(happening):
                    lifecycle.enter(happening)
            if lifecycle.state is state:
                return lifecycle, health
    raise AssertionError(f"no way leads to {state}")


@pytest.mark.parametrize(("state", "happening"), sorted(table(), key=str))
def test_each_happening_leads_where_the_table_says_or_is_refused(state: State, happening: Happening) -> None:
    lifecycle, _ = at(state)
    after = table()[state, happening]
    assert lifecycle.may(happening) is (after is not None)
    if after is not None:
        lifecycle.enter(happening)
        assert lifecycle.state is after
        return
    with pytest.raises(ServiceError) as refused:
        lifecycle.enter(happening)
    assert refused.value.reason is (Reason.NOT_READY if state is State.STARTING else Reason.WRONG_STATE)
    assert lifecycle.state is state


def test_nothing_else_can_happen() -> None:
    rest = {key: after for key, after in TRANSITIONS.items() if key[1] is not Happening.READY}
    assert rest == {key: after for key, after in table().items() if after is not None}
    assert [key for key in TRANSITIONS if key[1] is Happening.READY] == [(State.STARTING, Happening.READY)]


@pytest.mark.parametrize(
    ("state", "refusal"),
    [
        (State.SERVING, None),
        (State.PAUSED, None),
        (State.UPDATING, None),
        (State.STARTING, Reason.NOT_READY),
        (State.DRAINING, Reason.DRAINING),
        (State.ENDING, Reason.DRAINING),
        (State.STOPPED, Reason.STOPPED),
        (State.FAILED, Reason.WORKER_LOST),
    ],
)
def test_new_requests_are_taken_exactly_where_health_is_serving(state: State, refusal: Reason | None) -> None:
    lifecycle, health = at(state)
    assert health.serving is (refusal is None)
    if refusal is None:
        assert lifecycle.accepting() is MODEL
        return
    with pytest.raises(ServiceError) as refused:
        lifecycle.accepting()
    assert refused.value.reason is refusal


def test_every_state_is_shown_and_those_in_between_as_what_they_belong_to() -> None:
    named: dict[State, Any] = {state: f"SERVER_STATE_{state.name}" for state in State}
    named[State.UPDATING] = "SERVER_STATE_PAUSED"
    named[State.ENDING] = "SERVER_STATE_DRAINING"
    assert {state: info_service_pb2.ServerState.Name(at(state)[0].shown) for state in State} == named
    assert set(State) >= HEALTHY


@pytest.mark.parametrize("state", State)
def test_without_a_worker_the_state_stays_and_health_waits(state: State) -> None:
    lifecycle, health = at(state)
    lifecycle.show_recovering(recovering=True)
    assert (lifecycle.state, health.serving) == (state, False)
    shown = "FAILED" if state is State.FAILED else "RECOVERING"
    assert info_service_pb2.ServerState.Name(lifecycle.shown) == f"SERVER_STATE_{shown}"
    lifecycle.show_recovering(recovering=False)
    assert health.serving is (state in HEALTHY)
