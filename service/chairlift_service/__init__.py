"""The front end: gRPC, text, sessions, and the watch over the worker process. Knows nothing of tensors."""
