"""Object stores and everything else that fsspec reaches by URL: whole objects, no renames."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any, BinaryIO, ClassVar, TypeVar

from distributed.checkpoint.filesystem import FileLayer, Ranges, check_json_size
from distributed.errors import UserError
from distributed.system.random_numbers import draw_apart

__all__ = ["ObjectLayer", "located"]

_BLOCK = 16 << 20
_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+)://(.*)")
# Stores in which a directory is no more than the beginning of names. Others have to make theirs.
_FLAT = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "oss", "r2", "memory"})
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}

_DRAW_PAUSES = ("botocore.retryhandler", "gcsfs.retry")

Method = TypeVar("Method", bound=Callable[..., Any])


def located(path: str) -> tuple[FileLayer, str]:
    """What reads and writes `path`, and its absolute form: a path of this host, or a URL.

    ``file://`` is a path of this host.

    Raises:
        UserError: a URL that fsspec cannot open: unknown, or its package is not installed.
    """
    match = _URL.match(path)
    if match is None:
        _refuse_squeezed(path)
        return FileLayer(), os.path.abspath(path)
    scheme, rest = match[1].lower(), match[2].rstrip("/")
    if scheme in ("file", "local"):
        return FileLayer(), os.path.abspath(match[2])
    return ObjectLayer(_file_system(scheme, path), scheme in _FLAT), f"{scheme}://{rest}"


def _refuse_squeezed(path: str) -> None:
    """``Path("s3://bucket")`` has one slash left, and would be a directory called ``s3:``."""
    scheme = path.partition(":/")[0]
    if scheme in _FLAT and path.startswith(f"{scheme}:/"):
        raise UserError(
            "got a pathlib.Path for a URL, which collapses '//' to '/'",
            got=path,
            remedy=f"Give it as text: '{scheme}://...'",
        )


def _file_system(scheme: str, url: str) -> Any:
    try:
        import fsspec

        found = fsspec.url_to_fs(url, use_listings_cache=False)[0]
    except ImportError as error:
        package = _PACKAGES.get(scheme, "the fsspec package of that store")
        raise UserError(
            f"{scheme}:// needs a package that is not installed: {error}",
            got=url,
            remedy=f"Install {package}; s3fs comes with distributed-trainer[object-store]",
        ) from error
    except ValueError as error:
        raise UserError(
            f"cannot open the storage: {error}",
            got=url,
            allowed="a directory, or a URL that fsspec opens, such as s3://bucket/folder or gs://bucket/folder",
        ) from error
    # Clients draw the pause before a retry in threads beside training, and the network decides how often.
    draw_apart(_DRAW_PAUSES)
    return found


def _as_os_error(method: Method) -> Method:
    """Everything but a missing or a present object is a `ConnectionError`: libraries of stores have
    errors of their own, and a store that does not answer must not be taken for one that lost data."""

    @wraps(method)
    def wrapped(self: Any, *args: Any) -> Any:
        try:
            return method(self, *args)
        except (FileNotFoundError, FileExistsError, NotADirectoryError):
            raise
        except Exception as error:
            place = next((arg for arg in args if isinstance(arg, str)), None)
            raise ConnectionError(f"{place}: {type(error).__name__}: {error}") from error

    return wrapped  # type: ignore[return-value]


class ObjectLayer(FileLayer):
    """Whole objects in a store: each appears when it is complete, and nothing is renamed.

    Paths are URLs. A directory is the beginning of a name.

    Args:
        store: fsspec's file system.
        flat: directories need not be made.
    """

    look: ClassVar[float] = 0.25

    def __init__(self, store: Any, flat: bool = True) -> None:
        self._store, self._flat = store, flat

    # -- what writes -------------------------------------------------------------------

    def make_directory(self, path: str) -> None:
        self.make_directories(path)

    @_as_os_error
    def make_directories(self, path: str) -> None:
        if not self._flat:
            self._store.makedirs(path, exist_ok=True)

    @_as_os_error
    def open(self, path: str) -> BinaryIO:
        file: BinaryIO = self._store.open(path, "wb")
        return file

    @_as_os_error
    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _BLOCK):
            file.write(view[start : start + _BLOCK])

    def fsync(self, file: BinaryIO) -> None:
        """The object is there, and lasts, once it is closed."""

    def fsync_directory(self, path: str) -> None:
        """There are no directories."""

    def rename(self, source: str, target: str) -> None:
        raise NotImplementedError("a store does not rename")

    @_as_os_error
    def remove(self, path: str) -> None:
        self._store.rm(path, recursive=True)

    def write_file(self, path: str, data: bytes) -> None:
        self.put(path, data)

    def publish(self, path: str, data: bytes, staging: str) -> None:
        self.put(path, data)

    def create(self, path: str, data: bytes, staging: str) -> None:
        self.put(path, data, True)

    def touch(self, path: str, data: bytes) -> None:
        self.put(path, data)

    @_as_os_error
    def put(self, path: str, data: bytes, exclusive: bool = False) -> None:
        """One object at once, in the place of an old one.

        Args:
            exclusive: only where there is none, decided by the store if it can.

        Raises:
            FileExistsError: `exclusive`, and there is one.
        """
        if not exclusive:
            self._store.pipe_file(path, data)
            return
        try:
            self._store.pipe_file(path, data, mode="create")
        except (NotImplementedError, ValueError, TypeError):
            # Not every store has conditional writes; looking first is the best there is.
            if self._store.exists(path):
                raise FileExistsError(f"{path} is there already") from None
            self._store.pipe_file(path, data)

    @_as_os_error
    def copy(self, source: str, target: str) -> None:
        """Copy one object within the store."""
        self._store.cp_file(source, target)

    # -- what reads --------------------------------------------------------------------

    @_as_os_error
    def exists(self, path: str) -> bool:
        return bool(self._store.exists(path))

    def present(self, directory: str, names: Iterable[str]) -> list[str]:
        found = set(self.names(directory))
        return [name for name in names if name in found]

    def names(self, directory: str) -> list[str]:
        return [name for name, _, _ in self._listed(directory)]

    def sizes(self, directory: str) -> dict[str, int]:
        return {name: size for name, size, is_file in self._listed(directory) if is_file}

    @_as_os_error
    def modified(self, path: str) -> float:
        return float(self._store.modified(path).timestamp())

    def read(self, path: str) -> bytes:
        check_json_size(path, self._size(path))
        return self._content(path)

    @_as_os_error
    def _content(self, path: str) -> bytes:
        return bytes(self._store.cat_file(path))

    def blocks(self, path: str) -> Iterator[bytes]:
        read, start = self.ranges(path), 0
        while block := read(start, start + _BLOCK):
            yield bytes(block)
            start += len(block)

    def ranges(self, path: str) -> Ranges:
        size = self._size(path)
        return lambda start, end: memoryview(self._part(path, start, min(end, size)))

    @_as_os_error
    def _size(self, path: str) -> int:
        return int(self._store.info(path)["size"])

    @_as_os_error
    def _part(self, path: str, start: int, end: int) -> bytes:
        return bytes(self._store.cat_file(path, start=start, end=end)) if start < end else b""

    @_as_os_error
    def _listed(self, directory: str) -> list[tuple[str, int, bool]]:
        """(name, bytes, whether it is an object) of what lies directly below."""
        try:
            found = self._store.ls(directory, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [
            (os.path.basename(entry["name"].rstrip("/")), int(entry["size"] or 0), entry["type"] == "file")
            for entry in found
            if entry["name"].rstrip("/") != self._store._strip_protocol(directory).rstrip("/")
        ]
