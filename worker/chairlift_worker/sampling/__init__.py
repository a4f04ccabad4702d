"""From a row of logits to a token: a pure function of the logits, the request's parameters, seed and token index."""

from chairlift_worker.sampling.sampler import Sampler

__all__ = ["Sampler"]
