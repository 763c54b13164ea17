"""The settings of `specserve eval`, `bench` and `data regenerate` (see `config`)."""

from typing import Literal

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from specserve.config import RULES, setting
from specserve.speculative.ranges import Temperature, TopK, TopP


@dataclass(frozen=True, config=RULES)
class EvalRun:
    """The settings of `specserve eval`."""

    draft: tuple[str, ...] = setting(
        (), help="folder of a draft head, or several to compare; none: the bundled one with the bundled target"
    )
    target: str = setting("", help="preset, Hugging Face folder or hub id; empty: the one the draft was trained for")
    bench: str = setting(
        "mt-bench",
        help="mt-bench, gsm8k, humaneval, math-500, alpaca, cnn-dm, spec-bench or pydoc; NAME:PATH for files of one "
        "that were downloaded elsewhere (speed-bench:PATH too); or a file or folder of questions",
    )
    speculation: tuple[str, ...] = setting((), help="anything that serve takes but off; none: chain:3,auto")
    limit: int = setting(80, help="ask only so many questions, evenly spread; 0: all", ge=0)
    max_tokens: int = setting(256, help="longest answer", ge=1)
    temperature: tuple[Temperature, ...] = setting((0.0,), help="0 is greedy")
    concurrency: tuple[PositiveInt, ...] = setting((1,), help="sequences at once")
    max_model_len: int = setting(0, help="prompt and answer together; 0: the target's context, at most 4,096", ge=0)
    seed: int = setting(0, help="of the sampling", ge=0)
    server: tuple[str, ...] = setting(
        (),
        help="address of a running server (ours, vLLM, SGLang, llama.cpp) to measure instead; of several, the first "
        "is what the others are compared with",
    )
    api_key: str = setting("", help="what the server wants to be told")
    expect: tuple[float, ...] = setting(
        (), help="published tau, one for each row of the table; exit status 1 where one is outside the interval"
    )
    output: str = setting("", help="write the JSON report here, and a page for people beside it (.html)")


@dataclass(frozen=True, config=RULES)
class BenchRun:
    """The settings of `specserve bench engine`."""

    draft: str = setting("", help="folder of a draft head; empty: the bundled one with the bundled target, else none")
    target: str = setting("", help="preset, Hugging Face folder or hub id; empty: the one the draft was trained for")
    arms: tuple[str, ...] = setting(
        ("chain:3", "tree:4x2x7", "auto"), help="speculations to measure against plain decoding, as for serve"
    )
    concurrency: tuple[PositiveInt, ...] = setting((1, 2, 4, 8, 16, 32), help="clients at once")
    temperature: tuple[Temperature, ...] = setting((0.0, 1.0), help="0 is greedy")
    bench: str = setting("pydoc", help="pydoc, mt-bench, or a .jsonl of questions")
    history: int = setting(2, help="answered questions that a chat of pydoc brings along, at most", ge=0)
    rounds: int = setting(3, help="how often the arms take turns at each concurrency", ge=1)
    requests: int = setting(8, help="questions per round and arm, or as many as there are clients", ge=1)
    max_tokens: int = setting(128, help="longest answer", ge=2)
    max_model_len: int = setting(1024, help="prompt and answer together", ge=8)
    coupling: bool = setting(True, help="also measure what it brings that the draft ranks with the target's noise")
    seed: int = setting(0, help="of the sampling", ge=0)
    output: str = setting("", help="write the JSON report here")


@dataclass(frozen=True, config=RULES)
class KernelsRun:
    """The settings of `specserve bench kernels`."""

    kernels: tuple[str, ...] = setting((), help="which kernels to time: attention, experts; none named: all")
    batch: tuple[PositiveInt, ...] = setting((1, 8, 32), help="sequences")
    queries: tuple[PositiveInt, ...] = setting((1, 4, 16, 64), help="query tokens of each sequence")
    entries: tuple[PositiveInt, ...] = setting((256, 2048), help="committed entries of each sequence")
    heads: int = setting(32, help="query heads", ge=1)
    kv_heads: int = setting(8, help="KV heads, a divisor of heads", ge=1)
    head_dim: int = setting(128, help="channels of a head", ge=1)
    page_size: int = setting(32, help="tokens per cache page", ge=1)
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = setting("auto", help="of the pages, as of `serve`")
    num_experts: int = setting(128, help="of a mixture; the defaults are those of Qwen3-30B-A3B", ge=2)
    top_k: int = setting(8, help="experts that a token chooses", ge=1)
    d_model: int = setting(2048, help="channels that experts read and write", ge=1)
    expert_d_ff: int = setting(768, help="hidden channels of an expert", ge=1)
    seconds: float = setting(0.3, help="how long each kernel and shape is timed, after it was compiled", gt=0)
    output: str = setting("", help="write the JSON report here")


@dataclass(frozen=True, config=RULES)
class RegenerateRun:
    """The settings of `specserve data regenerate`."""

    target: str = setting("pydoc", help="preset, Hugging Face folder or hub id: who answers")
    draft: str = setting("", help="folder of a draft head; empty: the bundled one with the bundled target, else none")
    speculation: str = setting("", help="as of `serve`; changes no token. Empty: auto where there is a head, else off")
    source: tuple[str, ...] = setting(
        ("pydoc",), help="what is asked: pydoc, data sets by name, owner/name of the hub, or files, as of `train`"
    )
    columns: tuple[str, ...] = setting((), help="what the columns of a source hold, as data.columns of `train`")
    output: str = setting("regenerated.jsonl", help="file that rows are appended to; answered ones are skipped")
    count: int = setting(2000, help="conversations, drawn by the seed; 0: all", ge=0)
    samples: int = setting(1, help="rows per conversation, each drawn anew", ge=1)
    max_tokens: int = setting(256, help="longest answer", ge=1)
    temperature: Temperature = setting(0.0, help="0 is greedy")
    top_p: TopP = setting(1.0, help="draw from the most likely tokens that together reach this probability")
    top_k: TopK = setting(0, help="draw from so many most likely tokens; 0: all")
    seed: int = setting(0, help="which conversations are drawn, and the sampling", ge=0)
    thinking: Literal["keep", "drop"] = setting("keep", help="reasoning in the rows")
    enable_thinking: Literal["", "true", "false"] = setting(
        "", help="what the chat template is told of reasoning; empty: nothing"
    )
    template_kwargs: tuple[str, ...] = setting(
        (), help="variables of the chat template, as data.template_kwargs of `train`"
    )
    cut: Literal["keep", "drop"] = setting("keep", help="answers that end at max_tokens")
    quantization: Literal["", "none", "stored", "int8", "fp8"] = setting("", help="of the target, as of `serve`")
    mesh: str = setting("", help="devices to spread the models over, as of `serve`")
    max_slots: int = setting(16, help="sequences at once", ge=1)
    max_model_len: int = setting(
        1024,
        help="prompt and answer together; 0: the target's context, at most 4,096; longer questions are left out",
        ge=0,
    )
