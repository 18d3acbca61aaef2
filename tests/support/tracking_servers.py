"""MLflow servers on loopback that a test can silence."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from threading import Event, Thread

__all__ = ["Proxy", "mlflow_server", "proxied"]


class Proxy:
    """Passes connections on to a server; while it is silent, it accepts them and answers nothing.

    Args:
        port: of the server.
        until: is given each request; the first that it returns true for is answered, and none after it.

    Attributes:
        silent: set while nothing is answered.
    """

    def __init__(self, port: int, until: Callable[[bytes], bool] = lambda request: False) -> None:
        self.port, self.until, self.silent, self.last = port, until, Event(), Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._held: list[socket.socket] = []
        Thread(target=self._accept, daemon=True).start()

    @property
    def uri(self) -> str:
        """The address for clients."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        """Close all connections."""
        self._listener.close()
        for one in self._held:
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._held.append(client)
            if not self.silent.is_set():
                server = socket.create_connection(("127.0.0.1", self.port))
                self._held.append(server)
                Thread(target=self._pass, args=(client, server, self._ask), daemon=True).start()
                Thread(target=self._pass, args=(server, client, self._answer), daemon=True).start()

    def _pass(self, source: socket.socket, to: socket.socket, filtered: Callable[[bytes], bool]) -> None:
        try:
            while data := source.recv(1 << 20):
                if not filtered(data):
                    return
                to.sendall(data)
        except OSError:
            return

    def _ask(self, data: bytes) -> bool:
        if self.until(data):
            self.last.set()
        return not self.silent.is_set()

    def _answer(self, data: bytes) -> bool:
        if self.silent.is_set():
            return False
        if self.last.is_set():
            self.last.clear()
            self.silent.set()
        return True


@contextmanager
def proxied(port: int, until: Callable[[bytes], bool] = lambda request: False) -> Iterator[Proxy]:
    """A proxy in front of the server at `port`."""
    with closing(Proxy(port, until)) as proxy:
        yield proxy


@contextmanager
def mlflow_server(store: str) -> Iterator[int]:
    """MLflow's own application in a thread, with a store; yields its port."""
    import mlflow.server
    from mlflow.server import handlers
    from werkzeug.serving import make_server

    before = handlers._tracking_store
    handlers._tracking_store = handlers._get_tracking_store(store, store)
    server = make_server("127.0.0.1", 0, mlflow.server.app, threaded=True)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        handlers._tracking_store = before
