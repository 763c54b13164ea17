"""GET /: a page to try the server with, as a person would show it to a colleague. Its files lie in `page`, as they are
sent; they call the API as any client does, and nothing outside this server.

The page itself needs no API key, because a browser cannot send one when it opens an address. It asks for the key and
sends it with each call.
"""

import re
from functools import partial
from pathlib import Path

from fastapi import FastAPI, Response

from specserve.serve.engine.interface import EngineLike

_FOLDER = Path(__file__).parent
_MEDIA_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FILES = {
    "/" if path.name == "index.html" else f"/page/{path.name}": path
    for path in _FOLDER.iterdir()
    if path.suffix in _MEDIA_TYPES
}
PAGE_PATHS = frozenset(_FILES)
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def add_page_routes(app: FastAPI, engine: EngineLike, *, needs_key: bool) -> None:
    """Add the page. With `needs_key` it asks for the API key before its first call; where there is no chat template, it
    has texts continued."""
    facts = {"needs-key": needs_key, "has-chat": engine.tokenizer.has_chat_template}
    for url, path in _FILES.items():
        text = path.read_text(encoding="utf-8")
        if url == "/":
            for name, holds in facts.items():
                text = re.sub(f'data-{name}="[a-z]+"', f'data-{name}="{str(holds).lower()}"', text, count=1)
        answer = partial(_file, text, _MEDIA_TYPES[path.suffix])
        app.add_api_route(url, answer, methods=["GET"], response_model=None, include_in_schema=False)


def _file(text: str, media_type: str) -> Response:
    return Response(text, media_type=media_type, headers=_HEADERS)
