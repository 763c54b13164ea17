"""The settings of a training run: one schema for YAML, `--set a.b=c` and flags (see `config`)."""

import dataclasses
from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from specserve.config import RULES, setting
from specserve.drafters.registry import DEFAULT_KIND, DraftSettings, KindName, ModulePath
from specserve.drafters.settings import DraftQuantization
from specserve.speculative.ranges import Temperature

StatesFrom = Literal["layers", "capture", "service"]


@dataclass(frozen=True, config=RULES)
class DataSettings:
    """Settings of the conversations: where they come from, and how many of them are used."""

    source: tuple[str, ...] = setting(
        ("pydoc",),
        help="pydoc, self (the target asks itself), a named or hub data set, .jsonl or .parquet files; NAME=2 uses "
        "each conversation twice per epoch",
        rank=2,
    )
    regenerate: bool = setting(
        False,
        help="first have the target answer the questions of the source itself, in place of the answers there",
        rank=3,
    )
    self_questions: int = setting(2000, help="questions that the target asks itself, with the source self", ge=1)
    self_turns: int = setting(2, help="how often the user speaks in each of these conversations, at most", ge=1)
    self_openings: str = setting(
        "varied", help="first words of half of these questions: varied, none, or a text file with an opening a line"
    )
    answer_tokens: int = setting(0, help="longest answer that the target gives then; 0: what a row holds", ge=0)
    answer_temperature: Temperature = setting(0.0, help="temperature of these answers; 0 is greedy")
    answer_slots: int = setting(16, help="answers at once", ge=1)
    columns: tuple[str, ...] = setting(
        (), help="what a hub data set's columns hold: messages=COLUMN, or prompt=COLUMN,response=COLUMN, or text=COLUMN"
    )
    template_kwargs: tuple[str, ...] = setting(
        (), help="variables of the chat template, such as enable_thinking=false; a row's own chat_template_kwargs win"
    )
    max_conversations: int = setting(0, help="use only so many, drawn by train.seed; 0: all", ge=0)
    workers: int = setting(0, help="processes that tokenise; 0: one per core", ge=0)
    eval_prompts: int = setting(24, help="held-out prompts for the acceptance measured while training", ge=0)


@dataclass(frozen=True, config=RULES)
class TrainSettings:
    """Settings of the optimisation, and of how often the run reports, measures and saves."""

    max_steps: int = setting(0, help="stop after this many steps; 0: no limit but max_minutes", ge=0, rank=6)
    max_minutes: float = setting(240.0, help="stop after this much time, evaluation included; 0: no limit", ge=0)
    batch_size: int = setting(8, help="rows per step, over all devices and accumulation", ge=1)
    accumulate: int = setting(1, help="parts of the batch whose gradients are added up, one after the other", ge=1)
    seq_len: int = setting(256, help="tokens per row; conversations are packed into rows", ge=8)
    rollout: int = setting(4, help="training-time-test steps", ge=1, le=8)
    rollout_decay: float = setting(0.8, help="weight of rollout step k is this to the power k", gt=0, le=1)
    loss: Literal["ce", "kl", "tv", "lk", "lk-hybrid", "ce-l1"] = setting(
        "ce",
        help="soft cross-entropy, KL divergence, total variation, -log acceptance, or a blend of the first or second "
        "with the third",
    )
    teacher: Literal["soft", "greedy", "data"] = setting(
        "soft", help="what is learnt: the target's distribution, its best token, or the token that the data has"
    )
    weighting: Literal["decay", "d-pace"] = setting(
        "decay", help="what a rollout step counts: see rollout_decay; or of blocks, their expected accepted length"
    )
    anchors: int = setting(0, help="of a block drafter: blocks in each row; 0: as many as fill a row", ge=0)
    kl_decay: float = setting(3.0, help="lk-hybrid: KL has weight exp(-kl_decay * acceptance)", ge=0)
    remat: bool = setting(
        False, help="compute rollout steps again in the backward pass: less memory for long rows, a tenth slower"
    )
    optimizer: Literal["adamw", "muon"] = setting("adamw", help="muon orthogonalises the matrices' updates")
    moments: Literal["float32", "int8", "host"] = setting(
        "float32", help="the optimiser's moments: full, in 8 bits by block, or in the host's memory"
    )
    lr: float = setting(8e-4, help="peak learning rate", gt=0)
    muon_lr: float = setting(0.01, help="peak learning rate of the matrices under muon", gt=0)
    schedule: Literal["cosine", "linear", "constant"] = setting("cosine", help="how the rate falls after the warm-up")
    warmup_share: float = setting(0.03, help="share of the run spent warming up", ge=0, lt=1)
    weight_decay: float = setting(0.0, help="decoupled weight decay", ge=0)
    clip: float = setting(0.5, help="gradient norm limit", gt=0)
    log_every: int = setting(10, help="steps between logged metrics", ge=1)
    eval_every: int = setting(200, help="steps between measurements of the acceptance; 0: only at the end", ge=0)
    save_every: int = setting(500, help="steps between saved states; 0: only at the end", ge=0)
    keep: int = setting(2, help="newest states to keep, beside the best by tau", ge=1)
    patience: int = setting(0, help="stop after so many measurements in a row without a better tau; 0: never", ge=0)
    seed: int = setting(0, help="seed of initialisation and data order", ge=0)
    resume: bool = setting(False, help="go on with the run in the output folder, wherever it stopped", rank=8)


@dataclass(frozen=True, config=RULES)
class EvalSettings:
    """Settings of how acceptance is measured on held-out prompts, by the code that serves. The first speculation at
    the first temperature is the run's tau; every pair is measured at the end."""

    speculation: tuple[str, ...] = setting(("chain:3",), help="chains and trees to measure")
    temperature: tuple[Temperature, ...] = setting((0.0,), help="temperatures to measure at; 0 is greedy")
    eval_tokens: int = setting(128, help="longest answer", ge=1)
    bench: tuple[str, ...] = setting(
        (), help="measured at the end as by specserve eval --bench: mt-bench, or .jsonl files of questions"
    )
    bench_limit: int = setting(80, help="ask only so many of its questions, evenly spread; 0: all", ge=0)


@dataclass(frozen=True, config=RULES)
class CaptureSettings:
    """Settings of keeping the target's hidden states on disk: captured before, so that training needs no target in
    memory, or kept while it trains."""

    capture: str = setting("", help="folder of captured hidden states: made when it is not there, then trained from")
    capture_format: Literal["int8", "int4", "fp8"] = setting("int8", help="how hidden states are kept, a scale per row")
    capture_layers: tuple[int, ...] = setting(
        (), help="layers whose states are captured beside the drafter's taps, for other kinds to train from the folder"
    )
    capture_top_k: int = setting(20, help="tokens of the target's distribution that are kept for each position", ge=1)
    keep_states: Literal["auto", "true", "false"] = setting(
        "auto",
        help="run the target over each row once, and keep its states on the output's disk until the run ends; auto: on "
        "a CPU, in one process, with a budget or so many steps that rows come again",
    )


@dataclass(frozen=True, config=RULES)
class ServiceSettings:
    """Settings of a target that runs in processes of its own, which send training the target's outputs."""

    target_service: int = setting(
        0,
        help="processes on Ray that run the target over the rows, shared out over those of training; 0: the training "
        "step runs it",
        ge=0,
    )
    target_mesh: str = setting("", help="devices of each of them by axis, such as tensor=8; empty: one device")
    target_ahead: int = setting(0, help="batches that may be computed ahead; 0: two for each of them", ge=0)
    target_transport: Literal["exact", "int8", "fp8"] = setting(
        "exact", help="how states are sent: as they are, or in 8 bits with a scale for each token's"
    )


@dataclass(frozen=True, config=RULES)
class TrainRun:
    """The settings of `specserve train`."""

    target: str = setting(
        "pydoc",
        help="preset, Hugging Face folder, GGUF file or hub id; any but the bundled one brings settings of its own",
        rank=1,
    )
    drafter_module: ModulePath = setting(
        "",
        is_early=True,
        help="import path of a kind of drafter from outside: package.module:NAME, or a module that registers one",
    )
    drafter: KindName = setting(DEFAULT_KIND, help="kind of the draft head, see docs/drafters.md")
    quantization: Literal["none", "stored", "int8", "fp8", "int4"] = setting(
        "none", help="weights of the target in few bits, as it will be served (see serve)"
    )
    draft_quantization: DraftQuantization = setting(
        "none", help="matrices of the head in few bits where it is measured and served (see serve); not in its files"
    )
    lora: str = setting(
        "", help="PEFT folder of a LoRA adapter of the target that the head follows: it is merged in; empty: none"
    )
    mesh: str = setting(
        "",
        help="devices by axis, such as data=2,tensor=4 (also fsdp=N, sequence=N, expert=N); empty: one device",
        rank=7,
    )
    budget: str = setting(
        "", help="time that the whole run may take, such as 2h or 90m: it scales samples and steps", rank=5
    )
    coordinator: str = setting(
        "", help="host:port of the first process of a run over several; auto: what the cluster says"
    )
    num_processes: int = setting(1, help="processes of the run, with a coordinator's address", ge=1)
    process_id: int = setting(0, help="which of them this is", ge=0)
    join_seconds: int = setting(
        300, help="to wait for all of them to come, or for room on Ray; what is missing is logged", ge=1
    )
    ray: bool = setting(False, help="train in workers of a Ray cluster, which are started again where one dies")
    ray_address: str = setting(
        "", help="host:port of the cluster; auto: the one on this machine; empty: one of its own, on this machine alone"
    )
    num_workers: int = setting(1, help="workers, with ray; the mesh is over the devices of all of them", ge=1)
    max_failures: int = setting(10, help="how often workers that died are started again, with ray", ge=0)
    check_weights: bool = setting(False, help="refuse a target with weights that are not numbers (reads them all)")
    init_from: str = setting("", help="folder or hub id of a head to go on from; empty: a new head")
    output: str = setting("ckpt", help="folder for the head, its state and its metrics", rank=4)
    trackers: tuple[Literal["wandb", "tensorboard"], ...] = setting(
        (), help="wandb, tensorboard; metrics.jsonl is always written"
    )
    data_only: bool = setting(
        False, help="write the conversations, with the target's answers, to data.jsonl in the output folder, and end"
    )
    dry_run: bool = setting(False, help="show settings, sizes, memory and FLOPs, and load no weights", rank=9)
    data: DataSettings = Field(default_factory=DataSettings)
    draft: DraftSettings = Field(default_factory=DraftSettings)
    train: TrainSettings = Field(default_factory=TrainSettings)
    eval: EvalSettings = Field(default_factory=EvalSettings)
    features: CaptureSettings = Field(default_factory=CaptureSettings)
    service: ServiceSettings = Field(default_factory=ServiceSettings)

    @property
    def is_of_several(self) -> bool:
        """Return whether this is, or may be, one process of several."""
        return bool(self.coordinator) or self.ray

    @property
    def num_trainers(self) -> int:
        """The number of training processes."""
        if self.ray:
            return self.num_workers
        return self.num_processes

    @property
    def states_from(self) -> StatesFrom:
        """The place that a training step takes the target's states from: it runs the target's layers itself, reads
        what was captured, or is sent them by the target's own processes."""
        if self.features.capture:
            return "capture"
        if self.service.target_service:
            return "service"
        return "layers"

    @property
    def shared(self) -> "TrainRun":
        """The settings without this process's own part in a run of several."""
        return dataclasses.replace(self, process_id=0)
