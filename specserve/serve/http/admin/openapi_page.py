"""A page of the API made of its description: plain HTML, which loads nothing."""

import json
from collections.abc import Iterator
from html import escape

from specserve.serve.http.transport.json_codec import Json

_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
summary { cursor: pointer; padding: .3rem 0 } code { font-size: .9em }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1.5rem }
td, th { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #8884 }
"""


def page(description: Json) -> str:
    """Return the page of the routes, each with the fields of its body."""
    info = description["info"]
    title = escape(f"{info['title']} {info['version']}")
    routes = "".join(_route(description, path, methods) for path, methods in description["paths"].items())
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
        f'<h1>{title}</h1><p>As data: <a href="openapi.json">openapi.json</a></p>{routes}</html>'
    )


def _route(description: Json, path: str, methods: Json) -> str:
    operation = next(iter(methods.values()))
    names = ", ".join(method.upper() for method in methods)
    head = f"<strong>{names}</strong> <code>{escape(path)}</code> {escape(operation.get('summary', ''))}"
    if "requestBody" not in operation:
        return f"<p>{head}</p>"
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    rows = "".join(_rows(description, schema))
    heads = "<tr><th>field</th><th>takes</th><th>default</th></tr>"
    return f"<details><summary>{head}</summary><table>{heads}{rows}</table></details>"


def _rows(description: Json, schema: Json) -> Iterator[str]:
    body = resolved(description, schema)
    required = body.get("required", ())
    for name, member in sorted(body["properties"].items(), key=lambda item: (item[0] not in required, item[0])):
        if not member.get("description", "").startswith("Not supported"):
            default = "required" if name in required else json.dumps(member.get("default"))
            cells = escape(name), escape(takes(member)), escape(default)
            yield "<tr>" + "".join(f"<td><code>{cell}</code></td>" for cell in cells) + "</tr>"


def resolved(description: Json, schema: Json) -> Json:
    """Return the schema that a reference stands for."""
    return description["components"]["schemas"][schema["$ref"].rpartition("/")[2]]


def takes(schema: Json) -> str:
    """Return the values that a schema allows, in few words."""
    if "anyOf" in schema:
        return " | ".join(takes(option) for option in schema["anyOf"] if option != {"type": "null"})
    if "oneOf" in schema:
        return " | ".join(takes(option) for option in schema["oneOf"])
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if "enum" in schema or "const" in schema:
        return " | ".join(json.dumps(value) for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"[{takes(schema.get('items', {}))}, ...]"
    return schema.get("type", "any")
