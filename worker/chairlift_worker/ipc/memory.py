"""Anonymous shared memory: a descriptor and its mapping, without a name anywhere."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os


class SharedMemory:
    """A memfd, mapped. Its pages are reserved and its size is sealed, so that no access can end in SIGBUS.

    Owns `fd` and the mapping; `close` gives both back. `address` is valid until then; who hands it to native code keeps
    a `hold` meanwhile.
    """

    def __init__(self, *, fd: int) -> None:
        self.fd = fd
        self.size = os.fstat(fd).st_size  # bytes
        # All pages at once: a process would else seem to grow until it has been through all of a ring.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._mapping = mmap.mmap(fd, self.size, flags=flags)  # ValueError for an empty file
        self.address = ctypes.addressof(self.hold())

    @classmethod
    def create(cls, *, name: str, size: int) -> SharedMemory:
        """`size` bytes of zeros; `name` shows in /proc only. Raises OSError where memory does not suffice."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(fd=fd)
        except BaseException:
            os.close(fd)
            raise

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._mapping.closed

    def hold(self) -> ctypes.c_char:
        """Something to keep as long as the address is used: while it exists, `close` raises BufferError."""
        return ctypes.c_char.from_buffer(self._mapping)

    def view(self) -> memoryview:
        """The bytes, for Python to read and write; to be released before `close`, as a `hold`."""
        return memoryview(self._mapping)

    def close(self) -> None:
        """Unmap and close; a second call does nothing. Raises BufferError while somebody holds the memory."""
        if not self._mapping.closed:
            self._mapping.close()
            os.close(self.fd)
