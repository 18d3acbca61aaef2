"""Complete `DistributedConfig` with the sections of the installed plugins, once per process."""

from __future__ import annotations

from threading import RLock

from distributed.config.schema import DistributedConfig
from distributed.registry.catalog import get_catalog, is_loading
from distributed.registry.sections import add_sections

_LOCK = RLock()
_done = False


def complete() -> None:
    """Add every registered section to `DistributedConfig`, unless that has been done.

    While plugins are being imported it does nothing: their sections are not known yet, and the class that
    they import is the one that is completed afterwards.
    """
    global _done
    if _done or is_loading():
        return
    with _LOCK:
        if not _done:
            add_sections(DistributedConfig, get_catalog().sections)
            _done = True
