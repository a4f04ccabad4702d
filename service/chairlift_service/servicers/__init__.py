"""The gRPC services: each call's way through the service, and nothing else."""
