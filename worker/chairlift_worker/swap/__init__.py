"""The swap pool: host memory that keeps what evicted requests have computed.

pool: which slot of it is whose. space: what goes there, what comes back, when slots are free again. policy: whether
that is cheaper than computing again. mover: the copies; the only part that knows tensors.
"""
