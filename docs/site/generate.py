"""Writes the pages that are made from the program: ``python -m docs.site.generate``.

They are committed, so that the repository's web page has them; a test compares them with the program.
"""

from __future__ import annotations

import sys
from pathlib import Path

from distributed.interfaces.backend_spec import LEVERS
from distributed.registry.catalog import get_catalog
from docs.site.codecs import bytes_table, codec_backends
from docs.site.command_line import command_line_page
from docs.site.deepspeed_keys import keys_table
from docs.site.import_figure import draw
from docs.site.import_graph import import_graph, package_edges
from docs.site.markdown import table
from docs.site.messages import messages_page
from docs.site.reference import overview

__all__ = ["generated", "main"]

DOCS = Path(__file__).parents[1]
_REFERENCE = """# API reference

Every public name, with the first sentence of its documentation. The
[site](decisions/documentation.md) has the whole of it with signatures; `make docs` builds it.
"""
_BUILT_IN = ("serial", "pytorch-ddp", "fsdp", "deepspeed", "horovod", "ray", "tensorflow")


def generated() -> dict[Path, str]:
    """The pages that are made from the program, and what they should hold."""
    backends, codecs = DOCS / "backends.md", DOCS / "communication-codecs.md"
    deepspeed = DOCS / "deepspeed.md"
    return {
        DOCS / "architecture.svg": draw(package_edges(import_graph())),
        DOCS / "cli.md": command_line_page(),
        DOCS / "messages.md": messages_page(),
        DOCS / "reference.md": f"{_REFERENCE}\n{overview()}",
        backends: _filled(backends, {"abilities": abilities()}),
        deepspeed: _filled(deepspeed, {"keys": keys_table()}),
        codecs: _filled(codecs, {"bytes": bytes_table(), "codecs": codec_backends(_BUILT_IN)}),
    }


def _filled(page: Path, parts: dict[str, str]) -> str:
    """A page with each part between its comments, ``<!-- name -->`` and ``<!-- end of name -->``."""
    text = page.read_text(encoding="utf-8")
    for name, part in parts.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}{part}{end}{rest.partition(end)[2]}"
    return text


def abilities() -> str:
    """A table of what the built-in backends claim, which the conformance kit tests."""
    specs = get_catalog().backends
    able = [specs[name].capabilities for name in _BUILT_IN]
    mark = {True: "yes", False: ""}
    rows = [["more than one rank", *(mark[c.multi_process] for c in able)]]
    rows.append(["precisions", *(" ".join(sorted(c.precisions)) for c in able)])
    for label, field in (
        ("accumulation", "accumulation"),
        ("clipping by the global norm", "clipping"),
        ("`sync_batchnorm` (on GPUs)", "sync_batchnorm"),
        ("`find_unused_parameters`", "find_unused_parameters"),
        ("`bucket_cap_mb`, `gradient_as_bucket_view`", "gradient_buckets"),
        ("portable checkpoints", "checkpoint"),
        ("`batch_size: auto`", "auto_batch"),
    ):
        rows.append([label, *(mark[getattr(c, field)] for c in able)])
    rows += [[f"`{field}`", *(mark[field in c.levers] for c in able)] for field in sorted(LEVERS)]
    rows.append(["`zero_stage`", *(" ".join(map(str, sorted(c.zero_stages))) for c in able)])
    return table(rows, "", *(f"`{name}`" for name in _BUILT_IN))


def main() -> int:
    """Write what differs, and name it."""
    for path, text in generated().items():
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
