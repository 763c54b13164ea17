"""The settings of `specserve data prepare` and `data inspect` (see `config`)."""

from pydantic.dataclasses import dataclass

from specserve.config import RULES, setting


@dataclass(frozen=True, config=RULES)
class MixtureRun:
    """The settings that `specserve data prepare` and `inspect` share. They mean what they mean to `specserve train`."""

    target: str = setting(
        "pydoc", help="preset, Hugging Face folder, GGUF file or hub id: whose tokenizer and chat template"
    )
    source: tuple[str, ...] = setting(
        ("pydoc",),
        help="pydoc, a named or hub data set, .jsonl, .json or .parquet files; NAME=2 uses each conversation twice",
    )
    columns: tuple[str, ...] = setting(
        (), help="what the columns hold: messages=COLUMN, or prompt=COLUMN,response=COLUMN, or text=COLUMN"
    )
    template_kwargs: tuple[str, ...] = setting((), help="variables of the chat template, as data.template_kwargs")
    max_conversations: int = setting(0, help="use only so many, drawn by the seed; 0: all", ge=0)
    seq_len: int = setting(256, help="tokens per row", ge=8)
    vocab_size: int = setting(0, help="draft vocabulary; 0: half the target's, at most 32,000; -1: all of it", ge=-1)
    workers: int = setting(0, help="processes that tokenise; 0: one per core", ge=0)
    seed: int = setting(0, help="which conversations are drawn, and which rows are shown", ge=0)


@dataclass(frozen=True, config=RULES)
class PrepareRun(MixtureRun):
    """The settings of `specserve data prepare`."""

    output: str = setting("", help=".jsonl to write the token ids to, a source again; empty: only the cache is filled")


@dataclass(frozen=True, config=RULES)
class InspectRun(MixtureRun):
    """The settings of `specserve data inspect`."""

    show: int = setting(2, help="conversations to show of each source", ge=0)
    show_tokens: int = setting(400, help="tokens to show of each", ge=1)
