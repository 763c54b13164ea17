"""The settings of `specserve eval`, `bench`, `verify` and `data regenerate` (see `config`)."""

from typing import Literal

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from specserve.config import RULES, setting
from specserve.drafters.words import ALL_TEXT
from specserve.serve.settings import HeadRun, TargetRun
from specserve.speculative.ranges import Temperature


@dataclass(frozen=True, config=RULES)
class EvalRun(TargetRun):
    """The settings of `specserve eval`."""

    draft: tuple[str, ...] = setting(
        (), help="folder of a draft head, or several to compare; none: the bundled one with the bundled target"
    )
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
    api_key: str = setting("", help="key of the server")
    expect: tuple[float, ...] = setting(
        (), help="published tau, one for each row of the table; exit status 1 where one is outside the interval"
    )
    output: str = setting("", help="write the JSON report here")


RANDOM_WEIGHTS = (
    "draw the weights of the target, and of a new head without --draft, in place of loading them: a preset or a folder "
    "with a config.json is enough, and no hub is asked; with --bench random"
)


@dataclass(frozen=True, config=RULES)
class BenchRun(HeadRun):
    """The settings of `specserve bench engine`."""

    arms: tuple[str, ...] = setting(
        ("chain:3", "tree:4x2x7", "auto"), help="speculations to measure against plain decoding, as for serve"
    )
    concurrency: tuple[PositiveInt, ...] = setting((1, 2, 4, 8, 16, 32), help="clients at once")
    temperature: tuple[Temperature, ...] = setting((0.0, 1.0), help="0 is greedy")
    bench: str = setting("pydoc", help="what is asked, as of `eval`; or random token ids")
    input_len: int = setting(0, help="tokens of a random prompt; 0: 128", ge=0)
    random_weights: bool = setting(False, help=RANDOM_WEIGHTS)
    history: int = setting(2, help="answered questions that a chat of pydoc brings along, at most", ge=0)
    rounds: int = setting(3, help="how often the arms take turns at each concurrency", ge=1)
    requests: int = setting(8, help="questions per round and arm, or as many as there are clients", ge=1)
    max_tokens: int = setting(128, help="longest answer", ge=2)
    max_model_len: int = setting(1024, help="prompt and answer together", ge=8)
    coupling: bool = setting(True, help="also measure what it brings that the draft ranks with the target's noise")
    seed: int = setting(0, help="of the sampling", ge=0)
    output: str = setting("", help="write the JSON report here")


@dataclass(frozen=True, config=RULES)
class _OfflineRun(HeadRun):
    """Settings that the benchmarks of one engine in this process share."""

    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8", "fp8"] = setting(
        "auto", help="of the pages, as of `serve`; float32 is for CPUs"
    )
    speculation: str = setting("auto", help="anything that serve takes")
    bench: str = setting("pydoc", help="what is asked, as of `eval`; or random token ids")
    random_weights: bool = setting(False, help=RANDOM_WEIGHTS)
    temperature: Temperature = setting(0.0, help="0 is greedy")
    seed: int = setting(0, help="of random prompts and of the sampling", ge=0)
    profile: str = setting("", help="run once more under JAX's profiler, and write its trace into this folder")
    output: str = setting("", help="write the results here, as JSON with vLLM's keys")


@dataclass(frozen=True, config=RULES)
class LatencyRun(_OfflineRun):
    """The settings of `specserve bench latency`; flags that `vllm bench latency` has too mean what they mean there."""

    input_len: int = setting(32, help="tokens of each prompt, the last ones of a question", ge=1)
    output_len: int = setting(128, help="tokens of each answer, whether or not it would end before", ge=2)
    batch_size: int = setting(
        8, help="sequences that are answered together; where a bench has fewer prompts they come again", ge=1
    )
    num_iters_warmup: int = setting(3, help="batches that are answered first and not timed", ge=1)
    num_iters: int = setting(10, help="batches that are timed", ge=1)


@dataclass(frozen=True, config=RULES)
class ThroughputRun(_OfflineRun):
    """The settings of `specserve bench throughput`; flags that `vllm bench throughput` has too mean what they mean
    there."""

    input_len: int = setting(0, help="tokens of a random prompt; 0: 128", ge=0)
    output_len: int = setting(128, help="longest answer", ge=2)
    num_prompts: int = setting(
        100, help="prompts, all there from the beginning; where a bench has fewer they come again", ge=1
    )
    max_slots: int = setting(8, help="sequences that run at once", ge=1)
    max_model_len: int = setting(1024, help="prompt and answer together", ge=16)


@dataclass(frozen=True, config=RULES)
class QuantizationRun(HeadRun):
    """The settings of `specserve bench quantization`."""

    # several in place of one
    quantization: tuple[Literal["none", "stored", "int8", "fp8", "int4"], ...] = setting(  # type: ignore[assignment]
        ("int8", "int4"), help="forms of the target's weights to compare with floats, each as of `serve`"
    )
    speculation: str = setting("", help="anything that serve takes; empty: chain:3 where there is a head, else off")
    bench: str = setting("pydoc", help="what is asked, as of `eval`: first turns")
    limit: int = setting(32, help="prompts, evenly spread over the bench", ge=1)
    max_tokens: int = setting(128, help="longest answer", ge=1)
    concurrency: int = setting(4, help="sequences at once", ge=1)
    max_model_len: int = setting(1024, help="prompt and answer together; longer prompts are left out", ge=8)
    output: str = setting("", help="write the JSON report here")


@dataclass(frozen=True, config=RULES)
class VerifyRun(HeadRun):
    """The settings of `specserve verify`."""

    speculation: tuple[str, ...] = setting(
        ("auto", f"{ALL_TEXT}:3"),
        help="what to prove, as for serve; auto: all that it would choose from",
    )
    bench: str = setting("pydoc", help="what is asked, as of `eval`")
    limit: int = setting(4, help="questions that are asked, evenly spread", ge=1)
    max_tokens: int = setting(32, help="longest answer; a second turn is asked after each", ge=6, le=1024)
    draws: int = setting(472, help="tokens that each test of the distribution at temperature 1 counts", ge=160)
    seed: int = setting(0, help="of the sampling", ge=0)
    json: bool = setting(False, help="print the report as JSON instead of tables")
    output: str = setting("", help="write the JSON report here")
