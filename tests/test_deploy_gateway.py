"""The example in deploy/gateway fits the image, the settings, the gateway's flags, and the sidecar's example."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from chairlift_service.addresses import TcpAddress, UnixAddress
from chairlift_service.config import Configuration, load
from smg.launch_router import parse_router_args

ROOT = Path(__file__).resolve().parent.parent
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy/gateway/compose.yaml").read_text())
SIDECAR: dict[str, Any] = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]["chairlift"]
GATEWAY = COMPOSE["services"]["gateway"]
ENGINES = {name: service for name, service in COMPOSE["services"].items() if name != "gateway"}
ENTRY_POINT = ["--listen", "unix:/run/chairlift/chairlift.sock"]  # as tests/test_deploy.py finds it in the Dockerfile


def configuration(engine: dict[str, Any]) -> Configuration:
    return load([*ENTRY_POINT, *engine["command"]], engine["environment"])


def router() -> Any:
    return parse_router_args(GATEWAY["command"])


def test_the_gateway_routes_to_every_service_at_the_port_that_it_listens_on() -> None:
    targets = set()
    for name, engine in ENGINES.items():
        socket, tcp = configuration(engine).listen
        assert isinstance(socket, UnixAddress)
        assert isinstance(tcp, TcpAddress)
        assert tcp.host == "0.0.0.0"
        targets.add(f"grpc://{name}:{tcp.port}")
    assert len(targets) == 2
    assert set(router().worker_urls) == targets


def test_the_services_answer_gateways_and_nobody_else_reaches_them() -> None:
    assert COMPOSE["networks"]["engines"] == {"internal": True}
    for engine in ENGINES.values():
        assert configuration(engine).service.gateway == "on"
        assert configuration(engine).warnings == ()
        assert engine["networks"] == ["engines"]
        assert "ports" not in engine
    assert "engines" in GATEWAY["networks"]
    (port,) = GATEWAY["ports"]
    assert port == f"127.0.0.1:8080:{router().port}"


def test_a_service_is_what_it_is_as_a_sidecar() -> None:
    of_its_own = {"--listen=0.0.0.0:50051", "--gateway=on", "--insecure"}
    for engine in ENGINES.values():
        for name in ("image", "user", "mem_limit", "memswap_limit", "cpus", "healthcheck", "stop_grace_period"):
            assert engine[name] == SIDECAR[name], name
        shared = [flag for flag in SIDECAR["command"] if not flag.startswith("--metrics") and flag != "--insecure"]
        assert set(engine["command"]) == of_its_own | set(shared)


def test_the_gateway_ends_before_it_is_killed_and_is_the_version_that_tests_run_with() -> None:
    assert router().shutdown_grace_period_secs < int(GATEWAY["stop_grace_period"].removesuffix("s"))
    pinned = re.search(r"smg==(\d+)\.(\d+)", GATEWAY["build"]["dockerfile_inline"])
    project = re.search(r'"smg>=(\d+)\.(\d+),', (ROOT / "pyproject.toml").read_text())
    assert pinned is not None
    assert project is not None
    assert pinned.groups() == project.groups()


def test_nobody_has_rights_that_are_not_needed() -> None:
    for service in COMPOSE["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
