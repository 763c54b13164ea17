"""The API keys of a server: from its settings, a file and the environment."""

import logging
import os
from pathlib import Path

from specserve.errors import ConfigError
from specserve.serve.settings import ServeRun

logger = logging.getLogger(__name__)

VARIABLE = "SPECSERVE_API_KEYS"
_LOOPBACK = ("127.", "localhost", "::1")


def read_api_keys(run: ServeRun) -> tuple[str, ...]:
    """Read the keys that are accepted: `api_key`, the lines of `api_key_file`, and the environment variable, where
    commas part them. Warns where every client that reaches the server may use it. Raises ConfigError."""
    keys = [run.api_key] if run.api_key else []
    keys += [key.strip() for key in os.environ.get(VARIABLE, "").split(",") if key.strip()]
    if run.api_key_file:
        try:
            lines = Path(run.api_key_file).expanduser().read_text(encoding="utf-8-sig").splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(f"--api-key-file {run.api_key_file}: cannot be read: {error}") from None
        found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not found:
            raise ConfigError(f"--api-key-file {run.api_key_file}: it holds no key; write one on each line")
        keys += found
    if run.allow_update_weights and not keys:
        raise ConfigError("--allow-update-weights: whoever may change the weights needs a key; give --api-key-file")
    if run.allow_load_lora and not keys:
        raise ConfigError("--allow-load-lora: whoever may load adapters needs a key; give --api-key-file")
    if not keys and not run.host.startswith(_LOOPBACK):
        logger.warning(
            "NO API KEY: whoever reaches %s may use this server. Set --api-key-file or %s, or listen on 127.0.0.1",
            run.host,
            VARIABLE,
        )
    return tuple(dict.fromkeys(keys))
