"""Write the API reference of the documents, docs/api.md, from the server's own description of itself:

python tools/api_reference.py
"""

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from specserve.serve.http.admin.openapi import TEXTS, openapi
from specserve.serve.http.admin.openapi_page import resolved, takes
from specserve.serve.http.app import create_app
from specserve.serve.settings import ServeRun

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
REFERENCE = re.compile(
    r"(?<=<!-- reference: rewritten by `python tools/api_reference.py` -->\n).*(?=<!-- /reference -->)", re.S
)
_REF = re.compile(r"#/components/schemas/(\w+)")
_BOUNDS = {
    "minimum": ">= {:,}",
    "exclusiveMinimum": "> {:,}",
    "maximum": "<= {:,}",
    "exclusiveMaximum": "< {:,}",
    "minLength": "length >= {:,}",
    "maxLength": "length <= {:,}",
    "minItems": "length >= {:,}",
    "maxItems": "length <= {:,}",
    "maxProperties": "length <= {:,}",
}
# the settings that open routes, each after those that it needs
_GATES: dict[str, dict[str, Any]] = {
    "--allow-update-weights": {"allow_update_weights": True},
    "--update-folder": {"allow_update_weights": True, "update_folder": True},  # any folder
    "--allow-load-lora": {"allow_load_lora": True},
    "--docs": {"docs": True},
}
_INT64 = {-(2**63), 2**63 - 1}  # bounds that every integer has


def reference() -> str:
    """Return the reference: every route, then every object."""
    template = SimpleNamespace(mentions=lambda _: False, reads_tools=False)
    tokenizer = SimpleNamespace(template=template, has_chat_template=False, special_token_ids=(), sampling_defaults={})
    engine: Any = SimpleNamespace(model_name="model", tokenizer=tokenizer, stats=None)

    def described(**settings: Any) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            given: dict[str, Any] = settings | ({"update_folder": folder} if "update_folder" in settings else {})
            return openapi(create_app(engine, run=ServeRun(**given)), has_key=False)

    gates = dict.fromkeys(described()["paths"], "")
    for flag, settings in _GATES.items():
        gates = dict.fromkeys(described(**settings)["paths"], flag) | gates
    api = described(**{name: value for settings in _GATES.values() for name, value in settings.items()})
    routes = [line for path, methods in api["paths"].items() for line in _route(api, path, methods, gates[path])]
    schemas = api["components"]["schemas"]
    bodies = {name for methods in api["paths"].values() for each in methods.values() for name in _of_body(each)}
    objects = [line for name in sorted(schemas.keys() - bodies) for line in _object(name, schemas[name])]
    return "\n".join(["## Routes", "", *routes, "## Objects", "", *objects])


def _route(api: dict[str, Any], path: str, methods: dict[str, Any], gate: str) -> Iterator[str]:
    """Return a route; `gate` names the flag without which it is not there."""
    for method, operation in methods.items():
        yield from (f"### `{method.upper()} {path}`", "")
        if gate:
            yield from (f"With `{gate}`.", "")
        if "requestBody" in operation:
            schema = resolved(api, operation["requestBody"]["content"]["application/json"]["schema"])
            yield from (_text(schema).removeprefix(f"POST {path}").lstrip(".: "), "", *_members(schema))
        elif path not in TEXTS:
            schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
            if "$ref" in schema:
                yield from (_text(resolved(api, schema)).removeprefix(f"GET {path}").lstrip(".,: "), "")
        content = operation["responses"]["200"]["content"]
        replies = [f"`{kind}`: {_kinds(each)}" for kind, each in content.items()]
        statuses = ", ".join(sorted(operation["responses"].keys() - {"200"}))
        yield from (f"Replies {'; '.join(replies)}. Errors: {statuses}.", "")


def _of_body(operation: dict[str, Any]) -> list[str]:
    """Return the name of the object that a route is sent, whose members stand with the route."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    return _REF.findall(content.get("schema", {}).get("$ref", ""))


def _object(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield from (f"### {name}", "", _text(schema), "", *_members(schema))


def _text(schema: dict[str, Any]) -> str:
    return " ".join(schema.get("description", "").split())


def _members(schema: dict[str, Any]) -> Iterator[str]:
    """Return a table of the members, and the names of those that are not supported."""
    rows, unsupported = [], []
    for name, member in schema.get("properties", {}).items():
        if _text(member).startswith("Not supported"):
            unsupported.append(f"`{name}`")
            continue
        default = "required" if name in schema.get("required", ()) else ""
        if member.get("default") is not None:
            default = f"`{json.dumps(member['default'])}`"
        rows.append(f"| `{name}` | {_takes(member)} | {default} | {_text(member)} |".replace("|  |", "| |"))
    if rows:
        yield from ("| field | takes | default | |", "|---|---|---|---|", *rows, "")
    if unsupported:
        yield from (f"Accepted only at the values that change nothing: {', '.join(unsupported)}.", "")


def _takes(member: dict[str, Any]) -> str:
    """Return the values that a member may have, with their bounds, as one cell of a table."""
    texts = []
    for option in member.get("anyOf", [member]):
        if option.get("type") != "null":
            found = [(text, option[name]) for name, text in _BOUNDS.items() if name in option]
            bounds = [text.format(value) for text, value in found if value not in _INT64]
            texts.append(", ".join([takes(option), *bounds]))
    text = " or ".join(texts).replace(" | ", " or ") or "null"
    return re.sub(r"\b[A-Z]\w+", lambda name: f"[{name[0]}](#{name[0].lower()})", text)


def _kinds(content: dict[str, Any]) -> str:
    """Return the objects of a reply, or of the events of a stream."""
    schema = content.get("schema") or content["itemSchema"]
    names = dict.fromkeys(_REF.findall(json.dumps(schema)))
    return ", ".join(f"[{name}](#{name.lower()})" for name in names) or f"a {schema.get('type', 'value')}"


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(REFERENCE.sub(lambda _: reference(), page), encoding="utf-8")
