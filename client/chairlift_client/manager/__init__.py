"""The manager: a served model with the method names of transformers' continuous batching.

A program that used transformers' changes its import and where the model comes from:

>>> from chairlift_client import GenerationConfig, connect
>>> model = connect(target)
>>> outputs = model.generate_batch(inputs=[[72, 105]], generation_config=GenerationConfig(max_new_tokens=5))
>>> [output.generated_tokens for output in outputs.values()]
[[72, 105, 72, 105, 72]]
"""

from chairlift_client.manager._batching_config import ContinuousBatchingConfig
from chairlift_client.manager._generation_config import GenerationConfig
from chairlift_client.manager._manager import ContinuousBatchingManager
from chairlift_client.manager._model import RemoteModel, connect
from chairlift_client.manager._output import GenerationOutput, RequestStatus

__all__ = [
    "ContinuousBatchingConfig",
    "ContinuousBatchingManager",
    "GenerationConfig",
    "GenerationOutput",
    "RemoteModel",
    "RequestStatus",
    "connect",
]
