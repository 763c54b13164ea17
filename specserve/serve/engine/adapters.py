"""The LoRA adapters of an engine: which has which place in the arrays of the programs, and which requests use it.

An adapter that is unloaded is found by no request any more. Those that have been taken go on with it to their end, and
until then nobody else gets its place.
"""

import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from specserve.errors import ConfigError, RequestError, first_line
from specserve.serve.engine.changes import Changes
from specserve.serve.engine.interface import DraftInfo
from specserve.serve.engine.rounds import Rounds
from specserve.serve.engine.swap import Swaps

if TYPE_CHECKING:
    from specserve.models.adapters import Adapter

logger = logging.getLogger(__name__)

_OWN = "lora "  # how the salts of adapters' requests begin


@dataclass(frozen=True)
class Lora:
    """An adapter in its place."""

    name: str
    folder: str
    fingerprint: str  # of its files
    place: int
    number: int  # no two that an engine has loaded have the same, whatever their names

    def salted(self, salt: str) -> str:
        """Return the salt of the prefixes of its requests of this salt: nobody else's hit them."""
        return f"{_OWN}{self.number}\n{salt}"


@dataclass(frozen=True)
class ServedLoras:
    """The adapters that an engine begins with, by name, whose arrays its runner has in this order; and the functions
    that read others from a folder, and the fingerprint of its files."""

    folders: Mapping[str, str]
    adapters: Sequence["Adapter"]
    read: "Callable[[str], Adapter]"
    fingerprint: Callable[[str], str]


class Loras:
    """The adapters of one engine. Every method may be called from any thread."""

    def __init__(self, served: ServedLoras, model_name: str, rounds: Rounds, changes: Changes, swaps: Swaps) -> None:
        self._read, self._fingerprint, self._model_name = served.read, served.fingerprint, model_name
        self._rounds, self._changes, self._swaps = rounds, changes, swaps
        self._numbers, self._lock = itertools.count(), threading.Lock()
        self._users: Counter[int] = Counter()  # requests that have not ended, by place
        self._adapters: dict[int, Adapter] = dict(enumerate(served.adapters))  # by place
        self._loras: dict[str, Lora] = {}
        for place, (name, folder) in enumerate(served.folders.items()):
            self._loras[name] = self._made(self._new_name(name), folder, place)
        self.follow(swaps.weights.info)

    @property
    def roots(self) -> Mapping[str, str]:
        """The names of the folders of the adapters that requests find, by the adapters' names."""
        with self._lock:
            return {name: Path(lora.folder).name for name, lora in self._loras.items()}

    def follow(self, head: DraftInfo | None) -> None:
        """Take note of the head that drafts. One that follows an adapter is warned of where other files are served
        under that adapter's name, or from its folder."""
        with self._lock:
            self._head, loras = head, [*self._loras.values()]
        for lora in loras:
            self._compare(lora)

    def _compare(self, lora: Lora) -> None:
        head = self._head
        if head is None or not head.lora or lora.fingerprint == head.lora_fingerprint:
            return
        own = Path(head.lora).absolute()
        if lora.name == own.name or Path(lora.folder).expanduser().absolute() == own:
            logger.warning(
                "the head %s follows the LoRA adapter %s (%s), and %s is served from %s (%s): its acceptance of %s may "
                "be lower; serve the adapter that it follows, or train a head for this one",
                *(head.name, head.lora, head.lora_fingerprint, lora.name, lora.folder, lora.fingerprint, lora.name),
            )

    def _made(self, name: str, folder: str, place: int) -> Lora:
        return Lora(name, folder, self._fingerprint(folder), place, next(self._numbers))

    def take(self, name: str) -> Lora:
        """Return an adapter, and count a request that uses it. Raises RequestError where there is none."""
        with self._lock:
            lora = self._loras.get(name)
            if lora is None:
                known = ", ".join(self._loras) or "none"
                raise RequestError(f"there is no LoRA adapter {name[:200]!r}; loaded are: {known}", param="lora")
            self._users[lora.place] += 1
            return lora

    def plain_salt(self, salt: str) -> str:
        """Return the salt of requests without an adapter: it stays, unless it could be taken for an adapter's."""
        return f"{_OWN}-1\n{salt}" if salt.startswith(_OWN) else salt

    def give_back(self, place: int) -> None:
        """Count one request less of the adapter in a place: it has ended."""
        with self._lock:
            self._users[place] -= 1

    def load(self, name: str, folder: str) -> None:
        """Read the adapter in a folder, and return when requests find it by this name. Nothing is compiled. Raises
        ConfigError or CheckpointError where anything is wrong with it, and then nothing has changed; CapacityError
        when the engine stops meanwhile."""
        with self._swaps.alone():
            self._swaps.check_awake()
            with self._lock:
                self._new_name(name)
                place = self._free_place()
            adapter, runner, made = self._read(folder), self._rounds.runner, self._made(name, folder, place)
            with self._lock:
                in_use = self._in_use()
            every = {number: own for number, own in self._adapters.items() if number in in_use} | {place: adapter}
            try:
                layouts = runner.with_adapters([every.get(number) for number in range(runner.shapes.max_loras)])
                jax.block_until_ready(layouts.distinct)
            except jax.errors.JaxRuntimeError as error:
                raise ConfigError(f"the adapter cannot be brought to the device: {first_line(error)}") from error
            self._changes.ask(lambda: self._rounds.runner.use(layouts))
            with self._lock:
                self._adapters = every
                self._loras[name] = made
        logger.info("the LoRA adapter %s is loaded from %s", name, folder)
        self._compare(made)

    def unload(self, name: str) -> None:
        """Let no more requests find an adapter. Those that use it go on. Raises ConfigError where there is none of that
        name."""
        with self._lock:
            if self._loras.pop(name, None) is None:
                raise ConfigError(f"there is no LoRA adapter {name[:200]!r}; loaded are: {', '.join(self._loras)}")
        logger.info("the LoRA adapter %s is unloaded", name)

    def _new_name(self, name: str) -> str:
        if not name or name == self._model_name or "," in name or name.split() != [name]:  # metrics list them by commas
            raise ConfigError(
                f"a LoRA adapter cannot be named {name!r}; the target is {self._model_name!r}, and no name has a comma "
                "or a space"
            )
        if name in self._loras:
            raise ConfigError(
                f"the LoRA adapter {name[:200]!r} is loaded already; unload it first, or take another name"
            )
        return name

    def _in_use(self) -> set[int]:
        return {lora.place for lora in self._loras.values()} | {place for place, n in self._users.items() if n}

    def _free_place(self) -> int:
        in_use, number = self._in_use(), self._rounds.runner.shapes.max_loras
        place = next((place for place in range(number) if place not in in_use), None)
        if place is None:
            takers = [*self._loras]
            if len(takers) < number:
                takers.append("requests that go on with adapters that were unloaded")
            raise ConfigError(f"all {number} places of --max-loras are taken, by {', '.join(takers)}; unload one")
        return place
