"""The status page."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from chairlift.v1 import info_service_pb2
from chairlift_worker.ipc.memory import SharedMemory
from chairlift_worker.ipc.status import Phase, Status, StatusChange, StatusReader, StatusWriter, create_page

OF_THE_SERVICE = {"worker_restarts", "requests_held"}
OF_THE_WORKER_ALONE = {"phase", "heartbeat_ns", "step", "planned_tokens"}


@pytest.fixture
def page() -> Iterator[SharedMemory]:
    with closing(create_page()) as memory:
        yield memory


def test_the_page_has_the_statistics_of_the_api_by_their_names() -> None:
    statistics = {field.name for field in info_service_pb2.Statistics.DESCRIPTOR.fields}
    assert set(Status.__struct_fields__) == statistics - OF_THE_SERVICE | OF_THE_WORKER_ALONE
    assert set(StatusChange.__annotations__) == set(Status.__struct_fields__) - {"heartbeat_ns"}


def test_a_new_page_is_of_a_worker_that_starts(page: SharedMemory) -> None:
    status = StatusReader(memory=page).read()
    assert status.phase is Phase.STARTING
    assert status.heartbeat_ns == status.step == status.blocks_total == 0


def test_each_field_is_read_as_it_was_set_and_the_others_stay(page: SharedMemory) -> None:
    writer, reader = StatusWriter(memory=page), StatusReader(memory=page)
    names = sorted(set(StatusChange.__annotations__) - {"phase"})
    for number, name in enumerate(names):
        writer.set(**{name: 2**64 - 1 - number})  # type: ignore[typeddict-item]
    for phase in Phase:
        writer.set(phase=phase)
        status = reader.read()
        assert status.phase is phase
        assert [getattr(status, name) for name in names] == [2**64 - 1 - number for number in range(len(names))]


def test_every_change_and_every_beat_is_a_heartbeat(page: SharedMemory) -> None:
    writer, reader = StatusWriter(memory=page), StatusReader(memory=page)
    for sign_of_life in (lambda: writer.set(step=1), writer.beat, lambda: writer.set(step=2), writer.beat):
        before = time.monotonic_ns()
        sign_of_life()
        assert before <= reader.read().heartbeat_ns <= time.monotonic_ns()


def test_an_unknown_field_is_an_error(page: SharedMemory) -> None:
    with pytest.raises(KeyError):
        StatusWriter(memory=page).set(tempo=1)  # type: ignore[call-arg]


def test_memory_that_holds_no_page_is_refused() -> None:
    with closing(SharedMemory.create(name="zeros", size=4096)) as zeros:
        for end in (StatusReader, StatusWriter):
            with pytest.raises(ValueError, match="no status page"):
                end(memory=zeros)


def test_after_closing_the_last_look_is_repeated(page: SharedMemory) -> None:
    writer, reader = StatusWriter(memory=page), StatusReader(memory=page)
    writer.set(steps=3)
    assert reader.read().steps == 3
    page.close()
    writer.set(steps=4)
    writer.beat()
    assert reader.read().steps == 3
