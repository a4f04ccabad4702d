"""Scrapes of a service's metrics, read by prometheus_client's own parser."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from chairlift_service.addresses import TcpAddress
from prometheus_client.parser import text_string_to_metric_families as parse

from support.served import Served

ANYWHERE = {"metrics_listen": "127.0.0.1:0"}


def where(served: Served) -> TcpAddress:
    """The endpoint's address with its real port."""
    endpoint = served.app._entrance._endpoint
    assert endpoint is not None
    (bound, _) = endpoint._sockets[0]
    return TcpAddress(*bound.getsockname()[:2])


async def http(
    served: Served, request: str = "GET /metrics HTTP/1.1", *headers: str, tls: ssl.SSLContext | None = None
) -> tuple[int, dict[str, str], str]:
    """Status, headers and body of one request over a connection of its own."""
    address = where(served)
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(address.host, address.port, ssl=tls)
        writer.write("\r\n".join((request, "Host: here", *headers, "", "")).encode())
        answer = (await reader.read()).decode()
        writer.close()
    if not answer:
        raise ConnectionResetError
    head, _, body = answer.partition("\r\n\r\n")
    first, *lines = head.split("\r\n")
    return int(first.split()[1]), dict(line.split(": ", 1) for line in lines), body


async def scrape(served: Served) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by name and labels."""
    code, headers, body = await http(served)
    assert code == 200
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse(body)
        for sample in family.samples
    }


def value(samples: Any, name: str, **labels: str) -> float:
    found: float = samples[f"chairlift_{name}", tuple(sorted(labels.items()))]
    return found
