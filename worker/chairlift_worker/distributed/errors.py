"""When ranks cannot go on."""

from __future__ import annotations


class RanksApartError(Exception):
    """The ranks of a worker do not go on together: one is gone, or late, or could not do its part.

    What each of them holds is in doubt then. The worker ends, and the service replaces all of it.
    """
