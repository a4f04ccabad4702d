"""The native library: one plain C interface, loaded with ctypes."""
