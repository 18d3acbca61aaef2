"""Kubernetes' own rules for names, quantities and text."""

from __future__ import annotations

import re

from distributed.operations.deploy.checks import parse_bytes

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_IMAGE = re.compile(
    r"[A-Za-z0-9]+([._-][A-Za-z0-9]+)*(:[0-9]+)?(/[a-z0-9]+((\.|_{1,2}|-+)[a-z0-9]+)*)*"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?"
)
_POWERS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4}
BYTES = {
    **{unit: 1000**power for unit, power in _POWERS.items()},
    **{f"{unit.upper()}i": 1024**power for unit, power in _POWERS.items() if unit},
}
"""Kubernetes' units of memory, in bytes."""


def check_label(text: str, field: str, room: int = 63) -> None:
    """Refuse text that is not an RFC 1123 label of at most `room` characters.

    Raises:
        ValueError: it is not one; the message has the rule.
    """
    if not _LABEL.fullmatch(text) or len(text) > room:
        raise ValueError(
            f"{field}={text!r} is not a Kubernetes name: use lower-case letters, digits and '-', a letter or"
            f" digit at both ends, at most {room} characters here"
        )


def check_name(text: str, field: str) -> None:
    """Refuse text that is not an RFC 1123 subdomain.

    Raises:
        ValueError: it is not one; the message has the rule.
    """
    if not _NAME.fullmatch(text) or len(text) > 253:
        raise ValueError(
            f"{field}={text!r} is not a Kubernetes object name: use lower-case letters, digits, '-' and"
            " '.', at most 253 characters"
        )


def check_image(text: str) -> None:
    """Refuse text that is not an image reference.

    Raises:
        ValueError: it is not one; the message has the rule.
    """
    if not _IMAGE.fullmatch(text):
        raise ValueError(f"image={text!r} is not an image: give REGISTRY/NAME:TAG, perhaps with @sha256:...")


def parse_cpus(text: str) -> float:
    """CPUs of an amount such as ``8`` or ``500m``.

    Raises:
        ValueError: it is no such amount, or nothing.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(m?)", text)
    amount = float(match[1]) / (1000 if match[2] else 1) if match else 0.0
    if amount <= 0:
        raise ValueError(f"'{text}' is not a number of CPUs: give a number such as 8, 0.5 or 500m")
    return amount


def parse_memory(text: str) -> int:
    """Bytes of an amount such as ``64Gi``."""
    return parse_bytes(text, BYTES)


def literal(text: str) -> str:
    """`text` as Kubernetes has to be given it: ``$(NAME)`` in commands and variables is replaced there, and
    ``$$`` stands for one dollar."""
    return text.replace("$", "$$")
