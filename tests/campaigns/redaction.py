"""Secrets in places where runs meet them, made at random, and what the redactor leaves of them.

    python -m tests.campaigns.redaction [--count N] [--seed S]

Every case hides canaries in one secret: at its beginning, in its middle and at its end, so that a part that
stays is found, too. A case fails where a canary is left, where a second pass changes the text, or where
what should stay (host, database, name) is gone. Exits with 1 when a case failed.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from distributed.redaction import redact

__all__ = ["Case", "check", "generate"]

SCHEMES = [
    *(
        "http",
        "https",
        "postgresql",
        "postgresql+psycopg2",
        "mysql+pymysql",
        "sqlite+pysqlcipher",
        "s3",
        "redis",
    ),
    *("mongodb", "mongodb+srv", "amqp", "ftp", "git+https", "jdbc:mysql", "gs", "abfs", "mssql+pyodbc"),
]
HOSTS = ["host", "db.example.com", "10.0.0.7", "[::1]", "localhost", "tracker-1.internal"]
USERS = ["bob", "svc_train", "a.b", "k%40x", "AKID", ""]
SPECIAL = "/@:?#&=%+~!$*-_.,;()^|"
CORES = [
    *(
        "password",
        "passwd",
        "pass",
        "pwd",
        "secret",
        "token",
        "api_key",
        "apikey",
        "access_key",
        "credential",
    ),
    *("credentials", "private_key", "auth", "access_token", "auth_token", "refresh_token", "client_secret"),
    *("secret_key", "secret_access_key", "bearer_token", "passphrase", "session_token", "signing_key"),
]
OWNERS = [
    "",
    "",
    "pg",
    "db",
    "mysql",
    "smtp",
    "aws",
    "hf",
    "wandb",
    "github",
    "mlflow_tracking",
    "my_app",
    "x",
]
TAILS = ["", "", "", "2", "_prod", "_live", "_1"]
TOKENS: list[tuple[str, str, int]] = [
    *(("ghp_", string.ascii_letters + string.digits, 36), ("hf_", string.ascii_letters, 34)),
    *(
        ("AKIA", string.ascii_uppercase + string.digits, 16),
        ("sk-", string.ascii_letters + string.digits, 48),
    ),
    *(("sk-proj-1", string.ascii_letters + "-_", 40), ("github_pat_", string.ascii_letters + "_", 60)),
    *(("glpat-", string.ascii_letters + "-", 20), ("xoxb-", string.digits + "-", 24)),
    *(("AIza", string.ascii_letters + "-_", 35), ("gho_", string.ascii_letters, 36)),
]


@dataclass(frozen=True)
class Case:
    """One secret in one place.

    Attributes:
        kind: what hides it.
        value: text, or a tree of mappings and lists.
        canaries: none of them may be left.
        kept: what has to be left.
        name: name of the value.
    """

    kind: str
    value: Any
    canaries: tuple[str, ...]
    kept: tuple[str, ...] = ()
    name: str = ""


def check(case: Case, clean: Callable[..., Any] = redact) -> str | None:
    """What is wrong with the redacted case; None if nothing is."""
    once = clean(case.value, case.name)
    text = once if isinstance(once, str) else repr(once)
    if left := [canary for canary in case.canaries if canary in text]:
        return f"leaks {left}: {case.value!r} -> {text}"
    if clean(once, case.name) != once:
        return f"changes again: {once!r} -> {clean(once, case.name)!r}"
    if gone := [kept for kept in case.kept if kept not in text]:
        return f"lost {gone}: {case.value!r} -> {text}"
    return None


def generate(count: int, seed: int) -> Iterator[Case]:
    """`count` cases, the same for the same `seed`."""
    rng = random.Random(seed)
    kinds = [_address, _address, _without_scheme, _parameter, _variable, _variable, _token, _pem]
    for _ in range(count):
        yield rng.choice(kinds)(rng)


def _canary(rng: random.Random) -> str:
    return "Z" + "".join(rng.choices(string.ascii_letters + string.digits, k=7)) + "q"


def _secret(rng: random.Random, special: str) -> tuple[str, tuple[str, ...]]:
    canaries = tuple(_canary(rng) for _ in range(3))
    junk = ["".join(rng.choices(special, k=rng.randrange(3))) if special else "" for _ in range(4)]
    first, *rest = (f"{canary}{more}" for canary, more in zip(canaries, junk[1:], strict=True))
    return "".join([junk[0], first, *rest]), canaries


def _address(rng: random.Random) -> Case:
    password, canaries = _secret(rng, SPECIAL + rng.choice(["", "'", '"', "<>`"]))
    if rng.random() < 0.3:
        password = quote(password, safe="")
    host, user = rng.choice(HOSTS), rng.choice(USERS)
    port, path = rng.choice(["", ":5432"]), rng.choice(["", "/", "/mlflow", "/a/b.c"])
    query = rng.choice(["", "?sslmode=require", "?a=1&b=2"])
    url = f"{rng.choice(SCHEMES)}://{user}:{password}@{host}{port}{path}{query}"
    # An unusual password may take a parameter with it, never the host.
    return _placed(rng, "address", url, canaries, (host,))


def _without_scheme(rng: random.Random) -> Case:
    password, canaries = _secret(rng, "/@:?#&=%+~!$*-_.^|")
    password = f".{password}" if password.startswith("//") else password  # it would be a URL's scheme
    host = rng.choice(["host", "db.example.com", "localhost"])
    text = f"{rng.choice(['bob', 'svc_train', 'a.b'])}:{password}@{host}{rng.choice(['', ':5432', '/db'])}"
    return _placed(rng, "without scheme", text, canaries, (host,))


def _parameter(rng: random.Random) -> Case:
    value, canaries = _secret(rng, "/@:.-_~%+!*$")
    core = rng.choice([*CORES, "sig", "key", "X-Amz-Signature", "code"])
    name = rng.choice(
        [core, core.upper(), core.replace("_", "-"), core.title(), f"%{ord(core[0]):02x}{core[1:]}"]
    )
    before, after = rng.choice(["", "a=1&", "x=%20&y=2&"]), rng.choice(["", "&z=3"])
    scheme = rng.choice([s for s in SCHEMES if ":" not in s])
    url = f"{scheme}://{rng.choice(HOSTS)}/db.sqlite?{before}{name}={value}{after}"
    kept = ("/db.sqlite", *(["z=3"] if after and "@" not in value else []))
    return _placed(rng, "parameter", url, canaries, kept if "@" not in value else ())


def _placed(
    rng: random.Random, kind: str, text: str, canaries: tuple[str, ...], kept: tuple[str, ...]
) -> Case:
    """The case, with `text` in one of the places where addresses stand."""
    places: list[Callable[[str], Any]] = [
        lambda text: text,
        lambda text: f"cannot reach {text} after 3 tries",
        lambda text: f"Got {text!r}. Allowed: a URL.",
        lambda text: {"tracking": {"uri": text, "n": 1}, "other": [text, "x"]},
        lambda text: ["train.py", "--uri", text, f"--set=tracking.uri={text}"],
        lambda text: json.dumps({"uri": text, "mail": "me@example.com"}),
        lambda text: json.dumps(json.dumps({"uri": text})),
        lambda text: f"OperationalError({text!r})\nsecond line",
        lambda text: f"MLFLOW_TRACKING_URI={text}",
        lambda text: f"  uri: {text}\n  other: 1\n",
        lambda text: (("tracking.uri", text, "flag"),),
    ]
    place = rng.choice(places)
    # Text in JSON shows a backslash twice; hosts and paths have none.
    return Case(kind, place(text), canaries, kept)


def _variable(rng: random.Random) -> Case:
    words = [*filter(None, [rng.choice(OWNERS), rng.choice(CORES)])]
    separator = rng.choice(["_", "_", "-", ".", ""])
    name = separator.join(words) + rng.choice(TAILS)
    name = name.replace("_", rng.choice(["_", "-", "_"]))
    name = rng.choice([str.upper, str.lower, str.title, lambda text: text])(name)
    if rng.random() < 0.2:
        name = "".join(part.title() for part in name.replace("-", "_").replace(".", "_").split("_"))
    value, canaries = _secret(rng, "/@:?#%+~!$*-_.^|")
    blank = f"{value[:9]} {value[9:]}"
    plain = blank if rng.random() < 0.5 else value
    variants: list[tuple[Any, str]] = [
        ({name: plain, "x": 1}, ""),
        ({"env": {name: plain}}, ""),
        ([{"name": name, "value": plain}], ""),
        (plain, name),
        (["run", f"--{name}", plain, "--next", "1"], ""),
        (["run", f"--{name}={plain}"], ""),
        (["env", f"{name}={plain}", "python"], ""),
        ({name: [plain, plain]}, ""),
        ({name: {"a": plain}}, ""),
        (f"{name}={value} python train.py", ""),
        (f"export {name}='{blank}' && run", ""),
        (f"run --{name} {value} --next 1", ""),
        (f"run --{name}={value} --next 1", ""),
        (json.dumps({name: plain, "x": 1}), ""),
        (json.dumps({name: plain}, separators=(",", ":")), ""),
        (repr({name: plain, "x": 1}), ""),
        (f"a: 1\n{name}: {value}\nb: 2\n", ""),
        (f'{name} = "{blank}"', ""),
        (f"{name} = {value}\n", ""),
        (f"Config({name}={plain!r}, host='h')", ""),
        (f"Server=h;{name}={value.replace(';', '')};Database=d", ""),
        (f"curl -H '{name}: {value}' h" if "-" in name else f"{name}:{value}", ""),
    ]
    found, own = rng.choice(variants)
    return Case("name", found, canaries, () if own else (name,), own)


def _token(rng: random.Random) -> Case:
    prefix, letters, length = rng.choice(TOKENS)
    token = prefix + "".join(rng.choices(letters, k=length))
    if rng.random() < 0.2:
        parts = ["".join(rng.choices(string.ascii_letters + "-_", k=k)) for k in (30, 90, 43)]
        token = f"eyJ{parts[0]}.{parts[1]}.{parts[2]}"
    return _placed(rng, "token", token, (token[len(prefix) + 3 :], token[:-2]), ())


def _pem(rng: random.Random) -> Case:
    canaries = tuple(_canary(rng) for _ in range(3))
    name = rng.choice(["RSA PRIVATE KEY", "PRIVATE KEY", "OPENSSH PRIVATE KEY", "PGP PRIVATE KEY BLOCK"])
    body = "\n".join(canaries)
    end = rng.choice([f"\n-----END {name}-----", ""])
    return _placed(rng, "PEM block", f"-----BEGIN {name}-----\n{body}{end}", canaries, ())


def main(argv: list[str] | None = None) -> int:
    """Check `--count` cases and print how many there were of each kind."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.redaction")
    parser.add_argument("--count", type=int, default=20_000, help="Number of cases.")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    kinds: Counter[str] = Counter()
    failed: list[str] = []
    for case in generate(args.count, args.seed):
        kinds[case.kind] += 1
        if (problem := check(case)) is not None:
            failed.append(f"{case.kind}: {problem}")
    for line in failed[:20]:
        print(line)
    shown = ", ".join(f"{kind} {number}" for kind, number in sorted(kinds.items()))
    print(f"{args.count} cases (seed {args.seed}): {shown}; {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
