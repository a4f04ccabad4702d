"""Shared memory between the service and the worker: rings, doorbells, status page, messages, settings."""
