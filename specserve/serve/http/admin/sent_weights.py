"""The route by which a client sends a version of the weights: a file of safetensors as the body of a request, of the
target, of its head (names that begin with `draft.`), or of both, which goes to the disk as it comes. It is checked as a
checkpoint's own file is, and nothing in it is ever run."""

import asyncio
import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException

from specserve.errors import RequestError
from specserve.host import settle
from specserve.serve.http.admin.weights import Updated, WeightUpdates, add_weight_routes, changed, options_of
from specserve.serve.http.service import Service
from specserve.serve.http.transport.guard import BODY_TIMEOUT_SECONDS
from specserve.serve.settings import ServeRun
from specserve.serve.update_folder import UpdateFolder

BLOCK_BYTES = 2**22  # that are written at once
MAX_NAME = 200  # characters


def add_update_routes(app: FastAPI, service: Service, run: ServeRun) -> None:
    """Add all routes about weights that change; this one where there is a folder for what is sent."""
    folder = UpdateFolder(Path(run.update_folder).expanduser()) if run.update_folder else None
    updates = WeightUpdates(service, folder)
    add_weight_routes(app, service, updates)
    if folder is not None:
        _add_route(app, updates, folder, int(run.update_max_gb * 1e9))


def _add_route(app: FastAPI, updates: WeightUpdates, folder: UpdateFolder, max_bytes: int) -> None:
    async def route(http: Request) -> object:
        options = options_of(http, mode=("continue", "drain"), weight_version=None, sha256=None)
        version, digest = options["weight_version"], options["sha256"].lower()
        if len(version) > MAX_NAME:
            raise RequestError(f"at most {MAX_NAME} characters, got {len(version)}", param="weight_version")
        if digest and not re.fullmatch("[0-9a-f]{64}", digest):
            raise RequestError("expected 64 hexadecimal digits", param="sha256")
        with updates.alone():
            path = folder.new_file()
            try:
                await _receive(http, path, max_bytes, digest)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            return await changed(lambda: updates.use_sent(path, version=version, mode=options["mode"]))

    own: dict[int | str, dict[str, Any]] = {status: {} for status in (409, 411, 413, 415, 500, 507)}
    extra: dict[str, Any] = {"reply": Updated}
    app.post("/update_weights_from_safetensors", response_model=None, openapi_extra=extra, responses=own)(route)


async def _receive(http: Request, path: Path, max_bytes: int, digest: str) -> None:
    """Write the body to a new file. Raises HTTPException where it is not as long as it says, or too long, or has
    another digest, and ClientDisconnect."""
    length = _length(http, path, max_bytes)
    num_bytes, pending, digester = 0, bytearray(), hashlib.sha256()
    try:
        with path.open("xb") as stream:

            def write(block: bytes) -> None:
                digester.update(block)
                stream.write(block)

            chunks = aiter(http.stream())
            while (chunk := await asyncio.wait_for(anext(chunks, None), BODY_TIMEOUT_SECONDS)) is not None:
                num_bytes += len(chunk)
                pending += chunk
                if len(pending) >= BLOCK_BYTES:
                    await asyncio.to_thread(write, bytes(pending))
                    pending.clear()
            await asyncio.to_thread(write, bytes(pending))
        await asyncio.to_thread(settle, path)
    except TimeoutError:
        raise HTTPException(
            408, f"nothing came within {BODY_TIMEOUT_SECONDS:.0f} s, after {num_bytes:,} bytes"
        ) from None
    except OSError as error:
        raise HTTPException(507, f"the weights cannot be kept: {error}") from error
    if num_bytes != length:
        raise HTTPException(400, f"the body has {num_bytes:,} bytes, Content-Length says {length:,}")
    if digest and digester.hexdigest() != digest:
        raise HTTPException(400, f"the body's sha256 is {digester.hexdigest()}, expected {digest}; send it again")


def _length(http: Request, path: Path, max_bytes: int) -> int:
    """Return how long the body is to be, of which nothing has been read. Raises HTTPException."""
    content_type = http.headers.get("content-type", "").split(";")[0].strip().lower()
    if content_type != "application/octet-stream":
        raise HTTPException(415, f"send Content-Type: application/octet-stream, got {content_type[:80]!r}")
    stated = http.headers.get("content-length", "")
    if not stated.isdecimal():
        raise HTTPException(411, "send Content-Length, the size of the file in bytes", {"Connection": "close"})
    length, free = int(stated), shutil.disk_usage(path.parent).free
    if length > max_bytes:
        raise HTTPException(413, f"{length:,} bytes, and --update-max-gb allows {max_bytes:,}", {"Connection": "close"})
    if length > free:
        raise HTTPException(507, f"{length:,} bytes, and {path.parent} has room for {free:,}", {"Connection": "close"})
    return length
