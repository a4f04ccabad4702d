from __future__ import annotations

from pathlib import Path

import pytest
from chairlift_client._access import Access, Connection, Tls


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHAIRLIFT_TOKEN", raising=False)


@pytest.mark.parametrize(
    ("target", "access", "sent"),
    [
        ("unix:/s", Access(token="t0k"), True),
        ("127.0.0.1:1", Access(token="t0k"), True),
        ("localhost:1", Access(token="t0k"), True),
        ("[::1]:1", Access(token="t0k"), True),
        ("host.example:1", Access(token="t0k", tls=Tls()), True),
        ("host.example:1", Access(token="t0k", token_in_clear=True), True),
        ("host.example:1", Access(), False),
    ],
)
def test_the_token_goes_where_nobody_else_reads_it_or_where_that_was_allowed(
    target: str, access: Access, sent: bool
) -> None:
    connection = Connection.resolve(target, access)
    assert connection.metadata == ((("authorization", "Bearer t0k"),) if sent else ())
    assert "t0k" not in repr(connection)


@pytest.mark.parametrize("target", ["host.example:1", "10.0.0.1:1", "localhost.example.com:1", "128.0.0.1:1"])
def test_the_token_never_goes_to_another_machine_in_clear(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAIRLIFT_TOKEN", "t0k")
    with pytest.raises(ValueError, match=f"{target} for everybody to read") as caught:
        Connection.resolve(target, Access())
    assert "t0k" not in str(caught.value)


def test_a_token_that_is_given_wins_over_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAIRLIFT_TOKEN", "from-the-environment")
    assert Connection.resolve("unix:/s", Access()).metadata == (("authorization", "Bearer from-the-environment"),)
    assert Connection.resolve("unix:/s", Access(token="given")).metadata == (("authorization", "Bearer given"),)


@pytest.mark.parametrize("token", ["two words", "line\n", "žluť"])
def test_what_no_header_carries_is_refused_and_not_repeated(token: str) -> None:
    with pytest.raises(ValueError, match="a token has letters") as caught:
        Connection.resolve("unix:/s", Access(token=token))
    assert token not in str(caught.value)


def test_tls_that_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a certificate needs its key"):
        Tls(cert="c.pem")
    with pytest.raises(ValueError, match=r"/none\.pem cannot be read: No such file"):
        Connection.resolve("h:1", Access(tls=Tls(ca=tmp_path / "none.pem")))
    with pytest.raises(ValueError, match="unix:/s is a Unix socket"):
        Connection.resolve("unix:/s", Access(tls=Tls()))
