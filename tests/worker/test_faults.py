import time

import pytest
from chairlift_worker.faults import Faults, InjectedFaultError


def test_no_text_makes_no_faults() -> None:
    faults = Faults("")
    faults.before_forward(1)
    faults.before_sampling(1)


def test_each_fault_happens_where_it_was_asked_for_and_nowhere_else() -> None:
    faults = Faults("forward:3,memory:4,sample:7")
    faults.before_forward(2)
    with pytest.raises(InjectedFaultError, match="forward:3"):
        faults.before_forward(3)
    with pytest.raises(MemoryError):
        faults.before_forward(4)
    faults.before_sampling(3)
    with pytest.raises(InjectedFaultError, match="sample:7"):
        faults.before_sampling(7)


def test_slow_steps_take_at_least_so_much_longer() -> None:
    faults = Faults("slow:30,forward:9")
    began = time.monotonic()
    faults.before_forward(1)
    assert time.monotonic() - began >= 0.03
    with pytest.raises(InjectedFaultError):
        faults.before_forward(9)


@pytest.mark.parametrize("text", ["forward", "slow", "forward:x", "explode:1", "forward:1;sample:2"])
def test_a_fault_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="fault_injection = "):
        Faults(text)
