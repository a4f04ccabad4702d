"""The error table and what of an error reaches a client, read back with google.rpc's own messages."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest
from chairlift_service import errors
from chairlift_service.errors import Reason, ServiceError, Violation
from google.rpc import code_pb2, error_details_pb2, status_pb2

# The contract's table.
CODES = {
    "INVALID_ARGUMENT": {
        Reason.INVALID_VALUE,
        Reason.MISSING_INPUT,
        Reason.EMPTY_PROMPT,
        Reason.PROMPT_TOO_LONG,
        Reason.UNKNOWN_TOKEN_ID,
        Reason.UNSUPPORTED_OPTION,
        Reason.INVALID_WEIGHTS,
    },
    "ALREADY_EXISTS": {Reason.DUPLICATE_REQUEST_ID},
    "NOT_FOUND": {Reason.REQUEST_NOT_FOUND},
    "OUT_OF_RANGE": {Reason.RESULT_EXPIRED},
    "ABORTED": {Reason.READER_REPLACED},
    "RESOURCE_EXHAUSTED": {Reason.READER_TOO_SLOW, Reason.QUEUE_FULL, Reason.MESSAGE_TOO_LARGE},
    "DEADLINE_EXCEEDED": {Reason.DEADLINE_EXCEEDED},
    "INTERNAL": {Reason.NUMERICAL_ERROR, Reason.POISONED_REQUEST, Reason.INTERNAL, Reason.UNREADABLE_REQUEST},
    "UNAUTHENTICATED": {Reason.UNAUTHENTICATED},
    "PERMISSION_DENIED": {Reason.PERMISSION_DENIED},
}


def unpacked(status: status_pb2.Status, kind: type) -> list:
    found = []
    for detail in status.details:
        message = kind()
        if detail.Unpack(message):
            found.append(message)
    return found


@pytest.mark.parametrize(
    ("code", "reason"), [(code, reason) for code, reasons in CODES.items() for reason in sorted(reasons)]
)
def test_each_reason_has_the_contracts_code(code: str, reason: Reason) -> None:
    error = ServiceError(reason, "m")
    assert error.code is grpc.StatusCode[code]
    assert errors.status(error).code == code_pb2.Code.Value(code)


def test_the_table_holds_every_reason_once() -> None:
    rows = list(errors.table())
    assert sorted(row[0] for row in rows) == sorted(reason.name for reason in Reason)
    assert all(row[1] in grpc.StatusCode.__members__ and row[2] in ("yes", "no") and row[3] for row in rows)


def test_a_status_carries_reason_domain_limits_and_violations() -> None:
    error = errors.from_violations(
        [
            Violation("request.sampling.top_p", "must be above 0"),
            Violation("requests[3].token_ids.ids[0]", "token id -1", Reason.UNKNOWN_TOKEN_ID),
        ],
        metadata={"vocab_size": "5"},
    )
    status = errors.status(error)
    assert status.message == "request.sampling.top_p: must be above 0 (and 1 more)"
    (info,) = unpacked(status, error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain, dict(info.metadata)) == ("INVALID_VALUE", "chairlift", {"vocab_size": "5"})
    (bad,) = unpacked(status, error_details_pb2.BadRequest)
    assert [(v.field, v.description, v.reason) for v in bad.field_violations] == [
        ("request.sampling.top_p", "must be above 0", "INVALID_VALUE"),
        ("requests[3].token_ids.ids[0]", "token id -1", "UNKNOWN_TOKEN_ID"),
    ]
    assert unpacked(status, error_details_pb2.RetryInfo) == []


def test_a_refusal_for_lack_of_room_says_when_to_try_again() -> None:
    error = ServiceError(Reason.QUEUE_FULL, "full", retry_after=0.25)
    (retry,) = unpacked(errors.status(error), error_details_pb2.RetryInfo)
    assert retry.retry_delay.ToTimedelta().total_seconds() == 0.25
    assert dict(errors.trailers(error))["grpc-retry-pushback-ms"] == "250"


@pytest.mark.parametrize("reason", [Reason.QUEUE_FULL, Reason.WORKER_LOST, Reason.SHUTTING_DOWN])
def test_what_passes_by_itself_may_be_tried_again(reason: Reason) -> None:
    assert int(dict(errors.trailers(ServiceError(reason, "m")))["grpc-retry-pushback-ms"]) > 0


def test_a_message_too_large_is_never_worth_trying_again() -> None:
    trailers = dict(errors.trailers(ServiceError(Reason.MESSAGE_TOO_LARGE, "m")))
    assert trailers["grpc-retry-pushback-ms"] == "-1"  # gRFC A6: a negative value forbids retries


def test_refusals_of_bad_input_say_nothing_of_retries() -> None:
    assert "grpc-retry-pushback-ms" not in dict(errors.trailers(ServiceError(Reason.INVALID_VALUE, "m")))


@pytest.mark.parametrize("char", ["é", "日", "🦤"])
def test_a_long_message_is_cut_on_a_character_border(char: str) -> None:
    message = ServiceError(Reason.INTERNAL, char * 20_000).message
    assert set(message) == {char}
    assert 1024 - 4 < len(message.encode()) <= 1024


def test_control_characters_are_removed() -> None:
    assert ServiceError(Reason.INTERNAL, "a\x00b\x1b[31mc\nd\u2028e\ud800f g").message == "ab[31mcdef g"


def test_trailers_stay_below_what_grpc_carries() -> None:
    violations = [Violation(f"requests[{i}].token_ids.ids[{i}]", "č" * 5000) for i in range(10_000)]
    error = errors.from_violations(violations, metadata={"context_len": "8192"})
    assert error.message.endswith("(and 9999 more)")
    size = sum(len(key) + 4 * len(value) // 3 for key, value in errors.trailers(error))  # binary values go as base64
    assert size + 3 * len(error.message.encode()) < 8192 - 512  # the message goes percent-encoded
    (bad,) = unpacked(errors.status(error), error_details_pb2.BadRequest)
    assert len(bad.field_violations) >= 3


@pytest.mark.parametrize(
    ("text", "reason", "message"),
    [
        ("NUMERICAL_ERROR: logits of token 3 are NaN", Reason.NUMERICAL_ERROR, "logits of token 3 are NaN"),
        ("POISONED_REQUEST: a: b", Reason.POISONED_REQUEST, "a: b"),
        ("NONSENSE: what", Reason.INTERNAL, "what"),
        ("", Reason.INTERNAL, "A fault of the service."),
    ],
)
def test_the_workers_errors_keep_their_reason(text: str, reason: Reason, message: str) -> None:
    error = errors.from_worker(text)
    assert (error.reason, error.message) == (reason, message)


async def test_a_client_of_grpc_aio_gets_code_message_and_details() -> None:
    error = errors.from_violations([Violation("request.text", "příliš " * 400, Reason.PROMPT_TOO_LONG)])

    async def refuse(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await errors.abort(context, error)

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(refuse)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"M": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/t.T/M")(b"", timeout=10)
    finally:
        await server.stop(None)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == error.message
    details = dict(caught.value.trailing_metadata())["grpc-status-details-bin"]
    status = status_pb2.Status.FromString(details)
    (bad,) = unpacked(status, error_details_pb2.BadRequest)
    assert bad.field_violations[0].field == "request.text"
