"""A process is recognised by host, boot, namespace, pid and start, and is known to have ended or not."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

from distributed.system.process_identity import ProcessIdentity


def test_a_process_knows_whether_another_has_ended() -> None:
    own = ProcessIdentity.own()
    assert own.has_ended() is False
    assert ProcessIdentity.from_dict(json.loads(json.dumps(own.as_dict()))) == own
    assert replace(own, started="1").has_ended() is True
    assert replace(own, boot="another").has_ended() is None
    assert replace(own, namespace="pid:[1]").has_ended() is None
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        start = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
        other = replace(own, pid=process.pid, started=start)
        assert other.has_ended() is False
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert other.has_ended() is True  # not reaped yet
    assert other.has_ended() is True
