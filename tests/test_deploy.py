"""The examples in deploy/ fit the image, the settings, and each other."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from chairlift_service.addresses import TcpAddress, UnixAddress, parse_address
from chairlift_service.app import STATUS_GRACE_S, WORKER_PATIENCE_S
from chairlift_service.config import ConfigError, Configuration, load
from chairlift_service.metrics.endpoint import PATH

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()
README = (ROOT / "deploy/README.md").read_text()
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
POD: dict[str, Any] = yaml.safe_load((ROOT / "deploy/kubernetes/sidecar.yaml").read_text())["spec"]["template"]

# Llama-3.2-1B's published config: 16 layers, width 2,048, 8,192 inside, 32 heads and 8 for keys and values of 64,
# 128,256 tokens, embedding and output layer tied.
LAYER_PARAMETERS = 2 * 2048 * 2048 + 2 * 2048 * 8 * 64 + 3 * 2048 * 8192 + 2 * 2048
WEIGHTS = 2 * (128_256 * 2048 + 16 * LAYER_PARAMETERS + 2048)  # bytes, in bfloat16
PAGE = 16 * 16 * 2 * 8 * 64 * 2  # bytes: 16 tokens, 16 layers, keys and values of bfloat16
WORKER, SERVICE = 600_000_000, 300_000_000
SERVICE_ITSELF, TEMPLATES = 65_000_000, 2 * 22 * 2**20  # bench/RESULTS.md, service/README.md
APPLICATION_STOP_S = 30.0
UNITS = {"s": 1, "m": 60, "g": 2**30, "Gi": 2**30}


def amount(text: str) -> int:
    """`7g`, `7Gi`: bytes; `660s`: seconds."""
    number, unit = re.fullmatch(r"(\d+)(\w+)", text).groups()  # type: ignore[union-attr]
    return int(number) * UNITS[unit]


@dataclass(frozen=True, kw_only=True)
class Example:
    """What both kinds of files say about the two containers."""

    chairlift: Mapping[str, Any]
    application: Mapping[str, Any]
    arguments: list[str]
    environment: Mapping[str, str]
    target: str  # where the application calls
    user: tuple[int, int]  # that both run as
    memory: int
    cpus: float
    mounts: Mapping[str, tuple[str, bool]]  # folder: (volume, whether it can be written)
    application_mounts: Mapping[str, tuple[str, bool]]
    checks: list[tuple[list[str], int]]  # commands that ask for health, and their time limits
    start_s: int  # that a start may take until somebody gives up
    stop_s: float  # that Chairlift has to stop

    @property
    def configuration(self) -> Configuration:
        """What the service reads. Raises ConfigError where it would refuse to start."""
        return load([*entry_point()[1:], *self.arguments], self.environment)


def entry_point() -> list[str]:
    return json.loads(re.search(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)[1])  # type: ignore[index]


def image_user() -> int:
    return int(re.search(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE)[1])  # type: ignore[index]


def compose() -> Example:
    chairlift, application = COMPOSE["services"]["chairlift"], COMPOSE["services"]["application"]
    assert chairlift["user"] == application["user"]
    uid, gid = chairlift["user"].split(":")

    def mounts(service: Mapping[str, Any]) -> dict[str, tuple[str, bool]]:
        return {v["target"]: (v.get("source", v["type"]), not v.get("read_only", False)) for v in service["volumes"]}

    check = chairlift["healthcheck"]
    assert check["test"][0] == "CMD"
    return Example(
        chairlift=chairlift,
        application=application,
        arguments=chairlift["command"],
        environment=chairlift["environment"],
        target=application["environment"]["CHAIRLIFT_TARGET"],
        user=(int(uid), int(gid)),
        memory=amount(chairlift["mem_limit"]),
        cpus=chairlift["cpus"],
        mounts=mounts(chairlift),
        application_mounts=mounts(application),
        checks=[(check["test"][1:], amount(check["timeout"]))],
        start_s=amount(check["start_period"]),
        stop_s=amount(chairlift["stop_grace_period"]),
    )


def kubernetes() -> Example:
    (chairlift,), (application,) = POD["spec"]["initContainers"], POD["spec"]["containers"]

    def environment(container: Mapping[str, Any]) -> dict[str, str]:
        return {variable["name"]: variable["value"] for variable in container["env"]}

    def mounts(container: Mapping[str, Any]) -> dict[str, tuple[str, bool]]:
        return {m["mountPath"]: (m["name"], not m.get("readOnly", False)) for m in container["volumeMounts"]}

    security, limits, startup = (
        POD["spec"]["securityContext"],
        chairlift["resources"]["limits"],
        chairlift["startupProbe"],
    )
    before = application["lifecycle"]["preStop"]["sleep"]["seconds"] + APPLICATION_STOP_S
    probes = [startup, chairlift["readinessProbe"]]
    return Example(
        chairlift=chairlift,
        application=application,
        arguments=chairlift["args"],
        environment=environment(chairlift),
        target=environment(application)["CHAIRLIFT_TARGET"],
        user=(security["runAsUser"], security["runAsGroup"]),
        memory=amount(limits["memory"]),
        cpus=float(limits["cpu"]),
        mounts=mounts(chairlift),
        application_mounts=mounts(application),
        checks=[(probe["exec"]["command"], probe["timeoutSeconds"]) for probe in probes],
        start_s=startup["periodSeconds"] * startup["failureThreshold"],
        stop_s=POD["spec"]["terminationGracePeriodSeconds"] - before,
    )


both = pytest.mark.parametrize("example", [compose(), kubernetes()], ids=["compose", "kubernetes"])


@both
def test_the_service_takes_every_flag_and_variable(example: Example) -> None:
    configuration = example.configuration
    assert configuration.warnings == ()
    assert configuration.worker.model.startswith("/models/")


@both
def test_the_image_is_this_version_and_its_entry_point_stays(example: Example) -> None:
    assert example.chairlift["image"] == f"chairlift:{VERSION}"
    assert not {"entrypoint", "command" if "args" in example.chairlift else "args"} & example.chairlift.keys()
    assert f"docker build -t chairlift:{VERSION} ." in README


@both
def test_callers_come_by_a_socket_in_a_folder_that_both_mount(example: Example) -> None:
    (address,) = example.configuration.listen
    assert isinstance(address, UnixAddress)
    assert example.target == str(address)
    folder = str(Path(address.path).parent)
    volume, writable = example.mounts[folder]
    assert writable
    assert example.application_mounts == {folder: (volume, False)}


@both
def test_both_containers_are_the_images_user_since_the_socket_is_its_owners_alone(example: Example) -> None:
    assert example.user[0] == image_user() != 0
    assert f"useradd --uid {image_user()} " in DOCKERFILE
    own = [example.chairlift.get("securityContext", {}), example.application.get("securityContext", {})]
    assert all("runAsUser" not in context for context in own)


@both
def test_what_the_service_writes_to_is_mounted_and_the_models_are_read_only(example: Example) -> None:
    cache = re.search(r"XDG_CACHE_HOME=(\S+)", DOCKERFILE)
    assert cache is not None
    assert {folder for folder, (_, writable) in example.mounts.items() if writable} == {
        "/run/chairlift",
        "/tmp",
        cache[1],
    }
    assert example.mounts["/models"][1] is False
    owned = re.search(r"install -d -o chairlift -g chairlift (.*)", DOCKERFILE)
    assert owned is not None
    assert set(example.mounts) - {"/tmp"} == set(owned[1].split())


def test_every_mounted_volume_is_declared_and_every_declared_one_is_mounted() -> None:
    for example, declared in (
        (kubernetes(), {volume["name"] for volume in POD["spec"]["volumes"]}),
        (compose(), {*COMPOSE["volumes"], "${MODELS:-./models}", "tmpfs"}),
    ):
        assert {volume for volume, _ in [*example.mounts.values(), *example.application_mounts.values()]} == declared


def test_the_compose_volume_of_the_socket_belongs_to_the_user() -> None:
    uid, gid = compose().user
    assert f"uid={uid},gid={gid},mode=0700," in COMPOSE["volumes"]["socket"]["driver_opts"]["o"]


@both
def test_a_start_may_take_as_long_as_the_service_allows_itself(example: Example) -> None:
    assert example.start_s >= example.configuration.service.start_timeout + 30
    in_image = re.search(r"--start-period=(\d+)s", DOCKERFILE)
    assert in_image is not None
    assert int(in_image[1]) >= load(["--model", "demo"], {}).service.start_timeout + 30


@both
def test_probes_ask_at_the_socket_and_get_their_answer_before_their_time_is_over(example: Example) -> None:
    for command, limit_s in example.checks:
        assert command[:4] == ["chairlift", "health", "--target", example.target]
        assert command[4] == "--deadline"
        assert float(command[5]) + 1 < limit_s  # and a second for the program to start
        assert json.dumps(command) in DOCKERFILE


@both
def test_the_drain_is_over_before_the_container_is_killed(example: Example) -> None:
    needed = example.configuration.service.drain_timeout + STATUS_GRACE_S + WORKER_PATIENCE_S
    assert needed < example.stop_s


def test_the_application_ends_before_the_service_that_it_calls() -> None:
    assert kubernetes().chairlift["restartPolicy"] == "Always"  # an init container with it is a sidecar
    assert compose().application["depends_on"] == {"chairlift": {"condition": "service_healthy"}}
    assert amount(compose().application["stop_grace_period"]) == APPLICATION_STOP_S


@both
def test_the_memory_is_enough_for_the_start_when_the_weights_are_there_twice(example: Example) -> None:
    assert example.configuration.worker.dtype == "bfloat16"
    assert example.configuration.worker.num_blocks is not None
    cache = example.configuration.worker.num_blocks * PAGE
    assert 2 * WEIGHTS + cache + WORKER + SERVICE < example.memory
    for row in (
        f"| weights | {WEIGHTS / 1e9:.2f} GB |",
        f"| cache | {cache / 1e9:.2f} GB |",
        f"| all, running | {(WEIGHTS + cache + WORKER + SERVICE) / 1e9:.2f} GB |",
        f"| all, while it starts | {(2 * WEIGHTS + cache + WORKER + SERVICE) / 1e9:.2f} GB |",
    ):
        assert row in README


@both
def test_the_services_share_of_memory_has_room_for_kept_results_and_chat_templates(example: Example) -> None:
    assert SERVICE_ITSELF + example.configuration.service.result_memory + TEMPLATES < SERVICE


@both
def test_threads_leave_a_core_of_the_limit_to_the_service(example: Example) -> None:
    # The worker would otherwise count the machine's cores, which a limit by quota does not lower.
    assert example.configuration.worker.num_threads == example.cpus - 1


def test_kubernetes_reserves_what_it_grants() -> None:
    for container in (kubernetes().chairlift, kubernetes().application):
        assert container["resources"]["requests"] == container["resources"]["limits"]


def test_only_metrics_are_on_the_network() -> None:
    for example in (compose(), kubernetes()):
        configuration = example.configuration
        assert configuration.admin_listen is None
        assert configuration.service.insecure
        assert isinstance(configuration.metrics_listen, TcpAddress)
    assert "ports" not in compose().chairlift
    assert COMPOSE["networks"]["metrics"] == {"internal": True}


def test_kubernetes_scrapes_and_watches_the_metrics_page() -> None:
    chairlift, annotations = kubernetes().chairlift, POD["metadata"]["annotations"]
    address = parse_address(str(kubernetes().configuration.metrics_listen))
    assert isinstance(address, TcpAddress)
    assert chairlift["ports"] == [{"name": "metrics", "containerPort": address.port}]
    assert annotations == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(address.port),
        "prometheus.io/path": PATH,
    }
    assert chairlift["livenessProbe"]["httpGet"] == {"path": PATH, "port": "metrics"}


def test_chairlift_has_no_rights_that_it_does_not_need() -> None:
    service, pod, container = compose().chairlift, POD["spec"], kubernetes().chairlift["securityContext"]
    assert service["read_only"] is container["readOnlyRootFilesystem"] is True
    assert service["cap_drop"] == container["capabilities"]["drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert container["allowPrivilegeEscalation"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert not {"privileged", "cap_add", "ipc", "pid", "shm_size"} & service.keys()
    assert not {"hostPID", "hostIPC", "hostNetwork", "shareProcessNamespace"} & pod.keys()


def test_variables_that_kubernetes_makes_of_services_names_stay_out() -> None:
    with pytest.raises(ConfigError, match="CHAIRLIFT_SERVICE_HOST"):
        load(["--model", "demo"], {"CHAIRLIFT_SERVICE_HOST": "10.0.0.1"})
    assert POD["spec"]["enableServiceLinks"] is False
