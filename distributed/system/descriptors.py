"""The limit of open descriptors of this process."""

from __future__ import annotations

import resource

__all__ = ["allow_descriptors"]

_OWN = 256
"""Descriptors that a process needs besides its connections."""


def allow_descriptors(num_connections: int) -> None:
    """Raise the soft limit of open descriptors to `num_connections` and some more, up to the hard limit.

    Systems set the soft limit to 1,024 for programs that use ``select``; a store of as many ranks fails then.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_connections + _OWN
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
