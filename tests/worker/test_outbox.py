"""What the service is told of a step's tokens, in as many messages as that takes."""

from array import array

from chairlift_worker.ipc.channel import DEFAULT_RING_BYTES
from chairlift_worker.ipc.messages import EndingReason, StepMsg, encode
from chairlift_worker.outbox import MAX_ENDINGS, Outbox
from chairlift_worker.plan import RowResult, TopTokens
from chairlift_worker.request import Request
from support.scheduling import add_message


def request(uid: int) -> Request:
    return Request(add_message(uid, prompt=[1], max_new_tokens=9))


def result(uid: int, *, num_top: int | None) -> RowResult:
    ids = array("i", range(num_top or 0))
    top = None if num_top is None else TopTokens(ids=ids.tobytes(), logprobs=array("f", ids).tobytes())
    return RowResult(uid=uid, token_id=uid % 100, logprob=None if num_top is None else -0.5, top=top)


def tops_of(message: StepMsg) -> list[list[int]]:
    ids, tops = array("i", message.top_ids).tolist(), []
    for num in message.num_tops:
        tops.append(ids[:num])
        ids = ids[num:]
    assert not ids
    return tops


def test_where_nobody_asks_there_are_no_columns_of_logprobs() -> None:
    outbox = Outbox()
    outbox.token(request(1), result(1, num_top=None))
    (message,) = outbox.take(7)
    assert (message.step, message.logprobs, message.num_tops, message.top_ids, message.top_logprobs) == (
        *(7, b"", b"", b"", b""),
    )
    assert outbox.take(8) == []


def test_each_token_has_its_own_likeliest_ones_beside_those_that_asked_for_none() -> None:
    outbox = Outbox()
    for uid, num_top in enumerate([None, 2, 0, 128, None], start=1):
        outbox.token(request(uid), result(uid, num_top=num_top))
    (message,) = outbox.take(1)
    assert array("Q", message.uids).tolist() == [1, 2, 3, 4, 5]
    assert tops_of(message) == [[], [0, 1], [], list(range(128)), []]
    assert array("f", message.top_logprobs).tolist() == [0, 1, *range(128)]


def test_however_much_is_asked_each_message_fits_a_record_and_all_comes_in_order() -> None:
    outbox, num_tokens = Outbox(), 4000
    outbox.started(request(1))
    for uid in range(num_tokens):
        outbox.token(request(uid), result(uid, num_top=128))
    for uid in range(MAX_ENDINGS + 1):
        outbox.ending(request(uid), EndingReason.LENGTH, 1)
    messages = outbox.take(3)
    assert all(len(encode(message)) < DEFAULT_RING_BYTES // 4 for message in messages)
    assert {message.step for message in messages} == {3}
    assert [uid for message in messages for uid in array("Q", message.uids)] == list(range(num_tokens))
    assert [top for message in messages for top in tops_of(message)] == [list(range(128))] * num_tokens
    assert [len(message.started) for message in messages] == [1] + [0] * (len(messages) - 1)
    with_tokens = [bool(message.uids) for message in messages]
    first_ending = next(number for number, message in enumerate(messages) if message.endings)
    assert not any(with_tokens[first_ending + 1 :]), "endings come after all tokens"
    assert sum(len(message.endings) for message in messages) == MAX_ENDINGS + 1
    assert outbox.take(4) == []
