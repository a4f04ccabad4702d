import pytest
from chairlift_worker.request import Request
from chairlift_worker.waiting import WaitingQueue
from support.scheduling import add_message


def request(uid: int) -> Request:
    return Request(add_message(uid, [1]))


def test_requests_come_in_order_of_arrival_even_when_they_come_back() -> None:
    queue = WaitingQueue()
    for uid in (1, 2, 3):
        queue.push(request(uid))
    first = queue.pop()
    queue.push(request(4))
    queue.push(first)
    assert [queue.pop().uid for _ in range(4)] == [1, 2, 3, 4]
    with pytest.raises(IndexError):
        queue.pop()


def test_a_discarded_request_is_skipped_and_may_come_back() -> None:
    queue = WaitingQueue()
    one, two = request(1), request(2)
    queue.push(one)
    queue.push(two)
    queue.discard(1)
    queue.discard(1)
    assert queue.first() is two
    assert len(queue) == 1
    queue.push(one)
    queue.discard(2)
    assert [queue.pop().uid] == [1]
    assert queue.first() is None


def test_discarded_entries_do_not_pile_up_behind_a_first_that_stays() -> None:
    queue = WaitingQueue()
    queue.push(request(1))
    for uid in range(2, 5000):
        queue.push(request(uid))
        queue.discard(uid)
    assert len(queue._heap) < 200
    assert queue.pop().uid == 1
