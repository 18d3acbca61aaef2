"""Finds plugins, keeps a broken one from breaking anything else, and holds the catalog."""

from __future__ import annotations

import importlib
import importlib.util
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

import pluggy

from distributed.config.aliases import guess_backend
from distributed.errors import UserError
from distributed.interfaces.backend import Backend
from distributed.interfaces.backend_spec import BackendSpec
from distributed.interfaces.codec import DENSE, CodecSpec
from distributed.interfaces.tracker import TrackerSpec
from distributed.registry import hookspecs
from distributed.registry.sections import load_section

if TYPE_CHECKING:
    from distributed.config.sections import Section

__all__ = [
    "BrokenPlugin",
    "Catalog",
    "GROUPS",
    "build_catalog",
    "get_catalog",
    "is_loading",
    "load_target",
    "missing_modules",
    "require",
]

GROUPS = ("distributed.backends", "distributed.plugins")
_OURS = "distributed-trainer"
_LOADING = threading.local()


@dataclass(frozen=True)
class BrokenPlugin:
    """A plugin that could not be loaded, and why.

    Attributes:
        name: its entry point's name.
        origin: distribution and target, e.g. ``acme-backend 1.2 (acme.plugin)``.
        error: one line.
        details: the traceback.
    """

    name: str
    origin: str
    error: str
    details: str


class Catalog:
    """What all plugins together offer.

    Attributes:
        manager: pluggy's manager, for calling hooks.
        backends: by name.
        sections: sections of the configuration, by name.
        codecs: of gradients, by name.
        trackers: in registration order.
        broken: plugins that failed, which nothing else depends on.
        sources: plugin -> distribution and target, as far as it came from an entry point.
    """

    def __init__(
        self,
        manager: pluggy.PluginManager,
        broken: list[BrokenPlugin],
        sources: Mapping[str, str] | None = None,
    ) -> None:
        self.manager, self.broken, self.sources = manager, broken, sources or {}
        self.backends: dict[str, BackendSpec] = {}
        self.sections: dict[str, type[Section]] = {}
        self.codecs: dict[str, CodecSpec] = {}
        self.trackers: list[TrackerSpec] = []
        self.origins: dict[str, str] = {}
        for plugin, found in self._collect("register_backends"):
            for spec in found:
                self._add_backend(plugin, spec)
        for plugin, found in self._collect("register_sections", kind=dict):
            for name, target in found.items():
                self._add_section(plugin, name, target)
        for plugin, found in self._collect("register_codecs"):
            for codec in found:
                self._add_codec(plugin, codec)
        for _, found in self._collect("register_trackers"):
            self.trackers += found

    def backend(self, name: str, field: str = "backend") -> BackendSpec:
        """The spec called `name`, which the config's `field` asks for.

        Raises:
            UserError: no plugin registers that name; names the nearest, and a broken plugin
                that may be the one meant.
        """
        if name in self.backends:
            return self.backends[name]
        broken = "".join(f" The plugin '{b.name}' could not be loaded: {b.error}." for b in self.broken)
        raise UserError(
            f"no backend is called '{name}'.{guess_backend(name, self.backends)}{broken}",
            field=field,
            allowed=", ".join(sorted(self.backends)),
            remedy="`python -m distributed.cli backends` lists them",
        )

    def load_backend(self, spec: BackendSpec) -> Backend:
        """Import and build the backend.

        Raises:
            UserError: its requirements are not installed.
        """
        require(spec.requires, f"backend '{spec.name}'", spec.install_hint)
        backend: Backend = load_target(spec.target)()
        backend.spec = spec
        return backend

    def add_commands(self, subparsers: Any) -> None:
        """Let plugins add their verbs to the command line; a raising one joins `broken`."""
        for _ in self._collect("register_commands", subparsers=subparsers):
            continue

    def _collect(self, hook: str, kind: type = list, **arguments: Any) -> Iterator[tuple[str, Any]]:
        """Each plugin's answer as a `kind`, one by one, so that a raising hook marks its plugin alone."""
        for implementation in getattr(self.manager.hook, hook).get_hookimpls():
            try:
                words = [arguments[name] for name in implementation.argnames]
                answer = kind(implementation.function(*words) or ())
            except Exception as error:  # noqa: BLE001 - third-party code may raise anything
                name = implementation.plugin_name
                self.broken.append(_broken(name, self.sources.get(name, hook), error))
                continue
            yield implementation.plugin_name, answer

    def _add_backend(self, plugin: str, spec: BackendSpec) -> None:
        if spec.name in self.backends:
            self._refuse_twice(plugin, f"backend '{spec.name}'", self.origins[spec.name])
            return
        self.backends[spec.name] = spec
        self.origins[spec.name] = plugin

    def _add_codec(self, plugin: str, codec: CodecSpec) -> None:
        if codec.name in self.codecs or codec.name == DENSE:
            self._refuse_twice(
                plugin, f"codec '{codec.name}'", self.origins.get(f"codec {codec.name}", "the project")
            )
            return
        self.codecs[codec.name] = codec
        self.origins[f"codec {codec.name}"] = plugin

    def _refuse_twice(self, plugin: str, what: str, owner: str) -> None:
        error = f"{what} is already registered by {self.sources.get(owner, owner)}"
        self.broken.append(BrokenPlugin(plugin, self.sources.get(plugin, plugin), error, ""))

    def _add_section(self, plugin: str, name: str, target: str) -> None:
        try:
            taken = {*self.sections, *(s.native.name for s in self.sections.values() if s.native)}
            self.sections[name] = load_section(name, target, taken)
        except Exception as error:  # noqa: BLE001 - third-party code may raise anything
            self.broken.append(_broken(plugin, self.sources.get(plugin, plugin), error))


def load_target(target: str) -> Any:
    """``package.module:name`` -> the object."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def missing_modules(requires: Iterable[str]) -> list[str]:
    """Those of `requires` that cannot be imported, without importing them."""
    return [name for name in requires if not _importable(name)]


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that a dotted name lies in
        return False


def require(requires: Iterable[str], who: str, install_hint: str) -> None:
    """Raise a UserError with the command to run when a requirement of `who` is missing."""
    missing = missing_modules(requires)
    if missing:
        raise UserError(
            f"{who} needs {', '.join(missing)}, not installed here",
            remedy=f"Install it: {install_hint}" if install_hint else None,
        )


def build_catalog(extra: Iterable[Any] = (), found: Iterable[EntryPoint] | None = None) -> Catalog:
    """Load every entry point of our groups, each in its own try.

    Args:
        extra: plugin modules or objects to register besides, for tests and embedding.
        found: entry points instead of the installed ones.
    """
    with _loading():
        return _build_catalog(extra, found)


def is_loading() -> bool:
    """Whether this thread is importing plugins just now."""
    return getattr(_LOADING, "depth", 0) > 0


@contextmanager
def _loading() -> Iterator[None]:
    _LOADING.depth = getattr(_LOADING, "depth", 0) + 1
    try:
        yield
    finally:
        _LOADING.depth -= 1


def _build_catalog(extra: Iterable[Any], found: Iterable[EntryPoint] | None) -> Catalog:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    broken: list[BrokenPlugin] = []
    points = [p for group in GROUPS for p in entry_points(group=group)] if found is None else list(found)
    # The name of a built-in backend cannot be taken.
    points.sort(key=lambda point: point.dist is None or point.dist.name != _OURS)
    sources: dict[str, str] = {}
    # A distribution found twice on sys.path lists its entry points twice.
    for point in {(p.group, p.name, p.value): p for p in points}.values():
        try:
            manager.register(point.load(), name=f"{point.name}")
            sources[point.name] = _origin(point)
        except Exception as error:  # noqa: BLE001 - third-party code may raise anything
            broken.append(_broken(point.name, _origin(point), error))
    for plugin in extra:
        manager.register(plugin)
    return Catalog(manager, broken, sources)


@cache
def get_catalog() -> Catalog:
    """The installed plugins, loaded once per process."""
    return build_catalog()


def _origin(point: EntryPoint) -> str:
    owner = f"{point.dist.name} {point.dist.version}" if point.dist else "unknown distribution"
    return f"{owner} ({point.value})"


def _broken(name: str, origin: str, error: Exception) -> BrokenPlugin:
    details = "".join(traceback.format_exception(error))
    return BrokenPlugin(name, origin, f"{type(error).__name__}: {' '.join(str(error).split())}", details)
