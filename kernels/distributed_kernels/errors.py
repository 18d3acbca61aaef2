"""The one error of this room: a mistake in what the user gave, and how to mend it."""

from __future__ import annotations

__all__ = ["KernelError"]


class KernelError(ValueError):
    """A mistake in an argument: one paragraph that says how to mend it.

    Args:
        message: what is wrong; it begins with the argument's name.
        got: the value received.
        allowed: the values that would do.
        remedy: what to do about it.
    """

    def __init__(
        self, message: str, *, got: object = None, allowed: object = None, remedy: str | None = None
    ) -> None:
        self.got, self.allowed, self.remedy = got, allowed, remedy
        parts = [message.rstrip(". ") + "."]
        if got is not None:
            parts.append(f"Got {got!r}.")
        if allowed is not None:
            parts.append(f"Allowed: {str(allowed).rstrip('.')}.")
        if remedy is not None:
            parts.append(remedy.rstrip(".") + ".")
        super().__init__(" ".join(" ".join(part.split()) for part in parts))
