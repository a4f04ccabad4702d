"""What can be asked of `fault_injection`; what becomes of an engine that has such faults is test_faulty_engine's."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from array import array
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
import torch
from chairlift_worker.faults import KINDS, Faults, InjectedFaultError
from chairlift_worker.ipc.ring import Receiver, RingMemory, Sender
from chairlift_worker.memory_errors import is_out_of_memory
from chairlift_worker.plan import RowPlan, SampleSpec, StepPlan


def row(uid: int, *, index: int = 0, drafts: tuple[int, ...] = (), samples: bool = True) -> RowPlan:
    spec = SampleSpec(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, index=index, logprob=False)
    tokens = array("i", [1])
    return RowPlan(
        uid=uid,
        tokens=tokens,
        start=0,
        num_tokens=1 + len(drafts),
        tables=(),
        sample=spec if samples else None,
        drafts=drafts,
    )


def step(number: int, *uids: int) -> StepPlan:
    return StepPlan(step=number, rows=tuple(row(uid) for uid in uids or (1,)))


def test_no_text_makes_no_faults() -> None:
    faults = Faults("")
    faults.before_forward(step(1))
    faults.before_sampling(1, 0)
    logits = torch.zeros(1, 4)
    faults.spoil(logits, step(1).rows)
    assert torch.equal(logits, torch.zeros(1, 4))


def test_each_fault_happens_where_it_was_asked_for_and_nowhere_else() -> None:
    faults = Faults("forward:3,memory:4,sample:7,alloc:5")
    faults.before_forward(step(2))
    with pytest.raises(InjectedFaultError, match="forward:3"):
        faults.before_forward(step(3))
    with pytest.raises(MemoryError):
        faults.before_forward(step(4))
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        faults.before_forward(step(5))
    assert is_out_of_memory(caught.value)
    faults.before_sampling(3, 0)
    with pytest.raises(InjectedFaultError, match="sample:7"):
        faults.before_sampling(7, 0)
    with pytest.raises(InjectedFaultError, match="sample:7"):
        faults.before_sampling(7, 1)


@pytest.mark.parametrize("kind", ["memory", "alloc"])
def test_there_is_no_memory_as_often_as_was_asked_for(kind: str) -> None:
    for text, times in ((f"{kind}:4", 1), (f"{kind}:4:3", 3)):
        faults = Faults(text)
        failed = 0
        for _ in range(5):
            try:
                faults.before_forward(step(4))
            except (MemoryError, RuntimeError):
                failed += 1
        assert failed == times


def test_one_token_of_a_request_can_be_the_one_that_fails() -> None:
    faults = Faults("sample:7:2")
    faults.before_sampling(7, 1)
    with pytest.raises(InjectedFaultError):
        faults.before_sampling(7, 2)
    faults.before_sampling(7, 3)


@pytest.mark.parametrize(("text", "spoilt"), [("nan:7", [1, 2, 3]), ("nan:7:5", [2]), ("nan:8,nan:9", [0, 4])])
def test_logits_of_a_request_are_made_no_numbers_at_its_places_alone(text: str, spoilt: list[int]) -> None:
    with torch.inference_mode():
        logits = torch.zeros(5, 6)  # as the runner makes them
    rows = [row(9), row(7, index=4, drafts=(1, 2)), row(7, samples=False), row(8)]
    Faults(text).spoil(logits, rows)
    assert [place for place in range(5) if logits[place].isnan().all()] == spoilt
    assert [place for place in range(5) if logits[place].isnan().any()] == spoilt


def test_slow_steps_take_at_least_so_much_longer() -> None:
    faults = Faults("slow:30,slow_step:2:60,forward:9")
    for number, least in ((1, 0.03), (2, 0.09)):
        began = time.monotonic()
        faults.before_forward(step(number))
        assert time.monotonic() - began >= least
    with pytest.raises(InjectedFaultError):
        faults.before_forward(step(9))


def test_what_is_asked_of_a_step_happens_in_the_first_worker_alone_and_all_else_in_every_one() -> None:
    text = "forward:3,memory:4,sample:7,first:sample:8,every:forward:5"
    replacement = Faults(text, incarnation=2)
    replacement.before_forward(step(3))
    replacement.before_forward(step(4))
    replacement.before_sampling(8, 0)
    with pytest.raises(InjectedFaultError):
        replacement.before_sampling(7, 0)
    with pytest.raises(InjectedFaultError):
        replacement.before_forward(step(5))
    with pytest.raises(InjectedFaultError):
        Faults(text).before_sampling(8, 0)


@pytest.mark.parametrize(
    "text",
    [
        *("forward", "slow", "forward:x", "explode:1", "forward:1;sample:2", "forward:-1", "forward:²", "forward:"),
        *("forward:1:2", "slow_step:1", "memory:1:2:3", "first", "first:", "first:first:crash:1", "last:crash:1"),
    ],
)
def test_a_fault_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="fault_injection = "):
        Faults(text)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_be_asked_for_and_is_told_by_the_refusal(kind: str) -> None:
    Faults(f"first:{kind}:5" + (":6" if KINDS[kind].least == 2 else ""))
    with pytest.raises(ValueError, match=kind):
        Faults("explode:1")


IMPORTS = textwrap.dedent("""
    import sys
    from array import array
    from chairlift_worker.faults import Faults
    from chairlift_worker.ipc.ring import RingMemory, Sender
    from chairlift_worker.plan import RowPlan, StepPlan

    def step(number, *uids):
        row = dict(tokens=array("i", [1]), start=0, num_tokens=1, tables=(), sample=None)
        return StepPlan(step=number, rows=tuple(RowPlan(uid=uid, **row) for uid in uids))
""")


@contextmanager
def apart(script: str, *arguments: object, fds: tuple[int, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """A process that does this."""
    command = [sys.executable, "-c", IMPORTS + textwrap.dedent(script), *map(str, arguments)]
    with subprocess.Popen(command, pass_fds=fds, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def expect_sudden_death(process: subprocess.Popen[str]) -> None:
    out, _ = process.communicate(timeout=120)
    assert (process.returncode, out) == (-signal.SIGKILL, "so far\n")


@pytest.mark.parametrize(
    ("text", "harmless", "deadly"),
    [("crash:3", "step(2, 1), step(4, 3)", "step(3, 1)"), ("crash_uid:5", "step(5, 4), step(2, 6)", "step(3, 4, 5)")],
)
def test_a_crash_is_the_end_of_the_process_at_once(text: str, harmless: str, deadly: str) -> None:
    script = f"""
        faults = Faults({text!r})
        for plan in ({harmless}):
            faults.before_forward(plan)
        print("so far", flush=True)
        try:
            faults.before_forward({deadly})
        finally:
            print("too far", flush=True)
    """
    with apart(script) as process:
        expect_sudden_death(process)


def test_a_step_that_hangs_never_ends() -> None:
    script = """
        faults = Faults("hang:3")
        faults.before_forward(step(2, 1))
        print("so far", flush=True)
        faults.before_forward(step(3, 1))
    """
    with apart(script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "so far\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)


@pytest.fixture
def ring() -> Iterator[RingMemory]:
    with closing(RingMemory.create(capacity=1024)) as memory:
        yield memory


def test_a_full_ring_takes_the_record_after_so_many_tries(ring: RingMemory) -> None:
    with closing(Sender(memory=ring)) as sender, closing(Receiver(memory=ring)) as receiver:
        wrapped = Faults("ring_full:3:2").wrap(sender)
        tries = [wrapped.try_send(record) for record in (b"1", b"2", b"2", b"2", b"2", b"3")]
        assert tries == [True, False, False, False, True, True]
        assert [receiver.receive() for _ in range(4)] == [b"1", b"2", b"3", None]


def test_a_ring_without_faults_is_the_ring_itself(ring: RingMemory) -> None:
    with closing(Sender(memory=ring)) as sender:
        assert Faults("slow:1,crash:3").wrap(sender) is sender
        assert Faults("torn:1,ring_full:5", incarnation=2).wrap(sender) is sender


def test_of_a_torn_record_nothing_is_ever_seen_and_who_comes_after_can_go_on(ring: RingMemory) -> None:
    script = """
        sender = Faults("torn:2").wrap(Sender(memory=RingMemory.attach(int(sys.argv[1]))))
        assert sender.try_send(b"whole")
        print("so far", flush=True)
        sender.try_send(b"torn" * 20)
        print("too far", flush=True)
    """
    with closing(Receiver(memory=ring)) as receiver:
        with apart(script, ring.fd, fds=(ring.fd,)) as process:
            expect_sudden_death(process)
        written = bytes(ring.shared._mapping)
        assert b"torn" * 20 in written, "it died before it wrote"
        assert receiver.receive() == b"whole"
        assert receiver.receive() is None
        with closing(Sender(memory=ring)) as successor:
            assert successor.try_send(b"next")
        assert receiver.receive() == b"next"
