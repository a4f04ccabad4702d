"""Server reflection, v1 and v1alpha.

grpcio-reflection brings v1alpha. v1 is the same protocol under another package name (grpc/grpc-proto,
grpc/reflection/v1/reflection.proto), so v1 is served by the same servicer, and its descriptor made from v1alpha's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

_V1ALPHA: Final = "grpc.reflection.v1alpha"
_V1: Final = "grpc.reflection.v1"
SERVICE_NAMES: Final = (f"{_V1}.ServerReflection", f"{_V1ALPHA}.ServerReflection")


def add_reflection(server: grpc.aio.Server, *, services: Sequence[str]) -> None:
    """Makes the server describe these services, and reflection itself."""
    _add_v1_descriptor()
    servicer = reflection.aio.ReflectionServicer((*services, *SERVICE_NAMES))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    generic = grpc.method_handlers_generic_handler(SERVICE_NAMES[0], {"ServerReflectionInfo": handler})
    server.add_generic_rpc_handlers((generic,))


def _add_v1_descriptor() -> None:
    """Puts v1's file into the pool that the servicer answers from."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileContainingSymbol(SERVICE_NAMES[0])
    except KeyError:
        pass
    else:
        return
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name = file.name.replace("v1alpha", "v1")
    file.package = _V1
    for message in file.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(_V1ALPHA, _V1)
    for method in file.service[0].method:
        method.input_type = method.input_type.replace(_V1ALPHA, _V1)
        method.output_type = method.output_type.replace(_V1ALPHA, _V1)
    pool.AddSerializedFile(file.SerializeToString())
