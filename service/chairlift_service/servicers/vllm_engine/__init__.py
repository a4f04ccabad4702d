"""The protocol by which the gateway `smg` reaches its engines, vllm.grpc.engine: that of another project.

Needs the extra `gateway`; imported only where gateways are answered. Requests become those of chairlift.v1 and take
the same way; what they ask beyond that is refused.
"""
