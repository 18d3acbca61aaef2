"""A name of a guide to distributed training, its call there, and what runs here."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Row"]


@dataclass(frozen=True)
class Row:
    """One line of the table in docs/coming-from-names.md, whose code is run by `test_rows`.

    Attributes:
        name: as the guide has it.
        there: the guide's code for it.
        here: code of the same meaning here; empty where the guide's own code runs.
        remark: how the two differ and why, or what to know.
        holds: expression that is true after the code.
        given: statements before it, with the variables that the guide has.
        ranks: number of ranks that run the code in a process group; 0 is a process without a launcher.
        error: part of the error that the guide's own code gives, where it names what to do.
    """

    name: str
    there: str
    here: str = ""
    remark: str = ""
    holds: str = "True"
    given: str = ""
    ranks: int = 0
    error: str = ""

    @property
    def works(self) -> bool:
        """Whether the guide's code runs as it is."""
        return not self.here

    @property
    def code(self) -> str:
        """What runs here."""
        return self.here or self.there
