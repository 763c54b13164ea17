"""Text <-> token ids, for training and serving alike, by the tokenizer of a model folder.

A thin wrapper around transformers' tokenizer. Knows nothing of models or requests; torch is never needed, and
transformers is imported only when a tokenizer is loaded. The folder's chat template is `Tokenizer.template`.
"""

import codecs
import contextlib
import json
import logging
import pickle
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specserve import host
from specserve.chat_template import ChatTemplate, Messages
from specserve.errors import CheckpointError, RequestError

log = logging.getLogger(__name__)

# letters of bytes that UTF-8 has nowhere, which some byte-level vocabularies leave out
_IN_NO_TEXT = frozenset(map(chr, (0xC0, 0xC1, *range(0xF5, 0x100))))
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
GENERIC_CLASS = "TokenizersBackend"  # transformers' class for a tokenizer.json alone
_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt", "*.tiktoken")


class Tokenizer:
    """The tokenizer of one model folder, and its chat template. Threads may share it."""

    def __init__(
        self,
        backend: Any,
        end_ids: Collection[int] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        sampling_defaults: Mapping[str, float] | None = None,
    ) -> None:
        """Take a transformers tokenizer, the ids besides its EOS that end a turn, and the options of sampling that the
        model recommends (`read_sampling_defaults`). Callers use `load`."""
        self._backend = backend
        self._sampling_defaults = sampling_defaults or {}
        self.template = ChatTemplate(backend, template_kwargs or {})
        self._vocab_size = len(backend)
        added = backend.added_tokens_decoder.items()  # special without having a name, as Gemma's <end_of_turn> is
        self._special_ids = frozenset(backend.all_special_ids).union(i for i, token in added if token.special)
        self._end_ids = frozenset(end_ids).union([backend.eos_token_id]) - {None}

    @classmethod
    def load(cls, folder: Path, template_kwargs: Mapping[str, Any] | None = None) -> "Tokenizer":
        """Read the tokenizer of a Hugging Face model folder; every chat that it renders gets `template_kwargs` where
        it sets no others. Raises CheckpointError, and ConfigError for a variable that cannot be set or that the chat
        template does not read; never looks on the network."""
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder; expected a model folder with a tokenizer.json")
        defaults = read_sampling_defaults(folder)
        tokenizer = cls(_load_backend(folder), read_end_ids(folder), template_kwargs, defaults)
        tokenizer.template.check_kwargs(tokenizer.template.kwargs)
        return tokenizer

    def __getstate__(self) -> bytes:
        """Return the bytes that a process of ours unpickles without transformers printing to the terminal (see
        `__setstate__`)."""
        return pickle.dumps(vars(self))

    def __setstate__(self, state: bytes) -> None:
        with _without_advice():
            vars(self).update(pickle.loads(state))

    @property
    def vocab_size(self) -> int:
        """The number of ids that the tokenizer knows, added tokens included. The model's embedding may be padded
        beyond it."""
        return self._vocab_size

    def vocabulary(self) -> Mapping[str, int]:
        """Return the ids of all tokens, added ones included, by their names in a tokenizer.json."""
        return self._backend.get_vocab()

    @property
    def bos_token_id(self) -> int | None:
        return self._backend.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        return self._backend.eos_token_id

    def info(self) -> Mapping[str, Any]:
        """Return its class, special tokens and chat template, by their names in a tokenizer_config.json."""
        tokens = {name: token for name, token in self._backend.special_tokens_map.items() if isinstance(token, str)}
        own = {"tokenizer_class": type(self._backend).__name__, "chat_template": self._backend.chat_template}
        return own | dict.fromkeys(("bos_token", "eos_token", "pad_token")) | tokens

    @property
    def special_token_ids(self) -> frozenset[int]:
        """The ids that `decode` leaves out with `skip_special_tokens`."""
        return self._special_ids

    @property
    def end_ids(self) -> frozenset[int]:
        """The ids that end a turn."""
        return self._end_ids

    @property
    def has_chat_template(self) -> bool:
        return self.template.exists

    @property
    def sampling_defaults(self) -> Mapping[str, float]:
        """The options of sampling that the model recommends (`read_sampling_defaults`)."""
        return self._sampling_defaults

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of plain text. Raises RequestError on a lone surrogate, which no UTF-8 text can hold."""
        _check_unicode(text)
        return self._backend.encode(text, add_special_tokens=add_special_tokens)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of plain text, no special tokens added, and which characters [start, stop) each was made of."""
        encoded = self._backend(text, add_special_tokens=False, return_offsets_mapping=True)
        return encoded["input_ids"], encoded["offset_mapping"]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the ids, byte for byte (no clean-up of spaces); bytes that are no UTF-8 become U+FFFD."""
        if type(self._backend).__name__ == GENERIC_CLASS:  # a tenth of the time, and every token is decoded twice
            return self._backend.backend_tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return self._backend.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def token_id(self, token: str) -> int | None:
        """The id of an added token, such as "<|fim_prefix|>"; None where there is none of that name."""
        return self._backend.get_added_vocab().get(token)

    def as_json(self) -> str:
        """The tokenizer as the text of a tokenizer.json, added tokens included, as libraries in other languages read
        it. Raises ValueError for a tokenizer that has no such form."""
        from transformers import PreTrainedTokenizerFast

        if not isinstance(self._backend, PreTrainedTokenizerFast):
            raise ValueError(f"{type(self._backend).__name__} is no fast tokenizer")
        return self._backend.backend_tokenizer.to_str()

    def special_tokens_in(self, text: str) -> list[str]:
        """The special tokens that the text holds, in the order of their ids."""
        tokens = self._backend.convert_ids_to_tokens(sorted(self._special_ids))
        return [token for token in tokens if token in text]

    def render_chat(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Messages | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a chat, up to where the assistant's answer begins; or up to where the text of its last message
        ends, with `continue_final_message` and without `add_generation_prompt`.

        The template writes the special tokens, BOS included, so none are added. The arguments of tool calls are
        mappings; a template that wants them as text gets text. `template_kwargs` become template variables, and win
        over those of `load`; they cannot replace the template. Raises RequestError when the model has no chat template,
        the template rejects the messages, or a variable has a reserved name.
        """
        text = self.template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )
        return self.encode(text, add_special_tokens=False)

    def template_token_ids(self) -> frozenset[int]:
        """Return every id that a draft vocabulary must hold: special and added tokens, EOS, the template's own
        text."""
        token_ids = set(self._special_ids) | set(self._backend.get_added_vocab().values())
        probe = [{"role": role, "content": "1"} for role in ("system", "user", "assistant", "user")]
        # Without a system message some templates write a default one; others accept no system message at all.
        for messages in (probe, probe[1:]) if self.has_chat_template else ():
            try:
                token_ids.update(self.render_chat(messages))
            except RequestError as error:
                log.debug("chat template rejects roles %s: %s", [m["role"] for m in messages], error)
        return frozenset(token_ids)

    def byte_token_ids(self) -> frozenset[int]:
        """Return the ids of the tokens of single bytes, of which text is made that no other token writes: those of byte
        fallback, or the letters of a byte-level vocabulary that can write every text. Empty where it has neither."""
        from tokenizers.pre_tokenizers import ByteLevel

        vocab = self._backend.get_vocab()
        if fallback := {f"<0x{byte:02X}>" for byte in range(256)} & vocab.keys():
            return frozenset(vocab[name] for name in fallback)
        letters = set(ByteLevel.alphabet())
        if letters - _IN_NO_TEXT <= vocab.keys():
            return frozenset(vocab[name] for name in letters & vocab.keys())
        return frozenset()


def _load_backend(folder: Path) -> Any:
    """Load the tokenizer of transformers. Raises CheckpointError."""
    backend_class = _import_class(folder)
    try:
        with _without_marks(folder) as readable:
            # The length check of transformers would only log; lengths are the caller's business.
            return backend_class.from_pretrained(str(readable), local_files_only=True, model_max_length=2**62)
    except Exception as error:  # transformers raises whatever its parsers raise
        raise CheckpointError(f"{folder}: cannot read the tokenizer: {error}") from error


@contextlib.contextmanager
def _without_marks(folder: Path) -> Iterator[Path]:
    """Give a folder of the same files, in which no JSON and no chat template begins with the byte order mark that some
    editors write: transformers does not read the one, and writes the other's into every prompt."""
    files = [path for path in folder.iterdir() if path.is_file()]
    marked = [path for path in files if path.suffix in (".json", ".jinja") and _begins_with_mark(path)]
    if not marked:
        yield folder
        return
    with tempfile.TemporaryDirectory() as scratch:
        for path in files:
            own = Path(scratch) / path.name
            if path in marked:
                with host.whole_file(own) as partial:
                    partial.write_bytes(path.read_bytes().removeprefix(codecs.BOM_UTF8))
            else:
                own.symlink_to(path.resolve())
        yield Path(scratch)


def _begins_with_mark(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8


def _import_class(folder: Path) -> Any:
    """The class of transformers that reads a folder's tokenizer. Usually that is AutoTokenizer, which reads the sources
    of every model for a second when it is imported; a folder may say that its tokenizer.json is all there is."""
    with _without_advice(), host.without_collecting():
        if _is_generic(folder):
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast
        from transformers import AutoTokenizer

        return AutoTokenizer


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Import transformers, directly or by unpickling a tokenizer, without its advice to install torch: tokenizers do
    not need it."""
    logger = logging.getLogger("transformers")
    logger.addFilter(_reject)  # on this logger only: its children still warn, and levels stay as the user set them
    try:
        with host.without_torch():
            yield
    finally:
        logger.removeFilter(_reject)


def _is_generic(folder: Path) -> bool:
    try:
        found = json.loads((folder / "tokenizer_config.json").read_text("utf-8-sig"))
        return found["tokenizer_class"] == GENERIC_CLASS and "auto_map" not in found
    except (OSError, ValueError, KeyError, TypeError):
        return False  # AutoTokenizer will report what is wrong


def _reject(record: logging.LogRecord) -> bool:
    return record.levelno > logging.WARNING


def check_files(folder: Path) -> None:
    """Raises CheckpointError where a model folder has no vocabulary of a tokenizer: before its weights are read."""
    if not any(next(folder.glob(pattern), None) for pattern in _VOCABULARIES):
        raise CheckpointError(
            f"{folder}: no tokenizer files; expected one of {', '.join(_VOCABULARIES)}. Copy them from where the "
            "weights come from"
        )


def read_end_ids(folder: Path) -> tuple[int, ...]:
    """Read every id that ends a turn or a sequence: those of a model folder's generation_config.json, of its
    config.json (there also of the text model within a larger one), and the tokenizer's own EOS token, each once. A
    negative id stands for none. Raises CheckpointError."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        stated = _read_object(folder / name)
        for where, part in {name: stated, f"{name}: text_config": stated.get("text_config")}.items():
            if isinstance(part, Mapping):
                found += _as_ids(part.get("eos_token_id"), f"{folder / where}: eos_token_id")
    own = _own_end(folder)
    return tuple(dict.fromkeys(found if own is None else [*found, own]))


def read_sampling_defaults(folder: Path) -> Mapping[str, float]:
    """Read the options of sampling that a model folder's generation_config.json recommends, by vLLM's names, for
    requests that leave them out. Raises CheckpointError."""
    stated = _read_object(folder / "generation_config.json")
    found = {name: stated[name] for name in SAMPLING_DEFAULTS if stated.get(name) is not None}
    for name, value in found.items():
        if type(value) not in (int, float):
            raise CheckpointError(
                f"{folder / 'generation_config.json'}: {name}: expected a number, got {json.dumps(value)}"
            )
    return found


def _as_ids(value: Any, where: str) -> list[int]:
    """Return the ids in a config's value: one, several or none."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(each) is int for each in ids):
        raise CheckpointError(f"{where}: expected an id or a list of ids, got {json.dumps(value)}")
    return [each for each in ids if each >= 0]


def _own_end(folder: Path) -> int | None:
    """Return the id of the EOS token that the tokenizer's files name, without loading the tokenizer where they hold
    the id too. None where they name none."""
    config = _read_object(folder / "tokenizer_config.json")
    token = config.get("eos_token") or _read_object(folder / "special_tokens_map.json").get("eos_token")
    if isinstance(token, Mapping):
        token = token.get("content")
    if not isinstance(token, str):
        return None
    added = config.get("added_tokens_decoder")
    ids = {v.get("content"): int(k) for k, v in added.items()} if isinstance(added, Mapping) else {}
    if token in ids:
        return ids[token]
    stored = _read_object(folder / "tokenizer.json")
    ids = {each["content"]: each["id"] for each in stored.get("added_tokens", ())}
    vocabulary = stored.get("model", {}).get("vocab", {})
    if token not in ids and isinstance(vocabulary, Mapping):  # those of Unigram models are lists
        ids = vocabulary
    if stored or not any(next(folder.glob(pattern), None) for pattern in _VOCABULARIES):
        return ids.get(token)
    return _load_backend(folder).eos_token_id  # of vocabularies that only transformers reads


def _read_object(path: Path) -> Mapping[str, Any]:
    """Read a file's JSON object; an empty one where there is no such file. Raises CheckpointError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text is not valid Unicode: lone surrogate U+{ord(text[error.start]):04X} at character {error.start}",
            param="prompt",
        ) from error
