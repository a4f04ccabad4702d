"""TLS over real sockets: who gets in, and files that are replaced under a running service."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import trustme
from chairlift_service.addresses import TcpAddress
from chairlift_service.tls import ServerTls, TlsFiles, _News
from chairlift_service.watched import FileError, Watched
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs
from support.certificates import Certificates, replace_file
from support.serve_fake import COMMAND_LINE
from support.served import Served, echo, eventually, generate, num_fds, rest, serving

LONG = 1000


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


@contextlib.asynccontextmanager
async def channel(served: Served, credentials: grpc.ChannelCredentials | None) -> AsyncIterator[grpc.aio.Channel]:
    """A connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    if credentials is None:
        made = grpc.aio.insecure_channel(served.tcp_target, options)
    else:
        made = grpc.aio.secure_channel(served.tcp_target, credentials, options)
    async with made:
        yield made


async def is_let_in(served: Served, credentials: grpc.ChannelCredentials | None) -> bool:
    async with channel(served, credentials) as made:
        code = await health_pb2_grpc.HealthStub(made).Check(health_pb2.HealthCheckRequest(), timeout=10).code()
        assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
        return code is grpc.StatusCode.OK


async def test_an_encrypted_address_answers_those_who_trust_it_and_nobody_in_plain_text(
    certificates: Certificates,
) -> None:
    async with serving(tcp=True, **certificates.settings) as served:
        assert await is_let_in(served, certificates.caller())
        assert not await is_let_in(served, certificates.caller(trusts=trustme.CA()))
        assert not await is_let_in(served, None)
        answer = await rest(served.generation.Generate(generate(5, 6)))  # the Unix socket is as it always is
        assert [i for m in answer for i in m.delta.token_ids] == echo([5, 6], 8)


async def test_mutual_tls_lets_in_only_callers_whose_certificate_the_authority_signed(
    certificates: Certificates,
) -> None:
    async with serving(tcp=True, tls_client_ca=certificates.ca, **certificates.settings) as served:
        assert await is_let_in(served, certificates.caller(signed_by=certificates.authority))
        assert not await is_let_in(served, certificates.caller())
        assert not await is_let_in(served, certificates.caller(signed_by=trustme.CA()))


async def test_replaced_files_hold_for_new_connections_and_open_streams_live_on(certificates: Certificates) -> None:
    first = certificates.authority
    settings = {"tls_client_ca": certificates.ca, **certificates.settings}
    async with serving(tcp=True, script={"step_s": 0.01}, **settings) as served:
        async with channel(served, certificates.caller(signed_by=first)) as old:
            call = type(served.generation)(old).Generate(generate(5, max_new_tokens=LONG))
            await call.read()
            second = trustme.CA()
            certificates.write(second)
            assert await is_let_in(served, certificates.caller(signed_by=second, trusts=second))
            assert not await is_let_in(served, certificates.caller(signed_by=second, trusts=first))
            assert not await is_let_in(served, certificates.caller(signed_by=first, trusts=second))
            before = (await call.read()).delta.index
            await call.read()
            assert (await call.read()).delta.index > before
            call.cancel()
        await served.idle()


def test_grpc_is_given_certificates_when_they_are_new_and_never_again(certificates: Certificates) -> None:
    """What it is given makes it free what it had, which other handshakes may be using (grpc/grpc#36693)."""
    made: list[str] = []

    def read() -> str:
        made.append(certificates.cert.read_text())
        return made[-1]

    watched = Watched([str(certificates.cert)], read=read)
    first, second = _News(watched), _News(watched)
    assert [first.fetch(), second.fetch(), first.fetch()] == [None] * 3
    certificates.write(trustme.CA())
    assert [first.fetch(), first.fetch(), second.fetch(), second.fetch()] == [made[1], None, made[1], None]


async def test_each_address_hears_of_replaced_files(certificates: Certificates) -> None:
    async with serving(tcp=True, listen="127.0.0.1:0", **certificates.settings) as served:
        certificates.write(trustme.CA())
        for address in served.app._entrance.addresses[1:]:
            async with grpc.aio.secure_channel(str(address), certificates.caller()) as made:
                await health_pb2_grpc.HealthStub(made).Check(health_pb2.HealthCheckRequest(), timeout=10)


async def test_a_certificate_without_its_key_changes_nothing_until_the_key_is_there(certificates: Certificates) -> None:
    first = certificates.authority
    async with serving(tcp=True, **certificates.settings) as served:
        old_key = certificates.key.read_bytes()
        second = trustme.CA()
        certificates.write(second)
        new_key = certificates.key.read_bytes()
        replace_file(certificates.key, old_key)  # the certificate was replaced, the key not yet
        with capture_logs() as logs:
            for _ in range(2):
                assert await is_let_in(served, certificates.caller(trusts=first))
        (told,) = [entry for entry in logs if entry["log_level"] == "error"]
        assert "key values mismatch" in told["error"]
        replace_file(certificates.key, new_key)
        assert await is_let_in(served, certificates.caller(trusts=second))
        assert not await is_let_in(served, certificates.caller(trusts=first))


@pytest.mark.parametrize(
    ("break_it", "why"),
    [
        (lambda c: c.cert.unlink(), "tls_cert = {0}/cert.pem: cannot be read: No such file or directory"),
        (lambda c: c.key.write_text("nonsense"), "tls_cert = {0}/cert.pem, tls_key = {0}/key.pem: not readable as PEM"),
        (lambda c: c.ca.write_text("nonsense"), "tls_client_ca = {0}/ca.pem: "),
        (
            lambda c: c.key.write_bytes(trustme.CA().issue_cert("x").private_key_pem.bytes()),
            "tls_cert = {0}/cert.pem, tls_key = {0}/key.pem: key values mismatch",
        ),
    ],
)
def test_files_that_cannot_be_used_are_named_in_one_line(certificates: Certificates, break_it, why: str) -> None:
    break_it(certificates)
    files = TlsFiles(cert=str(certificates.cert), key=str(certificates.key), client_ca=str(certificates.ca))
    with pytest.raises(FileError) as caught:
        ServerTls(files)
    assert str(caught.value).startswith(why.format(certificates.folder))
    assert "\n" not in str(caught.value)


def test_a_start_without_what_it_takes_is_one_line(tmp_path: Path) -> None:
    """The program, whose exit code tells wrong use from what went wrong."""
    missing = f"{tmp_path}/none"
    for flags, code, line in (
        (["--tls-cert", missing, "--tls-key", missing], 1, f"tls_cert = {missing}: cannot be read: No such file"),
        (["--auth-token-file", missing], 1, f"auth_token_file = {missing}: cannot be read: No such file"),
        (["--listen", "0.0.0.0:0"], 2, "listen = 0.0.0.0:0 (from --listen): other machines can reach this address"),
    ):
        command = [*COMMAND_LINE, "--model", "fake", *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (code, "")
        (told,) = done.stderr.splitlines()
        assert told.startswith(f"chairlift-serve: {line}")


async def test_two_hundred_connections_dropped_amid_their_streams_leave_nothing(certificates: Certificates) -> None:
    async with serving(tcp=True, script={"step_s": 0.005}, **certificates.settings) as served:

        async def drop() -> None:
            async with channel(served, certificates.caller()) as made:
                call = type(served.generation)(made).Generate(generate(5, max_new_tokens=LONG))
                await call.read()

        await drop()  # what is made once is there now
        await served.idle()
        fds, tasks = num_fds(), len(asyncio.all_tasks())
        for _ in range(20):
            await asyncio.gather(*(drop() for _ in range(10)))
        await served.idle()
        await eventually(lambda: num_fds() <= fds)
        await eventually(lambda: len(asyncio.all_tasks()) <= tasks)


@pytest.mark.parametrize(
    ("settings", "warnings"),
    [
        ({"insecure": True}, ["not encrypted", "no tokens"]),
        ({"tls": True}, ["no tokens"]),
        ({"tls": True, "tokens": True}, []),
        ({"tls": True, "client_ca": True}, []),
    ],
)
async def test_what_others_can_reach_unencrypted_or_unasked_is_said_in_the_log(
    certificates: Certificates, settings: dict[str, bool], warnings: list[str]
) -> None:
    tokens = certificates.folder / "tokens"
    tokens.write_text("abc\n")
    flags = {"listen": "0.0.0.0:0"}
    flags |= {"insecure": True} if "insecure" in settings else {}
    flags |= certificates.settings if "tls" in settings else {}
    flags |= {"tls_client_ca": certificates.ca} if "client_ca" in settings else {}
    flags |= {"auth_token_file": tokens} if "tokens" in settings else {}
    with capture_logs() as logs:
        async with serving(**flags) as served:
            assert isinstance(served.app._entrance.addresses[1], TcpAddress)
    told = [entry["event"] for entry in logs if entry["log_level"] == "warning"]
    assert [text[: len(start)] for text, start in zip(told, warnings, strict=True)] == warnings
