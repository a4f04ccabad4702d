"""Bearer tokens over the wire: who may call what, and a file that is replaced under a running service."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from chairlift.v1 import admin_service_pb2, generation_service_pb2, info_service_pb2, text_service_pb2
from chairlift_service.auth import Authorizer, parse_tokens
from chairlift_service.errors import ServiceError
from chairlift_service.watched import FileError
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs
from support.certificates import replace_file
from support.served import Served, generate, refusal, rest, serving

CALLER, OBSERVER, ADMIN, BOTH = "caller-token-1", "observer-token-2", "admin-token-3", "both-token-4="
FILE = f"""
# who has them
{CALLER}
{OBSERVER}  dashboard  observer   # Grafana
{ADMIN} operator admin
{BOTH} trainer caller,admin
"""
UNAUTHENTICATED, DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(FILE)
    return path


@pytest.fixture
async def served(tokens: Path) -> AsyncIterator[Served]:
    async with serving(auth_token_file=tokens, admin=True) as running:
        yield running


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def calls(served: Served, metadata: Any) -> dict[str, Any]:
    """One call of each service."""
    return {
        "generation": served.generation.Complete(
            generation_service_pb2.CompleteRequest(request=generate(5).request), metadata=metadata
        ),
        "text": served.text.Tokenize(text_service_pb2.TokenizeRequest(text="a"), metadata=metadata),
        "info": served.info.GetServer(info_service_pb2.GetServerRequest(), metadata=metadata),
        "admin": served.admin.FlushPrefixCache(admin_service_pb2.FlushPrefixCacheRequest(), metadata=metadata),
    }


async def codes(served: Served, metadata: Any) -> dict[str, grpc.StatusCode]:
    return {name: await call.code() for name, call in calls(served, metadata).items()}


@pytest.mark.parametrize(
    ("token", "allowed"),
    [
        (CALLER, {"generation", "text", "info"}),
        (OBSERVER, {"info"}),
        (ADMIN, {"info", "admin"}),
        (BOTH, {"generation", "text", "info", "admin"}),
    ],
)
async def test_a_token_is_good_for_the_calls_of_its_roles_only(served: Served, token: str, allowed: set[str]) -> None:
    for name, code in (await codes(served, bearer(token))).items():
        assert code is (grpc.StatusCode.OK if name in allowed else DENIED), name


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        bearer("caller-token-"),
        bearer(CALLER + "x"),
        bearer(""),
        (("authorization", CALLER),),
        (("authorization", f"Basic {CALLER}"),),
        (*bearer(CALLER), *bearer(CALLER)),
    ],
)
async def test_without_a_token_of_the_file_every_call_is_refused_before_it_begins(
    served: Served, metadata: Any
) -> None:
    with capture_logs() as logs:
        for name, call in calls(served, metadata).items():
            refused = await refusal(call)
            assert (refused.code, refused.reason) == (UNAUTHENTICATED, "UNAUTHENTICATED"), name
            assert (refused.initial_metadata, refused.retry_s, refused.pushback_ms) == ((), None, None)
            assert CALLER not in refused.message
        refused = await refusal(served.generation.Generate(generate(5), metadata=metadata))
        assert refused.code is UNAUTHENTICATED
    assert CALLER not in repr(logs)
    await served.idle()
    assert served.status.prompt_tokens == 0


async def test_the_scheme_is_written_in_any_case_and_a_stream_is_as_good_as_a_unary_call(served: Served) -> None:
    metadata = (("authorization", f"bEARER {CALLER}"),)
    events = await rest(served.generation.Generate(generate(5), metadata=metadata))
    assert events[-1].finished.usage.generated_tokens == 8
    refused = await refusal(served.generation.Generate(generate(5), metadata=bearer(ADMIN)))
    assert (refused.code, refused.reason) == (DENIED, "PERMISSION_DENIED")


async def test_a_call_that_is_not_allowed_is_logged_by_the_tokens_name(served: Served) -> None:
    with capture_logs() as logs:
        await codes(served, bearer(OBSERVER))
    told = [entry["token"] for entry in logs if entry["event"] == "call not allowed"]
    assert told == ["dashboard"] * 3
    assert OBSERVER not in repr(logs)


async def test_health_needs_no_token_and_reflection_needs_any(served: Served) -> None:
    answer = await served.health.Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    assert (await refusal(stub.ServerReflectionInfo(iter([question])))).code is UNAUTHENTICATED
    answers = await rest(stub.ServerReflectionInfo(iter([question]), metadata=bearer(OBSERVER)))
    assert "chairlift.v1.GenerationService" in {each.name for each in answers[0].list_services_response.service}


async def test_methods_that_do_not_exist_are_unimplemented_for_those_with_a_token_alone(served: Served) -> None:
    call = served.channel.unary_unary("/chairlift.v1.NoService/Do")
    assert await call(b"").code() is UNAUTHENTICATED
    assert await call(b"", metadata=bearer(CALLER)).code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_replaced_file_holds_from_the_next_call_on(served: Served, tokens: Path) -> None:
    running = served.generation.Generate(generate(5, max_new_tokens=1000), metadata=bearer(CALLER))
    await running.read()
    replace_file(tokens, f"{ADMIN} now-a-caller caller\n".encode())
    assert (await codes(served, bearer(CALLER)))["info"] is UNAUTHENTICATED
    assert (await codes(served, bearer(ADMIN)))["generation"] is grpc.StatusCode.OK
    assert (await rest(running))[-1].finished.usage.generated_tokens == 1000  # what has begun goes on
    replace_file(tokens, f"{CALLER} caller with too many words\n".encode())
    with capture_logs() as logs:
        assert (await codes(served, bearer(ADMIN)))["generation"] is grpc.StatusCode.OK  # as before
    (told,) = [entry for entry in logs if entry["log_level"] == "error"]
    assert told["error"] == f"auth_token_file = {tokens}: line 1 has more than TOKEN NAME ROLES"
    replace_file(tokens, b"")
    assert set((await codes(served, bearer(ADMIN))).values()) == {UNAUTHENTICATED}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("abc name role", "line 1: roles are caller, observer, admin, with commas between them"),
        ("abc name caller,", "line 1: roles are"),
        ("abc\n# c\nabc other", "line 3: the token stands there twice"),
        ("geheimn\u00edk", "line 1: a token has letters"),
        ("a b caller d", "line 1 has more than"),
    ],
)
def test_a_line_that_says_nothing_clear_is_refused_by_its_number_alone(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        parse_tokens(text)
    assert not {"abc", "geheimn\u00edk"} & set(str(caught.value).split())


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "cannot be read: No such file or directory"), (b"\n# none\n", "no token"), (b"\xff", "is no UTF-8")],
)
def test_a_file_that_cannot_be_used_is_named_in_one_line(tmp_path: Path, content: bytes | None, why: str) -> None:
    path = tmp_path / "t"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FileError, match=rf"auth_token_file = {path}: .*{why}"):
        Authorizer(str(path))


async def test_all_tokens_are_compared_whatever_the_caller_sends(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How long the comparison takes must not tell which token, or how much of one, was right."""
    authorizer, compared = Authorizer(str(tokens)), []
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: compared.append((len(a), len(b))) or a == b)
    for sent in (CALLER, BOTH, "x", "x" * 1000):
        compared.clear()
        with contextlib.suppress(ServiceError):  # whether it is refused is the same here
            authorizer.check("/chairlift.v1.InfoService/GetServer", bearer(sent))
        assert compared == [(32, 32)] * 4
