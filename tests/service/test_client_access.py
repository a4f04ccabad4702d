"""The clients, and the program, at a service that wants TLS, a caller's certificate and a token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import chairlift_client as cl
import grpc
import pytest
from support.certificates import Certificates
from support.program import chairlift
from support.served import Served, serving

TOKEN = "a-token"


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    made = Certificates(tmp_path)
    issued = made.authority.issue_cert("caller.example")
    (tmp_path / "caller.pem").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    (tmp_path / "caller-key.pem").write_bytes(issued.private_key_pem.bytes())
    (tmp_path / "tokens").write_text(f"{TOKEN} me caller,admin\nother observer-only observer\n")
    (tmp_path / "token").write_text(TOKEN + "\n")
    return made


@pytest.fixture
async def served(certificates: Certificates) -> AsyncIterator[Served]:
    tokens = certificates.folder / "tokens"
    settings = {"tls_client_ca": certificates.ca, **certificates.settings}
    async with serving(tcp=True, auth_token_file=tokens, admin=True, **settings) as running:
        yield running


@pytest.fixture
def tls(certificates: Certificates) -> cl.Tls:
    folder = certificates.folder
    return cl.Tls(ca=certificates.ca, cert=folder / "caller.pem", key=folder / "caller-key.pem")


async def threaded(call: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(call)


async def test_every_client_gets_in_with_certificate_and_token(served: Served, tls: cl.Tls) -> None:
    def blocking() -> tuple[int, ...]:
        with cl.Client(served.tcp_target, tls=tls, token=TOKEN) as client:
            with client.generate([5, 6], max_new_tokens=2, ignore_eos=True) as events:
                assert isinstance(list(events)[-1], cl.Finished)
            return client.complete([5, 6], max_new_tokens=3, ignore_eos=True).token_ids

    def manager() -> list[list[int]]:
        model = cl.connect(served.tcp_target, tls=tls, token=TOKEN)
        return [output.generated_tokens for output in model.generate_batch([[7, 8]], max_new_tokens=2).values()]

    assert await threaded(blocking) == (5, 6, 5)
    assert await threaded(manager) == [[7, 8]]
    async with cl.AsyncClient(served.tcp_target, tls=tls, token=TOKEN) as client:
        assert (await client.complete([5], max_new_tokens=1, ignore_eos=True)).token_ids == (5,)
    async with cl.AsyncAdminClient(f"{served.target.removesuffix('/s')}/admin", token=TOKEN) as admin:
        assert await admin.flush_prefix_cache() == 7
    await served.idle()


async def test_refusals_are_errors_of_their_own_classes(served: Served, tls: cl.Tls) -> None:
    async with cl.AsyncClient(served.tcp_target, tls=tls) as client:
        with pytest.raises(cl.UnauthenticatedError) as caught:
            await client.complete([5])
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
    async with cl.AsyncClient(served.target, token="other") as client:
        with pytest.raises(cl.PermissionDeniedError) as denied:
            await client.complete([5])
        assert denied.value.reason == "PERMISSION_DENIED"
        assert (await client.get_server()).state.name == "SERVING"


async def test_a_certificate_of_another_name_is_taken_only_where_that_name_is_expected(
    served: Served, certificates: Certificates, tls: cl.Tls
) -> None:
    target = served.tcp_target.replace("127.0.0.1", "localhost")
    named = cl.Tls(ca=tls.ca, cert=tls.cert, key=tls.key, server_name="wrong.example")
    async with cl.AsyncClient(target, tls=named, token=TOKEN) as client:
        with pytest.raises(cl.UnavailableError):
            await client.get_model(timeout=2)
    named = cl.Tls(ca=tls.ca, cert=tls.cert, key=tls.key, server_name="localhost")
    async with cl.AsyncClient(served.tcp_target, tls=named, token=TOKEN) as client:
        assert (await client.get_model()).name == "fake"


async def test_the_program_takes_certificate_and_token_from_files(served: Served, certificates: Certificates) -> None:
    folder = certificates.folder
    flags = ["--tls-ca", str(certificates.ca), "--tls-cert", f"{folder}/caller.pem"]
    flags += ["--tls-key", f"{folder}/caller-key.pem", "--target", served.tcp_target]
    done = await threaded(lambda: chairlift("generate", "ab", *flags, "--token-file", f"{folder}/token"))
    assert (done.returncode, done.stderr) == (0, "")
    done = await threaded(lambda: chairlift("info", *flags))
    assert done.returncode == 1
    assert done.stderr.startswith("chairlift: UNAUTHENTICATED (UNAUTHENTICATED): ")
    done = await threaded(lambda: chairlift("info", *flags, "--token-file", f"{folder}/tokens"))
    assert done.returncode == 2
    assert done.stderr == f"chairlift info: --token-file {folder}/tokens must hold one token and nothing else\n"
    assert TOKEN not in done.stderr.replace(str(folder), "")
