"""Read the shipped manifests by the operators' own custom resource definitions, which are not in this tree.

    python -m tests.operations.deploy.against_crds mpijobs.yaml ray.io_rayjobs.yaml jobsets.yaml

Each file is one that an operator's release installs. Strict, as an API server with field validation is:
a field that a definition does not name is an error. Exits 1 on any. Rules in CEL are not evaluated.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

SHIPPED = Path(__file__).parents[3] / "deploy" / "kubernetes"
Kind = tuple[str, str]


def strict(schema: Any) -> Any:
    """An OpenAPI v3 schema of Kubernetes as a JSON schema that refuses unknown fields."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    open_ended = "additionalProperties" in made or schema.get("x-kubernetes-preserve-unknown-fields")
    if "properties" in made and not open_ended:
        made["additionalProperties"] = False
    return made


def definitions(path: Path) -> dict[Kind, Draft202012Validator]:
    """(apiVersion, kind) -> reader, of the definitions in a file; other documents in it are passed over."""
    found = {}
    for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
        spec = (document or {}).get("spec") or {}
        if (document or {}).get("kind") != "CustomResourceDefinition" or "group" not in spec:
            continue
        for version in spec["versions"]:
            schema = strict(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}
            kind = (f"{spec['group']}/{version['name']}", spec["names"]["kind"])
            found[kind] = Draft202012Validator(schema)
    return found


def main(paths: list[str]) -> int:
    """Print a line for each manifest that a definition knows, and its errors."""
    readers = {kind: reader for path in paths for kind, reader in definitions(Path(path)).items()}
    failed = False
    for path in sorted(SHIPPED.rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            kind = (document["apiVersion"], document["kind"])
            if kind in readers:
                errors = [
                    f"{'/'.join(map(str, e.path))}: {e.message}" for e in readers[kind].iter_errors(document)
                ]
                print(path.relative_to(SHIPPED), *kind, *(errors or ["accepted"]))
                failed = failed or bool(errors)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
