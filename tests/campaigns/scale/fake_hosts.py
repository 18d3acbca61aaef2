"""Fake monitors of other hosts, in one process: they speak the protocol of `host_heartbeat` to a real node 0.

    python -m tests.campaigns.scale.fake_hosts PORT TOKEN NUM_HOSTS

Prints ``ready`` after node 0 has sent a heartbeat to every host, and ``detected`` after every other host has
received the loss of the last one, whose connection ends at the first line of standard input.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time

__all__ = ["main"]

_BEAT = 1.0


def main(port: int, token: str, num_hosts: int) -> None:
    """Be hosts 1 to `num_hosts` - 1."""
    watched = selectors.DefaultSelector()
    watched.register(0, selectors.EVENT_READ)
    lines = {}
    for node in range(1, num_hosts):
        line = lines[node] = socket.create_connection(("127.0.0.1", port))
        hello = {
            "token": token,
            "node": node,
            "host": f"node-{node:05}",
            "ranks": [*range(8 * node, 8 * node + 8)],
        }
        line.sendall(json.dumps(hello).encode() + b"\n")
        watched.register(line, selectors.EVENT_READ, node)
    waits, lost, due = set(lines), set(lines), time.monotonic()
    while True:
        for key, _ in watched.select(max(0.0, due - time.monotonic())):
            if key.fd == 0:
                if not sys.stdin.readline():
                    return
                last = lines.pop(num_hosts - 1)
                watched.unregister(last)
                last.close()
                lost.discard(num_hosts - 1)
                if not lost:
                    print("detected", flush=True)
                continue
            text = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
            for pending, word, name in ((waits, b"{", "ready"), (lost, b'"lost": {', "detected")):
                if pending and word in text:
                    pending.discard(key.data)
                    if not pending:
                        print(name, flush=True)
        if time.monotonic() >= due:
            due += _BEAT
            for node, line in lines.items():
                line.sendall(
                    json.dumps({"host": f"node-{node:05}", "ranks": [8 * node, 8 * node + 7]}).encode()
                    + b"\n"
                )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
