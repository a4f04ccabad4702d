"""Waking a receiver that sleeps. The ring itself never waits; this is how its user does.

The sleeper's protocol. The flag `asleep` lies in the ring's memory; only the receiver writes it, so that a sender that
dies can leave nothing half done.

    receiver                                     sender
    1. flag := asleep      (Receiver.arm)        a. publish the record
    2. full fence          (in arm)              b. full fence
    3. look at the ring    (in arm)              c. flag set? then ring the doorbell
    4. nothing: park on the doorbell
    5. flag := awake       (Receiver.disarm)

Either 3 sees what a published, or c sees the flag of 1: no wake-up is lost. While the receiver is awake a send makes no
system call. `Sender` does a to c by itself. A receiver that blocks:

    if not receiver.arm():            # True: there is something to read after all, and the receiver counts as awake
        doorbell.wait(timeout_s)
        receiver.disarm()
    while (record := receiver.receive()) is not None: ...

One in an event loop, with `loop.add_reader(doorbell.fd, on_bell)`; on_bell is also called once at the start:

    def on_bell():
        doorbell.clear()              # first, or a ring that comes while reading would be wiped away unread
        receiver.disarm()
        for _ in range(BATCH):        # bounded, for the loop has other work
            record = receiver.receive()
            if record is None:
                if receiver.arm():    # something came between the two looks
                    continue
                return                # armed: the next send rings
            handle(record)
        loop.call_soon(on_bell)
"""

from __future__ import annotations

import contextlib
import math
import os
import select


class Doorbell:
    """An eventfd. Whoever holds it may ring; one process waits. Owns `fd`."""

    def __init__(self, *, fd: int) -> None:
        self.fd = fd
        self._closed = False
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    @classmethod
    def create(cls) -> Doorbell:
        """A silent doorbell, not inherited by programs that are started."""
        return cls(fd=os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))

    def ring(self) -> None:
        """Wake whoever waits, now or later. Never blocks."""
        with contextlib.suppress(BlockingIOError):  # the count is at its limit: it is ringing
            os.eventfd_write(self.fd, 1)

    def clear(self) -> bool:
        """Silence it; says whether it was ringing."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return False
        return True

    def wait(self, timeout_s: float) -> bool:
        """Park until it rings, then silence it. False after `timeout_s` seconds of silence."""
        return bool(self._poll.poll(milliseconds(timeout_s))) and self.clear()

    def close(self) -> None:
        """Close the descriptor; a second call does nothing. Not while somebody waits."""
        if not self._closed:
            self._closed = True
            os.close(self.fd)


def milliseconds(timeout_s: float) -> int:
    """A time-out as poll takes it, rounded up, so that a short one does not become a busy loop."""
    return max(0, math.ceil(timeout_s * 1000))
