"""Certificates of a test's own authority."""

from __future__ import annotations

from pathlib import Path

import grpc
import trustme


def replace_file(path: Path, content: bytes) -> None:
    """As renewals do it: another file takes the name."""
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.replace(path)


class Certificates:
    """An authority that signs for `localhost` and 127.0.0.1, and the PEM files of a server in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = trustme.CA()
        self.write(self.authority)

    @property
    def cert(self) -> Path:
        return self.folder / "cert.pem"

    @property
    def key(self) -> Path:
        return self.folder / "key.pem"

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def settings(self) -> dict[str, Path]:
        return {"tls_cert": self.cert, "tls_key": self.key}

    def write(self, authority: trustme.CA) -> None:
        """Replaces the server's files by those that this authority signs."""
        self.authority = authority
        issued = authority.issue_cert("localhost", "127.0.0.1")
        replace_file(self.cert, b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        replace_file(self.key, issued.private_key_pem.bytes())
        replace_file(self.ca, authority.cert_pem.bytes())

    def caller(
        self, *, signed_by: trustme.CA | None = None, trusts: trustme.CA | None = None
    ) -> grpc.ChannelCredentials:
        """What a caller shows and trusts; unless said otherwise it shows nothing and trusts who has signed last."""
        trusted = (trusts or self.authority).cert_pem.bytes()
        if signed_by is None:
            return grpc.ssl_channel_credentials(trusted)
        issued = signed_by.issue_cert("caller.example")
        chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
        return grpc.ssl_channel_credentials(trusted, issued.private_key_pem.bytes(), chain)
