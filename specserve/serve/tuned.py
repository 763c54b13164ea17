"""Profiles: the best way to speculate for each batch size, as `specserve tune` has found it for one target and head on
one kind of machine, and as `serve --speculation tuned` reads it.

A profile is a JSON file. Its `facts` say what it holds for; whatever they say is compared when a server reads it, and a
profile of anything else is refused.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from specserve import host
from specserve.drafters.speculation import describe, parse_speculation
from specserve.errors import ConfigError
from specserve.speculative.tree import Tree

VERSION = 1


@dataclass(frozen=True)
class Entry:
    """The best way to speculate at one batch size. Gains are in tokens per second, over plain decoding."""

    batch_size: int
    speculation: str  # as `parse_speculation` reads it; "off" where nothing is faster than plain decoding
    tau: float  # as replayed
    plain_ms: float  # of a plain step
    step_ms: float  # of a step over this tree
    predicted_gain: float  # tokens of a step over its cost in plain steps
    measured_gain: float | None = None  # of a live run, both arms taking turns; None: there was none
    measured_tau: float | None = None  # of the live run, its plain steps included

    @property
    def tree(self) -> Tree | None:
        """The tree, or None for plain decoding. Raises ConfigError where the text describes none."""
        return parse_speculation(self.speculation)


@dataclass(frozen=True)
class Profile:
    """The best way to speculate by batch size, the smallest first."""

    facts: Mapping[str, str]  # what it holds for, see `facts_of`
    entries: tuple[Entry, ...]
    details: Mapping[str, Any] = field(default_factory=dict)  # for people: names, settings, all trees, provenance

    @property
    def pays_at(self) -> tuple[int, ...]:
        """The measured batch sizes at which speculation is faster than plain decoding."""
        return tuple(entry.batch_size for entry in self.entries if entry.speculation != "off")

    def to_json(self) -> dict[str, Any]:
        return {
            "specserve_profile": VERSION,
            "facts": dict(self.facts),
            "pays_at": list(self.pays_at),
            "batch_sizes": {str(entry.batch_size): _without_size(entry) for entry in self.entries},
            **self.details,
        }

    def write(self, file: Path) -> None:
        """Write the file, whole. Raises ConfigError where that cannot be done."""
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            host.write_whole(file, (json.dumps(self.to_json(), indent=2) + "\n").encode())
        except OSError as error:
            raise ConfigError(f"{file}: the profile cannot be written: {error.strerror}") from error


def _without_size(entry: Entry) -> dict[str, Any]:
    return {name: value for name, value in vars(entry).items() if name != "batch_size"}


def read_profile(file: Path) -> Profile:
    """Read a profile. Raises ConfigError where it is missing, damaged, or not one."""
    try:
        raw = json.loads(file.read_text())
        if raw["specserve_profile"] != VERSION:
            raise ConfigError(f"{file}: its version is {raw['specserve_profile']}, expected {VERSION}; tune again")
        entries = tuple(Entry(batch_size=int(size), **found) for size, found in raw["batch_sizes"].items())
        facts = {str(name): str(value) for name, value in raw["facts"].items()}
        is_sound = all(math.isfinite(entry.tau) and describe(entry.tree) == entry.speculation for entry in entries)
        if not entries or [entry.batch_size for entry in entries] != sorted({e.batch_size for e in entries}):
            raise ValueError("it needs batch sizes, the smallest first")
        if not is_sound:
            raise ValueError("a tau that is no number, or a tree that is not spelled as it is here")
    except FileNotFoundError:
        raise ConfigError(f"{file}: there is no such profile; `specserve tune` makes one") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file}: not a profile of `specserve tune` ({type(error).__name__}: {error})") from error
    known = {"specserve_profile", "facts", "pays_at", "batch_sizes"}
    return Profile(facts, entries, {name: value for name, value in raw.items() if name not in known})


def machine_facts() -> dict[str, str]:
    """The facts of a profile that are those of the machine."""
    return {
        "device": jax.devices()[0].device_kind,
        "processor": hashlib.sha256(host.processor().encode()).hexdigest()[:12],
        "cores": str(host.num_cores()),
    }
