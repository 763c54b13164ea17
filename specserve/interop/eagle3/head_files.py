"""The files of a head under examination, and what can be read from them."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from specserve.checkpoints.load import Target
from specserve.checkpoints.tensors import CONFIG
from specserve.drafters.eagle3.config import Eagle3Config
from specserve.drafters.eagle3.model import draft_spec
from specserve.errors import ConfigError
from specserve.interop.eagle3 import dialects
from specserve.interop.examined import ExaminedFiles
from specserve.interop.findings import Dialect
from specserve.interop.published import D2T, T2D, Vocabulary, is_eps, read_vocab
from specserve.models.params import ParamSpec, specs
from specserve.models.rope import Rope, rope_from_hf


class EagleFiles(ExaminedFiles):
    """The files of a head on this network."""

    architectures: ClassVar[Mapping[Dialect, str]] = dialects.ARCHITECTURES  # the name of its kind in each layout
    known: ClassVar[frozenset[str]] = dialects.KNOWN  # names that engines know its kind by
    renamer = staticmethod(dialects.renamer)

    def __init__(self, folder: Path, target: Target | None) -> None:
        super().__init__(folder, target)
        self.flat = dialects.flat_config(self.raw)

    @property
    def dialect(self) -> Dialect:
        return dialects.dialect_of(self.raw, self.names)

    @cached_property
    def head_rows(self) -> int | None:
        name = self.rename("lm_head.weight")
        return self.tensors.shape(name)[0] if name in self.names and self.tensors.shape(name) else None

    @cached_property
    def num_layers(self) -> int:
        """The number of layers that there are tensors of."""
        return dialects.count_layers(self.names)

    @cached_property
    def bad_keys(self) -> list[str]:
        """The keys that the shapes follow from, and that are wrong. The size of the vocabulary is not among them,
        because it can be counted."""
        rows = self.flat.get("draft_vocab_size") or self.head_rows
        return dialects.bad_keys({**self.flat, "draft_vocab_size": rows, "num_hidden_layers": self.num_layers})

    @cached_property
    def taps(self) -> tuple[int, ...]:
        """Layers whose outputs the written ids mean; empty where they are the default."""
        shift = 0 if self.dialect == "sglang" else 1
        return tuple(i - shift for i in dialects.tap_ids(self.raw))

    @cached_property
    def config(self) -> Eagle3Config | None:
        """The head's shape, with what is wrong set aside so that the rest can be checked; None: keys are lacking."""
        if self.bad_keys:
            return None
        raw = {**self.flat, "num_hidden_layers": self.num_layers}
        raw["draft_vocab_size"] = raw.get("draft_vocab_size") or self.head_rows
        raw["hidden_act"] = None
        if not is_eps(raw.get("rms_norm_eps", 1e-6)):
            raw["rms_norm_eps"] = 1e-6
        if self.rope is None:
            raw |= {"rope_theta": None, "rope_scaling": None, "rope_parameters": {"rope_theta": 10_000.0}}
        target = self.target.config if self.target else None
        if target and (any(not 0 <= i < target.num_layers for i in self.taps) or target.num_layers < 5):
            target = None
        return dialects.draft_config_from_hf(raw, target, self.names, dtype="float32", where=CONFIG)

    @cached_property
    def ropes(self) -> dict[str, Rope | None]:
        """The rotary settings by each spelling that is there; None for one that cannot be read."""
        spellings = {"rope_parameters": ("rope_parameters",), "rope_theta": ("rope_theta", "rope_scaling")}
        other = {"rope_parameters": "rope_scaling", "rope_theta": "rope_parameters"}
        return {
            name: read_rope({key: value for key, value in self.flat.items() if key != other[name]})
            for name, keys in spellings.items()
            if any(self.flat.get(key) is not None for key in keys)
        }

    @cached_property
    def rope(self) -> Rope | None:
        """The rotary settings as our own loader reads them."""
        return read_rope(self.flat)

    @cached_property
    def vocab(self) -> Vocabulary | None:
        if self.config is None:
            return None
        return read_vocab(self.table(D2T), self.table(T2D), self.config.draft_vocab_size, self.config.vocab_size)

    def specs(self, config: Eagle3Config) -> list[ParamSpec]:
        """Return the parameters that a head of this shape has."""
        return specs(draft_spec(config))

    def facts(self) -> dict[str, str]:
        facts = {"layout": self.dialect + (" (sglang-jax reads the same)" if self.dialect == "sglang" else "")}
        if self.config is None:
            return facts
        config, vocab = self.config, self.vocab
        ids = dialects.tap_ids(self.raw)
        named = "inputs of layers" if self.dialect != "sglang" else "outputs of layers"
        known = self.target is not None and self.target.config.num_layers >= 5
        default = f"the default: outputs of layers {config.aux_layers}" if known else "the default"
        reading = {
            "offset": "d2t holds offsets",
            "absolute": "d2t holds absolute ids",
            "identity": "no d2t: every token",
            "mask": "no d2t: as t2d says",
            "unsound": "d2t makes no sense",
        }
        flags = [flag for flag in dialects.FLAGS if getattr(config, flag)]
        return facts | {
            "layers": str(config.num_layers),
            "width": f"{config.d_model}, MLP {config.d_ff}, {config.num_heads} heads of {config.head_dim} "
            f"({config.num_kv_heads} KV), target {config.target_d_model}",
            "vocabulary": f"{config.draft_vocab_size:,} of {config.vocab_size:,}"
            + (f"; {reading[vocab.reading]}" if vocab else ""),
            "taps": f"{named} {tuple(ids)}" if ids else default,
            "flags": ", ".join(flags) or "none: plain EAGLE-3",
            "rope": f"{config.rope.kind}, theta {config.rope.theta:g}, up to {config.max_len:,} positions",
            "embedding": "its own" if config.has_embedding else "the target's",
        }


def read_rope(raw: Mapping[str, Any]) -> Rope | None:
    """Read the rotary settings of a config.json; None where they make no sense."""
    try:
        return rope_from_hf(raw, CONFIG)
    except (ConfigError, AttributeError, TypeError, ValueError):
        return None
