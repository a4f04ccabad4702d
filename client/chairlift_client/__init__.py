"""Client of the Chairlift gRPC service."""
