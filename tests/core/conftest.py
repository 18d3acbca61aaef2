"""What several tests of the core need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

MakeDistribution = Callable[..., Path]


@pytest.fixture
def make_distribution(tmp_path: Path) -> MakeDistribution:
    """Installs a real, tiny distribution under tmp_path/site and returns that folder."""

    def make(
        name: str, modules: dict[str, str] | None = None, entry_points: str = "", top_level: str = ""
    ) -> Path:
        site = tmp_path / "site"
        info = site / f"{name.replace('-', '_')}-1.2.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(entry_points)
        (info / "top_level.txt").write_text(top_level)
        for module, source in (modules or {}).items():
            (site / f"{module}.py").write_text(source)
        return site

    return make
