"""Tokenised conversations, made by several processes where there are many and kept on disk for the next run.

The key of a file is a hash of what it was made from: the conversations, the tokenizer's files with the chat template
and the values of its variables, the longest length, and the code that tokenises. A file that is damaged is made again.
"""

import hashlib
import importlib.metadata
import json
import logging
import multiprocessing
import os
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

from specserve.data.conversations import Conversation
from specserve.data.documents import Document, TokenizedDocuments, join, tokenize_part
from specserve.errors import DataError
from specserve.host import cache_folder, num_cores, own_process, whole_file
from specserve.tokenizer import Tokenizer

log = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer*", "*.jinja", "special_tokens_map.json", "vocab*", "merges.txt", "*.model", "*.tiktoken")
CONFIG_FILES = ("config.json", "generation_config.json")  # they name the ids that end a turn
PACKAGE = Path(__file__).parent.parent
CODE = (  # the code that decides about ids and masks
    *(PACKAGE / name for name in ("chat_template.py", "tokenizer.py")),
    *(PACKAGE / "data" / name for name in ("chat_masks.py", "conversations.py", "documents.py")),
)
LIBRARIES = ("transformers", "tokenizers", "jinja2")
PART = 1000  # conversations that a worker takes at a time
MIN_PARTS = 10  # so many before workers are worth their start: seconds, each


def tokenize_cached(
    conversations: Sequence[Conversation],
    tokenizer: Tokenizer,
    folder: Path,  # of the tokenizer
    max_len: int,
    workers: int = 0,
) -> TokenizedDocuments:
    """Tokenise all the conversations by `tokenize_part`, or read the result of an earlier run over the same ones.
    `workers` processes share the work, 0 for one per core. Where there is little to do this process does it alone."""
    path = cache_folder() / "tokens" / f"{_key(conversations, tokenizer, folder, max_len)}.npz"
    if (found := _read(path)) is not None:
        log.debug("%d documents from %s", len(found.documents), path)
        return found
    made = _tokenize(conversations, tokenizer, max_len, workers)
    try:
        _write(path, made)
    except OSError as error:  # a full disk or a read-only home costs time, not the data
        log.warning("cannot keep the token ids in %s (%s); they are made again next time", path.parent, error)
    return made


def _tokenize(
    conversations: Sequence[Conversation], tokenizer: Tokenizer, max_len: int, workers: int
) -> TokenizedDocuments:
    parts = [conversations[i : i + PART] for i in range(0, len(conversations), PART)]
    workers = min(workers or num_cores(), len(parts))
    if workers < 2 or len(parts) < MIN_PARTS:
        return tokenize_part(conversations, tokenizer, max_len)
    # Spawned, because a process with threads (XLA's, the tokenizer's) must not be forked.
    context = multiprocessing.get_context("spawn")
    try:
        job = (pickle.dumps(tokenizer), max_len)
        with ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=job) as pool:
            return join(list(pool.map(_work, parts)))
    except BrokenProcessPool as error:
        raise DataError(
            f"one of {workers} processes that tokenise died, perhaps for want of memory; try again with --workers 1"
        ) from error


def _start_worker(pickled_tokenizer: bytes, max_len: int) -> None:
    global _job
    own_process()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _job = (pickle.loads(pickled_tokenizer), max_len)


def _work(conversations: Sequence[Conversation]) -> TokenizedDocuments:
    tokenizer, max_len = _job
    return tokenize_part(conversations, tokenizer, max_len)


_job: tuple[Tokenizer, int]  # of a worker process


def _key(conversations: Sequence[Conversation], tokenizer: Tokenizer, folder: Path, max_len: int) -> str:
    digest = hashlib.sha256()
    for piece in _key_pieces(conversations, tokenizer, folder, max_len):
        digest.update(len(piece).to_bytes(8, "little") + piece)
    return digest.hexdigest()[:32]


def _key_pieces(
    conversations: Sequence[Conversation], tokenizer: Tokenizer, folder: Path, max_len: int
) -> Iterator[bytes]:
    yield str(max_len).encode()
    yield json.dumps(tokenizer.template.kwargs, sort_keys=True).encode()
    for name in LIBRARIES:
        yield f"{name} {importlib.metadata.version(name)}".encode()
    for file in CODE:
        yield file.read_bytes()
    patterns = (*TOKENIZER_FILES, *CONFIG_FILES)
    for file in sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}):
        yield file.name.encode()
        yield file.read_bytes()
    for conversation in conversations:
        yield repr((conversation.tools, conversation.template_kwargs)).encode()
        for message in conversation.messages:
            yield repr(message).encode()  # every field that it has


def _write(path: Path, tokenized: TokenizedDocuments) -> None:
    account = {"counts": tokenized.counts, "rejection": tokenized.rejection}
    parts = tokenized.documents
    arrays = {
        "token_ids": np.concatenate([np.empty(0, np.int32), *(part.token_ids for part in parts)]),
        "loss_mask": np.concatenate([np.empty(0, bool), *(part.loss_mask for part in parts)]),
        "lengths": np.array([len(part) for part in parts], np.int64),
        "origins": np.array(tokenized.origins, np.int64),
        "account": np.frombuffer(json.dumps(account).encode(), np.uint8),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path, is_shared=True) as partial, partial.open("wb") as file:
        np.savez(file, **arrays)


def _read(path: Path) -> TokenizedDocuments | None:
    """Read what `_write` wrote, or return None where there is no such file or it is damaged (it has a checksum for
    each array)."""
    if not path.exists():
        return None
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            token_ids, loss_mask, lengths = arrays["token_ids"], arrays["loss_mask"], arrays["lengths"]
            origins = arrays["origins"].tolist()
            account = json.loads(arrays["account"].tobytes())
        stops = np.cumsum(lengths)
        pieces = zip((stops - lengths).tolist(), stops.tolist(), strict=True)
        found = [Document(token_ids[begin:stop], loss_mask[begin:stop]) for begin, stop in pieces]
        return TokenizedDocuments(found, origins, Counter(account["counts"]), account["rejection"])
    except Exception as error:  # zipfile and numpy raise many types for a damaged file
        log.warning("%s is damaged (%s); its token ids are made again", path, error or type(error).__name__)
        return None
