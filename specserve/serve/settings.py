"""The settings of a server: one schema for YAML, `--set` and flags (see `config`)."""

from collections.abc import Iterable
from typing import Literal, TypedDict

from pydantic.dataclasses import dataclass

from specserve.config import RULES, leaves, setting
from specserve.drafters.registry import CARRIED, ModulePath
from specserve.drafters.words import SPECULATIONS
from specserve.errors import ConfigError

ToolParser = Literal[
    "auto",
    "none",
    "generic",
    "hermes",
    "qwen3-coder",
    "llama3",
    "mistral",
    "glm",
    "deepseek",
    "deepseek-dsml",
    "kimi-k2",
    "minimax-m2",
    "gemma4",
    "lfm2",
    "phi4",
    "command",
    "nemotron",
    "seed",
    "functionary",
    "harmony",
]
ReasoningParser = Literal["auto", "none", "think", "mistral", "gemma4", "seed", "command", "harmony"]


# The scopes of settings, from which the lists of those that concern the same thing are made.
PROGRAM = "program"  # programs and the state: all processes of a server must agree on them
ENGINE = "engine"  # one engine, besides its programs
PROCESS = "process"  # a server over several processes, or the command's own process
CLUSTER = "cluster"  # the Ray cluster
FLEET = "fleet"  # the replicas on it
LISTENER = "listener"  # the address, which the cluster's proxies have in place of a replica


@dataclass(frozen=True, config=RULES)
class ServeRun:
    """The settings of `specserve serve`. Those without a scope concern the HTTP layer."""

    target: str = setting(
        "", help="preset, Hugging Face folder, GGUF file or hub id; empty: the one the draft was trained for"
    )
    draft: str = setting(
        "",
        help=f"folder of a draft head, or a bundled one's name; {CARRIED}: the layer that the target carries; or a "
        "smaller language model, by folder, preset or hub id; empty: a bundled head or none",
    )
    drafter_module: ModulePath = setting(
        "",
        scope=PROGRAM,
        is_early=True,
        help="import path of a kind of drafter from outside: package.module:NAME, or a module that registers one",
    )
    quantization: Literal["", "none", "stored", "int8", "fp8", "int4"] = setting(
        "",
        scope=PROGRAM,
        help="weights of the target in few bits: int8, fp8 or int4 (groups of 32 inputs) rounds them at load, stored "
        "keeps a checkpoint's own, none restores floats; empty: as the head was trained, else stored on one CPU with "
        "native kernels, and none",
    )
    draft_quantization: Literal["", "none", "stored", "int8", "fp8", "int4"] = setting(
        "",
        scope=PROGRAM,
        help="matrices of the draft head in few bits: int8, fp8 or int4 rounds them at load, stored keeps those of its "
        "files; tokens stay the same, and a draft reads fewer bytes, but on CPUs without AVX-512 or AMX; empty: as the "
        "head's notes say, else none",
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8", "fp8"] = setting(
        "auto",
        scope=PROGRAM,
        help="the target's committed keys and values: float32 (for CPUs), bfloat16, or 8 bits with a scale per "
        "entry and KV head; auto: as it is computed, but bfloat16 on CPUs where its checkpoint is",
    )
    mesh: str = setting(
        "",
        scope=PROGRAM,
        help="devices to spread the models over, by axis, such as data=2,tensor=4,expert=1; empty: one device",
    )
    coordinator: str = setting(
        "", scope=PROCESS, help="host:port of the first process of a server over several; auto: what the cluster says"
    )
    num_processes: int = setting(1, scope=PROCESS, help="processes of the server, with a coordinator's address", ge=1)
    process_id: int = setting(0, scope=PROCESS, help="which of them this is; the first one, 0, answers requests", ge=0)
    join_seconds: int = setting(
        300, scope=PROCESS, help="to wait for all of them to come; who is missing is logged", ge=1
    )
    ray: bool = setting(False, scope=CLUSTER, help="serve with replicas on Ray Serve, which needs the extra `scale`")
    ray_address: str = setting(
        "",
        scope=CLUSTER,
        help="host:port of a running Ray cluster, or auto; empty: one on this machine that ends with the command",
    )
    replicas: int = setting(1, scope=FLEET, help="engines behind one address, with --ray", ge=1)
    min_replicas: int = setting(0, scope=FLEET, help="with max_replicas, the fewest; 0: 1", ge=0)
    max_replicas: int = setting(
        0, scope=FLEET, help="replicas by load, up to so many, in place of a fixed number; 0: fixed", ge=0
    )
    replica_resources: str = setting(
        "cpu=1", scope=FLEET, help="what Ray gives each replica: cpu=8,gpu=1 or cpu=1,TPU=4"
    )
    check_weights: bool = setting(
        False, scope=ENGINE, help="refuse a target with weights that are not numbers (reads them all)"
    )
    lora: tuple[str, ...] = setting(
        (),
        scope=PROGRAM,
        help="LoRA adapters of the target, NAME=FOLDER each (PEFT), which requests choose as their model; empty: none",
    )
    max_loras: int = setting(0, scope=PROGRAM, help="LoRA adapters that there is room for; 0: those of lora", ge=0)
    max_lora_rank: int = setting(
        0, scope=PROGRAM, help="largest rank that a LoRA adapter may have; 0: the largest of lora, or 16", ge=0
    )
    speculation: str = setting(
        "auto",
        scope=PROGRAM,
        help=f"auto, by what each way costs and brings here; {SPECULATIONS}",
    )
    served_model_name: str = setting(
        "", help="the model's name for clients; empty: the target's, of a folder its last part"
    )
    host: str = setting("127.0.0.1", scope=LISTENER, help="address to listen on")
    port: int = setting(8000, scope=LISTENER, help="port to listen on; 0: any free one", ge=0, le=65535)
    sampling_defaults: Literal["model", "openai"] = setting(
        "model",
        help="temperature, top_p, top_k, min_p and repetition_penalty of requests that leave them out; model: as the "
        "target's generation_config.json recommends, where it does; openai: 1 and none of the others",
    )
    tool_parser: ToolParser = setting(
        "auto",
        help="how the target calls tools; auto: as its chat template does, or where that shows no known way, as a "
        "prompt of the server's own shows it (generic); none: requests may not have tools",
    )
    reasoning_parser: ReasoningParser = setting(
        "auto",
        help="how the target marks its reasoning, which replies tell apart from content; auto: as its chat template "
        "does; none: all is content",
    )
    api_key: str = setting(
        "", help="require this bearer token; empty: those of api_key_file and of SPECSERVE_API_KEYS, if any"
    )
    api_key_file: str = setting("", help="file of bearer tokens, one a line; any of them is accepted")
    allowed_hosts: tuple[str, ...] = setting(
        (), help="host names that are answered, *.example.com for all below it; empty: any"
    )
    cors_origins: tuple[str, ...] = setting(
        (), help="origins whose web pages may use the server, such as https://chat.example.com; *: any; empty: none"
    )
    ssl_certfile: str = setting(
        "", scope=LISTENER, help="serve TLS with this certificate chain, a PEM file; empty: plain HTTP"
    )
    ssl_keyfile: str = setting(
        "", scope=LISTENER, help="the certificate's private key, a PEM file; empty: it is in ssl_certfile"
    )
    max_connections: int = setting(
        1000, help="open connections; beyond, only /health, /ready and /version are answered", ge=1, le=100_000
    )
    allow_unknown_fields: bool = setting(
        False, help="let requests have unknown fields: they are counted, logged once each, and not read"
    )
    docs: bool = setting(False, help="serve a page of the API at /docs")
    max_slots: int = setting(
        0,
        scope=PROGRAM,
        help="sequences that run at once; 0: 8, or on an accelerator whose cache is not set either up to 256, and a "
        "cache that fills its memory",
        ge=0,
    )
    max_model_len: int = setting(
        0,
        scope=PROGRAM,
        help="prompt and answer together; 0: the target's context, at most 4,096 unless the memory is filled",
        ge=0,
    )
    page_size: int = setting(0, scope=PROGRAM, help="tokens per cache page; 0: 32, and on TPUs 128", ge=0)
    cache_tokens: int = setting(
        0, scope=PROGRAM, help="tokens the cache holds; 0: what cache_gb or cache_fraction allow", ge=0
    )
    cache_gb: float = setting(
        0.0, scope=PROGRAM, help="memory of the cache in GB (1e9 bytes); 0: by cache_fraction", ge=0
    )
    cache_fraction: float = setting(
        0.0,
        scope=PROGRAM,
        help="share of the memory that is free after loading; 0: max_slots times max_model_len, or what max_slots 0 "
        "says",
        ge=0,
        lt=1,
    )
    kept_states: int = setting(
        0,
        scope=PROGRAM,
        help="of a target with recurrent layers: prefixes whose states are kept, without which none can be hit; 0: a "
        "quarter of the slots, at least 8",
        ge=0,
    )
    prefix_cache: bool = setting(
        True, scope=ENGINE, help="keep the pages of finished sequences for prompts that begin alike"
    )
    schedule: Literal["fcfs", "longest-prefix"] = setting(
        "fcfs", scope=ENGINE, help="who is admitted first among equal priorities"
    )
    prefill_tokens: int = setting(
        0, scope=ENGINE, help="prompt tokens per round, between two steps; 0: one largest chunk", ge=0
    )
    max_queue: int = setting(
        256, scope=ENGINE, help="sequences that may wait, shared out among the clients that wait; more get a 503", ge=1
    )
    allow_load_draft: bool = setting(
        False, help="let clients change how the server speculates: POST /v1/load_draft and /v1/speculation"
    )
    allow_update_weights: bool = setting(
        False, help="let clients that have a key change the weights, let the server rest and free the device (RL)"
    )
    update_folder: str = setting(
        "",
        help="with --allow-update-weights: keep the last whole version of the weights in this folder, which no other "
        "server has, begin with it again, and take weights that clients send",
    )
    update_max_gb: float = setting(64.0, help="size of the weights that a client may send", gt=0)
    allow_load_lora: bool = setting(
        False, help="let clients that have a key load and unload LoRA adapters, within max_loras"
    )
    learn: str = setting(
        "",
        help="keep tokens of requests and answers in this folder, which no other server has, and let the draft head "
        "learn from them beside serving; empty: nothing is kept",
    )
    learn_max_gb: float = setting(1.0, help="size of what is kept of requests; beyond, the oldest goes", gt=0)
    learn_max_hours: float = setting(168.0, help="age of what is kept of requests", gt=0)
    learn_share: float = setting(1.0, help="share of the answers that is kept", gt=0, le=1)
    learn_redact: str = setting(
        "",
        help="MODULE:FUNCTION that is given each answer and the tokenizer before anything is kept, and returns what "
        "may be kept, or None",
    )
    learn_data: tuple[str, ...] = setting(
        (), help="data that the head was first trained on, as data.source of train, for a quarter of each round"
    )
    learn_answers: int = setting(512, help="new answers that begin a round of training", ge=64)
    learn_steps: int = setting(200, help="steps of a round", ge=1)
    allow_priority: bool = setting(False, help="let requests choose their priority; else it must be 0")
    deterministic: bool = setting(
        False,
        scope=PROGRAM,
        help="one shape for every step, so that batch mates, prefix hits and speculation change no bit (slower)",
    )
    constrained: bool = setting(
        True,
        scope=PROGRAM,
        help="take grammars (JSON schemas and the like); their speculative steps are programs of their own",
    )
    hidden_states: tuple[int, ...] = setting(
        (),
        scope=PROGRAM,
        help="layers of the target, from 0, behind which /v1/hidden_states returns the hidden states of prompts; "
        "empty: none",
    )
    enable_per_request_metrics: bool = setting(
        False, help="put times into the replies: in the queue, to the first token, of generation; and tokens per second"
    )
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] = setting(
        "none", help="put what speculation did into the replies: summed up, or also of each step"
    )
    otlp_endpoint: str = setting(
        "", help="send a span of each sequence to this OpenTelemetry collector, such as http://localhost:4318"
    )
    kv_events_endpoint: str = setting(
        "",
        help="tell routers what the prefix cache gains and loses: vLLM's KV events over ZMQ, at an address such as "
        "tcp://*:5557 or to a subscriber that waits at another; empty: nobody",
    )
    kv_events_replay_endpoint: str = setting(
        "", help="where subscribers get messages that they have missed, such as tcp://*:5558; empty: nowhere"
    )
    kv_events_topic: str = setting("", help="topic of these messages; llm-d reads kv@POD-ADDRESS@MODEL")
    kv_events_buffer_steps: int = setting(10_000, help="last messages that can be had again", ge=1)
    kv_events_format: Literal["map", "array"] = setting(
        "map", help="events with named fields, as vLLM's are, or as arrays, which readers of its older versions expect"
    )
    early_ready: bool = setting(
        True,
        scope=ENGINE,
        help="serve as soon as plain decoding can, and compile the other programs meanwhile; else, and on GPUs, wait "
        "for all",
    )
    drain_seconds: float = setting(30.0, help="on SIGTERM, let running requests end for so long", ge=0)
    watchdog_seconds: float = setting(60.0, scope=ENGINE, help="report a step that takes longer; 0: never", ge=0)
    warmup_only: bool = setting(False, scope=PROCESS, help="compile everything into the cache folder and exit")


class EngineSettings(TypedDict, total=False):
    """The settings of `ServeRun` that concern programs or the engine, but for `speculation`, as keywords of a Python
    call. A type checker cannot read them from the schema, so they stand here again, and a test compares both."""

    drafter_module: str
    quantization: Literal["", "none", "stored", "int8", "fp8", "int4"]
    draft_quantization: Literal["", "none", "stored", "int8", "fp8", "int4"]
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8", "fp8"]
    mesh: str
    check_weights: bool
    lora: tuple[str, ...]
    max_loras: int
    max_lora_rank: int
    max_slots: int
    max_model_len: int
    page_size: int
    cache_tokens: int
    cache_gb: float
    cache_fraction: float
    kept_states: int
    prefix_cache: bool
    schedule: Literal["fcfs", "longest-prefix"]
    prefill_tokens: int
    max_queue: int
    deterministic: bool
    constrained: bool
    hidden_states: tuple[int, ...]
    early_ready: bool
    watchdog_seconds: float


@dataclass(frozen=True, config=RULES)
class TargetRun:
    """Settings of the target that a command loads, which `engines.load` reads."""

    target: str = setting(
        "", help="preset, Hugging Face folder, GGUF file or hub id; empty: the one the draft was trained for"
    )
    quantization: Literal["", "none", "stored", "int8", "fp8", "int4"] = setting(
        "", help="of the target, as of `serve`"
    )
    draft_quantization: Literal["", "none", "stored", "int8", "fp8", "int4"] = setting(
        "", help="of the head, as of `serve`"
    )
    mesh: str = setting("", help="devices to spread the models over, as of `serve`")
    drafter_module: ModulePath = setting("", is_early=True, help="of the head, as of `serve`")


@dataclass(frozen=True, config=RULES)
class HeadRun(TargetRun):
    """The settings of a target with one head."""

    draft: str = setting("", help="folder of a draft head; empty: the bundled one with the bundled target, else none")


def names_of(*scopes: str) -> list[str]:
    """List the settings of `ServeRun` of these scopes, in the order of definition."""
    return [leaf.name for leaf in leaves(ServeRun) if leaf.scope in scopes]


def check_unset(run: ServeRun, names: Iterable[str], why: str) -> None:
    """Check that these settings have their defaults. Raises ConfigError, which names the first that has not, and ends
    with `why`."""
    for name in names:
        if getattr(run, name) != getattr(ServeRun(), name):
            raise ConfigError(f"--{name.replace('_', '-')} {why}")
