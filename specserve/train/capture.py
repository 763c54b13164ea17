"""Captured hidden states on disk (`--capture`): a target's `Features` of every training row, as a folder of safetensors
files with a manifest that names the target, the data and the draft vocabulary.

A file holds the same number of rows of the data, in order, and is there whole or not at all; so an interrupted capture
goes on where it was, and a file is read by row through the operating system's own cache.
"""

import dataclasses
import functools
import hashlib
import logging
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from specserve import provenance
from specserve.checkpoints.load import Target, load_target
from specserve.checkpoints.tensors import SINGLE_FILE, TensorFolder, listed, read_json, write_json, write_tensors
from specserve.data.loader import Loader
from specserve.data.packing import PackedRows
from specserve.drafters.interface import TrainedDrafter
from specserve.drafters.learning import Rows
from specserve.errors import CheckpointError, ConfigError
from specserve.mesh import default_dtype, on_mesh, whole
from specserve.models.config import ModelConfig
from specserve.speculative.vocab import DraftVocab
from specserve.train.features import Features, Format, TopK, bytes_per_position, make_features, states_of_rows
from specserve.train.settings import CaptureSettings
from specserve.train.step import place_rows

logger = logging.getLogger(__name__)

MANIFEST_FILE = "manifest.json"
SHARD_BYTES = 1 << 28
VERSION = 2
DIGEST = "digest"  # of each row, beside its arrays

OnRows = Callable[[int, int], None]  # hears how many rows are captured, of how many that were missing


@dataclass(frozen=True)
class Manifest:
    """The manifest of a folder of features: which target, data and draft vocabulary they are of, and their format."""

    version: int
    target: str  # its fingerprint
    quantization: str  # of its weights
    aux_layers: tuple[int, ...]
    draft_vocab: str  # digest of the draft vocabulary's token ids
    data: int  # digest of the rows
    num_rows: int
    seq_len: int
    rows_per_file: int
    format: Format
    top_k: int

    @property
    def num_files(self) -> int:
        return -(-self.num_rows // self.rows_per_file)


class FeatureFolder:
    """The captured features on disk, which are read by the number of a row of the data."""

    needs_head = False

    def __init__(self, folder: Path, manifest: Manifest, taps: tuple[int, ...]) -> None:
        """Open the folder for a run that reads these taps, which are among the manifest's. Raises CheckpointError when
        it cannot be written, or holds the features of another target, of other data, taps or draft vocabulary, or in
        another format."""
        self.folder, self.manifest = folder, manifest
        self._taps = [manifest.aux_layers.index(layer) for layer in taps]
        path = folder / MANIFEST_FILE
        stated = {**dataclasses.asdict(manifest), "aux_layers": list(manifest.aux_layers)}
        if path.is_file():
            found = read_json(path)
            other = [
                f"{key} is {found.get(key)}, this run has {stated.get(key)}"
                for key in dict.fromkeys([*stated, *found])
                if found.get(key) != stated.get(key)
            ]
            if other:
                raise CheckpointError(
                    f"{path}: the features captured there are not those of this run: {listed(other)}. Give another "
                    "--capture, or run with the target, data and settings they were captured with"
                )
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise CheckpointError(f"{folder}: not empty, and without {MANIFEST_FILE}; give another --capture")
            write_json(path, stated)
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be written ({error}); give another --capture") from error

    def missing(self) -> list[int]:
        """The numbers of the files that are not there yet."""
        return [i for i in range(self.manifest.num_files) if not (self._folder_of(i) / SINGLE_FILE).is_file()]

    def rows_of(self, number: int) -> range:
        """The numbers of the rows of the data that a file holds."""
        begin = number * self.manifest.rows_per_file
        return range(begin, min(begin + self.manifest.rows_per_file, self.manifest.num_rows))

    def write(self, number: int, features: Features) -> None:
        """Write one file, whole. Raises CheckpointError when that fails, which leaves the other files as they are."""
        folder = self._folder_of(number)
        arrays = {name: np.asarray(array) for name, array in _arrays(features).items()}
        arrays["codes"] = arrays["codes"].view(np.uint8)
        num_rows = len(arrays["codes"])
        digests = [_digest({name: array[row : row + 1] for name, array in arrays.items()}) for row in range(num_rows)]
        arrays[DIGEST] = np.array(digests, np.uint32)
        try:
            folder.mkdir(exist_ok=True)
            write_tensors(folder / SINGLE_FILE, arrays)
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be written ({error}); make room, and run again") from error

    def read(self, row_ids: Sequence[int] | np.ndarray) -> Features:
        """The features of these rows, in this order, as numpy arrays. Raises CheckpointError when a file is missing or
        a row is damaged."""
        found: list[dict[str, np.ndarray]] = []
        for row in map(int, row_ids):
            number, place = divmod(row, self.manifest.rows_per_file)
            tensors = self._open(number)
            read = {name: tensors.read(name, (slice(place, place + 1),)) for name in tensors.names()}
            if [_digest({name: read[name] for name in read.keys() - {DIGEST}})] != read.pop(DIGEST).tolist():
                where = self._folder_of(number)
                raise CheckpointError(
                    f"{where}: row {row} is damaged, its digest is another one; delete {where} and run again, which "
                    "captures its rows anew"
                )
            found.append(read)
        arrays: dict[str, Any] = {name: np.concatenate([each[name] for each in found]) for name in found[0]}
        arrays |= {name: arrays[name][:, :, self._taps] for name in ("codes", "scale")}
        dtype = {"int8": np.int8, "int4": np.uint8, "fp8": ml_dtypes.float8_e4m3fn}[self.manifest.format]
        codes, scale = arrays.pop("codes").view(dtype), arrays.pop("scale")
        return Features(codes, scale, TopK(**arrays), self.manifest.format)

    def next_features(self, loader: Loader) -> Features:
        """The features of the rows that the loader hands out next, see `read`."""
        return self.read(loader.peek().row_ids)

    def close(self) -> None:
        """Close the files, which are opened again when they are read."""
        self._open.cache_clear()

    @functools.cache  # noqa: B019  as long as the folder is
    def _open(self, number: int) -> TensorFolder:
        return TensorFolder(self._folder_of(number))

    def _folder_of(self, number: int) -> Path:
        return self.folder / f"{number:05}"


def open_features(
    settings: CaptureSettings,
    target: Target,
    quantization: str,  # of the target's weights
    drafter: TrainedDrafter,
    rows: PackedRows,
    data: int,  # digest of the rows
    ids: np.ndarray,  # [draft_vocab] the draft vocabulary
) -> FeatureFolder:
    """The features that a run trains from, complete or not. Raises ConfigError or CheckpointError."""
    if settings.capture_top_k > len(ids):
        raise ConfigError(
            f"features.capture_top_k is {settings.capture_top_k}, the draft vocabulary has {len(ids)} tokens"
        )
    layers, num_layers = _layers(settings, drafter), target.config.num_layers
    if wrong := [layer for layer in layers if not 0 <= layer < num_layers]:
        raise ConfigError(f"features.capture_layers: the target has layers 0 to {num_layers - 1}, and no {wrong}")
    per_position, plain = bytes_per_position(
        target.config, len(layers), len(ids), settings.capture_format, settings.capture_top_k
    )
    seq_len = rows.token_ids.shape[1]
    manifest = Manifest(
        version=VERSION,
        target=provenance.fingerprint(target.folder),
        quantization=quantization,
        aux_layers=layers,
        draft_vocab=hashlib.sha256(np.asarray(ids, np.int32).tobytes()).hexdigest()[:16],
        data=data,
        num_rows=len(rows),
        seq_len=seq_len,
        rows_per_file=max(1, SHARD_BYTES // (per_position * seq_len)),
        format=settings.capture_format,
        top_k=settings.capture_top_k,
    )
    features = FeatureFolder(Path(settings.capture), manifest, drafter.aux_layers)
    logger.info(
        "%s: %.1f GB for %d positions, %d bytes each, %.2f times smaller than their states in bfloat16",
        *(
            settings.capture,
            per_position * seq_len * len(rows) / 1e9,
            len(rows) * seq_len,
            per_position,
            plain / per_position,
        ),
    )
    return features


def captured_layers(settings: CaptureSettings, drafter: TrainedDrafter) -> tuple[int, ...]:
    """Return the layers of the target whose states a run captures: the drafter's taps, and those that are asked for."""
    return drafter.aux_layers + tuple(sorted({*settings.capture_layers} - {*drafter.aux_layers}))


def _layers(settings: CaptureSettings, drafter: TrainedDrafter) -> tuple[int, ...]:
    """Return the layers of the folder that is there, if all that this run captures are among them, else the run's."""
    layers, path = captured_layers(settings, drafter), Path(settings.capture) / MANIFEST_FILE
    there = read_json(path).get("aux_layers") if path.is_file() else None
    if isinstance(there, list) and all(layer in there for layer in layers):
        return tuple(there)
    return layers


def capture(
    features: FeatureFolder,
    make_capturer: Callable[[], "Capturer"],
    on_rows: OnRows = lambda _done, _total: None,
) -> None:
    """Capture the files that are missing. The target is loaded for that, and its memory is free again afterwards."""
    missing = features.missing()
    if not missing:
        return
    if jax.process_count() > 1:
        raise ConfigError(
            f"{features.folder}: a run of several processes trains from features; capture them before (specserve data "
            "capture, with --ray by many)"
        )
    num_rows, total = 0, sum(len(features.rows_of(number)) for number in missing)
    on_rows(num_rows, total)
    capturer = make_capturer()
    begin = time.monotonic()
    for done, number in enumerate(missing):
        capturer.write(number, lambda here, before=num_rows: on_rows(before + here, total))
        num_rows += len(features.rows_of(number))
        log_time_left(features, number, done + 1, len(missing), begin)


def log_time_left(features: FeatureFolder, number: int, done: int, total: int, begin: float) -> None:
    """Log that a file is there, and how long the others will take."""
    left = (time.monotonic() - begin) / done * (total - done) / 60
    logger.info("captured file %d of %d, about %.0f minutes left", number + 1, features.manifest.num_files, left)


class Capturer:
    """A loaded target that writes files of features."""

    def __init__(
        self,
        features: FeatureFolder,
        folder: Path,  # of the target
        rows: PackedRows,
        ids: np.ndarray,  # [draft_vocab] the draft vocabulary
        *,
        batch_size: int,
        is_checked: bool,  # all weights of the target are numbers
        mesh: Mesh | None,
    ) -> None:
        """Load the target. Raises CheckpointError."""
        self._features, self._rows, self._size, self._mesh = features, rows, batch_size, mesh
        quantization: Any = features.manifest.quantization
        self._target = load_target(
            folder, dtype=default_dtype(), quantization=quantization, mesh=mesh, is_checked=is_checked, is_looped=True
        )
        self._run = make_capture(features.manifest, self._target.config, mesh)
        self._vocab = jax.device_put(DraftVocab(jnp.asarray(ids)), whole(mesh))

    def write(self, number: int, on_rows: Callable[[int], None] = lambda _done: None) -> None:
        """Write one file. `on_rows` hears how many of its rows are captured. Raises CheckpointError."""
        which, rows, found = self._features.rows_of(number), self._rows, []
        for begin in range(which.start, which.stop, self._size):
            at = np.minimum(np.arange(begin, begin + self._size), which.stop - 1)  # the last batch is filled up
            arrays = rows.token_ids[at], rows.loss_mask[at], rows.document_ids[at], rows.position_ids[at]
            batch = Rows(*jax.device_put(arrays, place_rows(self._mesh, arrays[0].shape)))
            found.append(jax.device_get(self._run(self._target.params, self._vocab, batch)))
            on_rows(min(begin + self._size, which.stop) - which.start)
        self._features.write(number, jax.tree.map(lambda *parts: np.concatenate(parts)[: len(which)], *found))


def make_capture(manifest: Manifest, config: ModelConfig, mesh: Mesh | None = None) -> Any:
    """Return the jitted program that captures: (target's parameters, draft vocabulary, rows) -> Features."""

    def run(params: Any, vocab: DraftVocab, rows: Rows) -> Features:
        states = states_of_rows(params, config, rows, manifest.aux_layers)
        return make_features(params, config, vocab, *states, manifest.format, manifest.top_k)

    return jax.jit(on_mesh(mesh, run), out_shardings=whole(mesh))


def _digest(row: Mapping[str, np.ndarray]) -> int:
    """Return a checksum of a row's arrays. It finds damage, not intent, and must not slow reading down."""
    return functools.reduce(lambda sum_so_far, name: zlib.crc32(row[name].tobytes(), sum_so_far), sorted(row), 0)


def _arrays(features: Features) -> dict[str, Any]:
    teacher = {field.name: getattr(features.teacher, field.name) for field in dataclasses.fields(TopK)}
    return {"codes": features.codes, "scale": features.scale, **teacher}
