"""The kinds of heads: how one is made, and how it lies on disk, in our own layout and in those of other engines."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from jax.sharding import Mesh

from specserve.checkpoints.load import Target
from specserve.drafters.door import Head, TrainedDrafter
from specserve.drafters.settings import DraftSettings
from specserve.drafters.words import Dialect
from specserve.interop.findings import DoctorReport, Repair
from specserve.models.config import ModelConfig


class Kind(Protocol):
    """A kind of drafter: how it is made, and its files."""

    def suits(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Settings of training by dotted name that suit it better than the target's recipe does, beside those that the
        user has given."""
        ...

    @property
    def understands(self) -> frozenset[str]:
        """Return the `DraftSettings` that have a meaning for it, beside those that every kind has
        (`settings.COMMON`)."""
        ...

    def is_named(self, raw: Mapping[str, Any]) -> bool:
        """Return whether a config.json is of a head of this kind."""
        ...

    def new(self, settings: DraftSettings, target: ModelConfig, draft_vocab_size: int) -> TrainedDrafter:
        """Make a drafter of the shape that the settings ask for, and of the target's where they say nothing. Raises
        ConfigError."""
        ...

    def read(self, folder: Path, target: ModelConfig, target_name: str, *, dtype: str) -> TrainedDrafter:
        """Read the shape of a head from its files, without its weights. Raises ConfigError or CheckpointError, also
        where it belongs to another target."""
        ...

    def load(self, folder: Path, target: Target, *, dtype: str, mesh: Mesh | None) -> Head:
        """A head in any dialect. Raises as `read` does."""
        ...

    def files(
        self, head: Head, target: Target, *, dtype: str, dialect: Dialect, target_name: str
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The tensors and the config.json of a head in a dialect. Raises CheckpointError."""
        ...

    def unknown_to(self, dialect: Dialect, drafter: TrainedDrafter) -> list[str]:
        """List the properties of a head that the engine of a dialect does not compute."""
        ...

    def has_own_embedding(self, folder: Path) -> bool:
        """Return whether a head brings a token embedding along."""
        ...

    def without_copies(self, head: Head, target: Target, dtype: str) -> tuple[Head, list[str]]:
        """Return the head without the tensors that are the target's own, and a line for each of these."""
        ...

    def repairs(self, folder: Path, target: Target) -> list[Repair]:
        """List other readings of a head's files, which are tried by running the head."""
        ...

    def examine(self, folder: Path, target: Target | None) -> DoctorReport:
        """Check a head's files. Raises CheckpointError where there is nothing to look at."""
        ...


class HeadFiles(Protocol):
    """A module that reads and writes the files of heads; `Kind` says what its functions are for. Parameters come with
    the config of their drafter, and `target_ids` [draft_vocab] int32 with them."""

    def read_config(self, folder: Path, target: ModelConfig, target_name: str, /, *, dtype: str) -> Any: ...

    def load(
        self, folder: Path, target: Target, /, *, dtype: str, mesh: Mesh | None
    ) -> tuple[Any, Any, np.ndarray]: ...

    def head_files(
        self,
        config: Any,
        params: Any,
        target_ids: np.ndarray,
        target: Target,
        /,
        *,
        dtype: str,
        dialect: Dialect,
        target_name: str,
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]: ...

    def has_own_embedding(self, folder: Path, /) -> bool: ...

    def without_copies(self, config: Any, params: Any, target: Target, dtype: str, /) -> tuple[Any, Any, list[str]]: ...


class Configured(TrainedDrafter, Protocol):
    """A drafter that is made of its config alone."""

    def __init__(self, config: Any) -> None: ...

    @property
    def config(self) -> Any: ...


Own = TypeVar("Own", bound=Configured)


class FileKind(Generic[Own]):
    """The part of a `Kind` that is about files, where its drafters are made of a config alone."""

    def __init__(
        self,
        drafter: type[Own],
        files: HeadFiles,
        examine: Callable[[Path, Target | None], DoctorReport],
        list_repairs: Callable[[Path, Target], Iterable[Repair]],
        unknown_to: Callable[[Dialect, Any], list[str]],  # with the config of a drafter
    ) -> None:
        self._drafter, self._files = drafter, files
        self._examine, self._list_repairs, self._unknown_to = examine, list_repairs, unknown_to

    def own(self, drafter: TrainedDrafter) -> Own:
        """A drafter of this kind."""
        assert isinstance(drafter, self._drafter), f"a head of another kind: {drafter.name}"
        return drafter

    def read(self, folder: Path, target: ModelConfig, target_name: str, *, dtype: str) -> Own:
        return self._drafter(self._files.read_config(folder, target, target_name, dtype=dtype))

    def load(self, folder: Path, target: Target, *, dtype: str, mesh: Mesh | None) -> Head:
        config, params, target_ids = self._files.load(folder, target, dtype=dtype, mesh=mesh)
        return Head(self._drafter(config), params, target_ids)

    def files(
        self, head: Head, target: Target, *, dtype: str, dialect: Dialect, target_name: str
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        parts = self.own(head.drafter).config, head.params, head.target_ids
        return self._files.head_files(*parts, target, dtype=dtype, dialect=dialect, target_name=target_name)

    def has_own_embedding(self, folder: Path) -> bool:
        return self._files.has_own_embedding(folder)

    def without_copies(self, head: Head, target: Target, dtype: str) -> tuple[Head, list[str]]:
        config = self.own(head.drafter).config
        config, params, changes = self._files.without_copies(config, head.params, target, dtype)
        return Head(self._drafter(config), params, head.target_ids), changes

    def unknown_to(self, dialect: Dialect, drafter: TrainedDrafter) -> list[str]:
        return self._unknown_to(dialect, self.own(drafter).config)

    def repairs(self, folder: Path, target: Target) -> list[Repair]:
        return list(self._list_repairs(folder, target))

    def examine(self, folder: Path, target: Target | None) -> DoctorReport:
        return self._examine(folder, target)
