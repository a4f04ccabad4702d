"""The program `chairlift`: one module a command."""

from chairlift_client.cli._main import main

__all__ = ["main"]
