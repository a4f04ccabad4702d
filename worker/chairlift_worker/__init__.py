"""The worker: scheduler, paged memory, attention, sampling. Knows tokens, memory and the device; not text, not gRPC."""
