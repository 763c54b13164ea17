"""The settings of a server: one schema for YAML, `--set` and flags (see `config`)."""

from dataclasses import dataclass

from specserve.config import setting


@dataclass(frozen=True)
class ServeRun:
    """Everything that `specserve serve` can be told."""

    target: str = setting("", help="preset, Hugging Face folder or hub id; empty: the one the draft was trained for")
    draft: str = setting("", help="folder of a draft head; empty: the bundled one with the bundled target, else none")
    speculation: str = setting("chain:3", help="off, chain:K, tree:DEPTHxTOPKxNODES or static:WIDTHxWIDTHx...")
    host: str = setting("127.0.0.1", help="address to listen on")
    port: int = setting(8000, help="port to listen on; 0: any free one", ge=0, le=65535)
    api_key: str = setting("", help="require this bearer token; empty: none")
    max_slots: int = setting(8, help="sequences that run at once", ge=1)
    max_model_len: int = setting(0, help="prompt and answer together; 0: the target's context, at most 4,096", ge=0)
    page_size: int = setting(32, help="tokens per cache page", ge=1)
    cache_tokens: int = setting(0, help="tokens the cache holds; 0: max_slots times max_model_len", ge=0)
    max_queue: int = setting(256, help="requests that may wait; more get a 503", ge=1)
    warmup_only: bool = setting(False, help="compile everything into the compilation cache and exit")
