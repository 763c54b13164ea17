"""The Hugging Face hub: whether it can be asked, which is found out once and fast, and the reason where it cannot.

The hub's own libraries try each of many requests five times, with pauses, before they give up. Here one request
decides: where it fails, the libraries are set to be offline, so that they answer from their caches, or fail, at once.
"""

import functools
import sys
import threading

from specserve.errors import as_line

PROBE_SECONDS = 5.0  # for a name to be resolved, a connection to be made and a reply to begin


def absence() -> str:
    """Return why the hub cannot be asked; empty where it can. Proxies and HF_ENDPOINT count, and with HF_HUB_OFFLINE
    nothing is asked. Where it cannot be asked, `huggingface_hub` and `datasets` use their caches alone from now on."""
    from huggingface_hub import constants  # heavy

    if constants.HF_HUB_OFFLINE:
        return _found.get(constants.ENDPOINT, "HF_HUB_OFFLINE is set")
    reason = _probe(constants.ENDPOINT)
    if reason:
        _found[constants.ENDPOINT] = reason
        constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:  # else it reads what is set above when it is imported
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True
    return reason


def why(error: Exception) -> str:
    """Return in one line why something could not be had: that the hub cannot be asked, or the error of one of its
    libraries."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return absence()
    return as_line(error)


_found: dict[str, str] = {}  # why an endpoint cannot be asked


@functools.cache
def _probe(url: str) -> str:
    """Ask the address once: any reply will do. It runs on a thread, because a resolver knows no timeout of ours."""
    from huggingface_hub.utils import get_session

    found = [f"{url} does not reply within {PROBE_SECONDS:g} seconds"]

    def ask() -> None:
        try:
            get_session().head(url, timeout=PROBE_SECONDS)
            found[:] = [""]
        except Exception as error:  # the client's types differ between versions of the library
            found[:] = [f"{url} cannot be reached: {str(error).strip() or type(error).__name__}"]

    asking = threading.Thread(target=ask, name="hub-probe", daemon=True)
    asking.start()
    asking.join(PROBE_SECONDS)
    return found[0]
