"""The page of the contracts names tests that exist, and hooks are documented and tested."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distributed.registry import hookspecs

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "contracts.md"
NAMED = re.compile(r"\[`(test_\w+)`\]\(([^)]+)\)")
HOOKS = sorted(name for name, value in vars(hookspecs).items() if hasattr(value, "distributed_spec"))


def missing(page: str) -> list[str]:
    """Tests that `page` links to and that their files do not have."""
    found = NAMED.findall(page)
    files = {path: (ROOT / "docs" / path).read_text(encoding="utf-8") for _, path in found}
    return [name for name, path in found if not re.search(rf"def {name}\(", files[path])]


def test_named_tests_exist_where_they_are_said_to_be() -> None:
    assert missing(PAGE.read_text(encoding="utf-8")) == []


def test_a_test_that_is_gone_is_noticed() -> None:
    page = PAGE.read_text(encoding="utf-8").replace("test_c2_parity_in_float32", "test_c2_parity_in_fp32")
    assert missing(page) == ["test_c2_parity_in_fp32"]


def test_every_contract_has_a_section_with_its_tests() -> None:
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    titled = {section.split()[0]: section for section in sections if re.match(r"C\d+ ", section)}
    assert list(titled) == [f"C{number}" for number in range(1, 12)]
    for number, section in titled.items():
        named = [name for name, _ in NAMED.findall(section)]
        assert any(
            name.startswith(f"test_{number.lower()}_") or f"_{number.lower()}_" in name for name in named
        )
        assert section.split("\n\n")[1].startswith("**"), f"{number}: the promise comes first"


def test_every_test_of_the_kit_that_names_a_contract_is_on_the_page() -> None:
    from distributed.testing.conformance import BackendConformance

    page = PAGE.read_text(encoding="utf-8")
    kit = [name for name in dir(BackendConformance) if re.match(r"test_c\d", name)]
    assert [name for name in kit if name not in page] == []


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_explained_and_tried(hook: str) -> None:
    """In the plugin guide by name, and implemented by something that a test runs."""
    guide = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    assert f"| `{hook}(" in guide
    tried = [p for p in (ROOT / "tests").rglob("*.py") if f"def {hook}(" in p.read_text(encoding="utf-8")]
    assert tried, f"no test implements {hook}"
    assert (getattr(hookspecs, hook).__doc__ or "").strip()
