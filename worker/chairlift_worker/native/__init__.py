"""The native library: one plain C interface, loaded with ctypes."""

from chairlift_worker.native.library import load, load_brief

__all__ = ["load", "load_brief"]
