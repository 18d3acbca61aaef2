"""KernelError: an error in the caller's arguments."""

from __future__ import annotations


class KernelError(ValueError):
    """Arguments that cannot be computed; the message is one paragraph with the remedy.

    Args:
        message: which argument, and what is wrong with it.
        got: the value received.
        allowed: accepted values, in words.
        remedy: remedy, as a sentence.
    """

    def __init__(
        self, message: str, *, got: object = None, allowed: object = None, remedy: str | None = None
    ) -> None:
        self.message, self.got, self.allowed, self.remedy = message, got, allowed, remedy
        parts = [f"{message.rstrip('. ')}."]
        if got is not None:
            parts.append(f"Got {got!r}.")
        if allowed is not None:
            parts.append(f"Allowed: {str(allowed).rstrip('.')}.")
        if remedy is not None:
            parts.append(f"{remedy.rstrip('.')}.")
        super().__init__(" ".join(" ".join(part.split()) for part in parts))

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.got, self.allowed, self.remedy)


def _rebuild(
    kind: type[KernelError], message: str, got: object, allowed: object, remedy: str | None
) -> KernelError:
    return kind(message, got=got, allowed=allowed, remedy=remedy)
