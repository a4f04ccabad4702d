"""For the tests of programs that use the client: a real gRPC server with predictable answers, in this process."""

from chairlift_client.testing._model import EOS_TOKEN_ID, VOCAB_SIZE
from chairlift_client.testing._server import FakeServer

__all__ = ["EOS_TOKEN_ID", "VOCAB_SIZE", "FakeServer"]
