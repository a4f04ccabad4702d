"""Health, reflection and the names they tell, through a real channel."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from chairlift_service.servers import ADMIN_SERVICES, MAIN_SERVICES
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from support.served import Served, refusal, serving

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
OWN = {"", "chairlift.v1.GenerationService", "chairlift.v1.TextService", "chairlift.v1.InfoService"}
NAMES = {*OWN, "vllm.grpc.engine.VllmEngine"}


@pytest.fixture
async def served() -> Any:
    async with serving() as running:
        yield running


async def test_check_and_list_know_every_service_by_its_full_name(served: Served) -> None:
    for name in NAMES:
        assert (await served.health.Check(health_pb2.HealthCheckRequest(service=name))).status == SERVING
    listed = await served.health.List(health_pb2.HealthListRequest())
    assert {name: answer.status for name, answer in listed.statuses.items()} == dict.fromkeys(NAMES, SERVING)
    unknown = await refusal(served.health.Check(health_pb2.HealthCheckRequest(service="no.such.Service")))
    assert unknown.code is grpc.StatusCode.NOT_FOUND


async def test_watch_stays_open_and_tells_every_change_until_the_server_ends(served: Served) -> None:
    watches = [served.health.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("", *MAIN_SERVICES)]
    for watch in watches:
        assert (await watch.read()).status == SERVING
    await asyncio.sleep(0.1)
    assert not any(watch.done() for watch in watches)
    for serves in (False, True, False):
        served.core.main_health.set_serving(serving=serves)
        for watch in watches:
            assert (await asyncio.wait_for(watch.read(), 2)).status == (SERVING if serves else NOT_SERVING)
    served.core.main_health.close()
    for watch in watches:
        assert (await refusal(watch)).code is grpc.StatusCode.UNAVAILABLE


async def test_watching_an_unknown_service_says_so_and_stays_open(served: Served) -> None:
    watch = served.health.Watch(health_pb2.HealthCheckRequest(service="no.such.Service"))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    await asyncio.sleep(0.05)
    assert not watch.done()
    watch.cancel()


async def test_watchers_that_left_leave_no_task(served: Served) -> None:
    await served.health.Check(health_pb2.HealthCheckRequest())
    before = len(asyncio.all_tasks())
    for _ in range(20):
        watch = served.health.Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        watch.cancel()
    async with asyncio.timeout(5):
        while len(asyncio.all_tasks()) > before:  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


async def test_the_admin_address_has_health_of_its_own() -> None:
    async with (
        serving(admin=True) as served,
        grpc.aio.insecure_channel(served.target.removesuffix("/s") + "/admin") as channel,
    ):
        listed = await health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest())
        assert set(listed.statuses) == {"", "chairlift.v1.AdminService"} == {"", *ADMIN_SERVICES}


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_describes_all_services_in_both_versions(served: Served, version: str) -> None:
    method = served.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    call = method()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    names = {service.name for service in (await call.read()).list_services_response.service}
    assert names == (NAMES - {""}) | {
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    for name in names:
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=name))
        response = await call.read()
        files = [
            descriptor_pb2.FileDescriptorProto.FromString(file)
            for file in response.file_descriptor_response.file_descriptor_proto
        ]
        described = {f"{file.package}.{service.name}" for file in files for service in file.service}
        assert name in described
        imports = {dependency for file in files for dependency in file.dependency}
        assert imports <= {file.name for file in files}
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
