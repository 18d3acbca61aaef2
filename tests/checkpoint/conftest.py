"""An S3 server for the tests of checkpoints, and a store in memory for ranks that are threads."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
import s3fs
from fsspec.implementations.memory import MemoryFileSystem
from moto.moto_server.threaded_moto_server import ThreadedMotoServer


class _Files(dict[str, Any]):
    """Files that a thread may list while another writes: making the pairs may start a garbage collection, in
    which other threads run."""

    def items(self) -> Any:
        return self.copy().items()


@pytest.fixture(autouse=True, scope="session")
def _memory_of_threads() -> None:
    MemoryFileSystem.store = _Files(MemoryFileSystem.store)


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """URL of a bucket of a server that listens on loopback."""
    before = dict(os.environ)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ.update(
        AWS_ENDPOINT_URL=f"http://{host}:{port}",
        AWS_ACCESS_KEY_ID="test",
        AWS_SECRET_ACCESS_KEY="test",
        AWS_DEFAULT_REGION="us-east-1",
    )
    s3fs.S3FileSystem.clear_instance_cache()
    fsspec.filesystem("s3").makedirs("bucket", exist_ok=True)  # servers of one process share their buckets
    yield "s3://bucket"
    server.stop()
    s3fs.S3FileSystem.clear_instance_cache()  # the next server has another port
    os.environ.clear()
    os.environ.update(before)
