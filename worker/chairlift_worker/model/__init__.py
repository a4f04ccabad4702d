"""Models: where they come from, whether they can be served, and what is known of them once loaded."""

from chairlift_worker.model.errors import ModelError
from chairlift_worker.model.loaded import LoadedModel
from chairlift_worker.model.loader import load_model

__all__ = ["LoadedModel", "ModelError", "load_model"]
