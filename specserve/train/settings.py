"""The settings of a training run: one schema for YAML, `--set a.b=c` and flags (see `config`)."""

from dataclasses import dataclass, field
from typing import Literal

from specserve.config import setting


@dataclass(frozen=True)
class DataSettings:
    """Where conversations come from."""

    source: str = setting("pydoc", help="pydoc, or a .jsonl of conversations")
    max_conversations: int = setting(0, help="use only so many, drawn by train.seed; 0: all", ge=0)
    eval_prompts: int = setting(24, help="held-out prompts for the acceptance measured while training", ge=0)


@dataclass(frozen=True)
class DraftSettings:
    """The head's size. Zero means the target's own."""

    vocab_size: int = setting(0, help="draft vocabulary; 0: half the target's, at most 32,000", ge=0)
    d_ff: int = setting(0, help="width of the head's MLP; 0: the target's", ge=0)
    num_heads: int = setting(0, help="attention heads; 0: the target's", ge=0)
    num_kv_heads: int = setting(0, help="key/value heads; 0: the target's", ge=0)
    aux_layers: tuple[int, ...] = setting((), help="tapped target layers, 0-based; empty: 1, L//2-1, L-4")
    norm_output: bool = setting(False, help="EAGLE-3.1: hand the normed state to the next draft step")
    fc_norm: bool = setting(False, help="EAGLE-3.1: normalise each tapped state before fusing")
    export_dtype: Literal["bfloat16", "float32"] = setting("bfloat16", help="dtype of the exported weights")


@dataclass(frozen=True)
class TrainSettings:
    """The optimisation."""

    max_steps: int = setting(0, help="stop after this many steps; 0: no limit but max_minutes", ge=0)
    max_minutes: float = setting(240.0, help="stop after this much time, evaluation included; 0: no limit", ge=0)
    batch_size: int = setting(8, help="rows per step", ge=1)
    seq_len: int = setting(256, help="tokens per row; conversations are packed into rows", ge=8)
    rollout: int = setting(4, help="training-time-test steps", ge=1, le=8)
    rollout_decay: float = setting(0.8, help="weight of rollout step k is this to the power k", gt=0, le=1)
    optimizer: Literal["adamw", "muon"] = setting("adamw", help="muon orthogonalises the matrices' updates")
    lr: float = setting(8e-4, help="peak learning rate", gt=0)
    muon_lr: float = setting(0.01, help="peak learning rate of the matrices under muon", gt=0)
    warmup_share: float = setting(0.03, help="share of the run spent warming up", ge=0, lt=1)
    weight_decay: float = setting(0.0, help="decoupled weight decay", ge=0)
    clip: float = setting(0.5, help="gradient norm limit", gt=0)
    log_every: int = setting(10, help="steps between logged metrics", ge=1)
    eval_every: int = setting(200, help="steps between measurements of the acceptance; 0: only at the end", ge=0)
    save_every: int = setting(500, help="steps between saved states; 0: only at the end", ge=0)
    seed: int = setting(0, help="seed of initialisation and data order", ge=0)
    resume: bool = setting(False, help="go on from the state in the output folder")


@dataclass(frozen=True)
class TrainRun:
    """Everything that `specserve train` can be told."""

    target: str = setting("pydoc", help="preset, Hugging Face folder or hub id")
    quantization: Literal["none", "stored", "int8", "fp8"] = setting(
        "none", help="8-bit weights of the target, as it will be served (see serve)"
    )
    mesh: str = setting(
        "", help="devices to spread the target over, by axis, such as tensor=4,expert=1; empty: one device (see serve)"
    )
    check_weights: bool = setting(False, help="refuse a target with weights that are not numbers (reads them all)")
    output: str = setting("ckpt", help="folder for the head, its state and its metrics")
    speculation: str = setting("chain:3", help="how acceptance is measured while training")
    data: DataSettings = field(default_factory=DataSettings)
    draft: DraftSettings = field(default_factory=DraftSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
