"""Captured hidden states: what is kept is what the codes allow, files are whose they say they are, and training from
them is training with the target but for the stated error."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import Mesh
from rounding import UNIT, assert_same
from tiny_run import make_learner, noise_of, tiny_run

from specserve.checkpoints.load import Target, load_target
from specserve.checkpoints.tensors import SINGLE_FILE
from specserve.data.documents import Document
from specserve.data.loader import Loader
from specserve.data.packing import PackedRows, pack
from specserve.drafters.eagle3.drafter import Eagle3
from specserve.errors import CheckpointError, ConfigError
from specserve.mesh import make_mesh
from specserve.models.config import ModelConfig
from specserve.speculative.vocab import DraftVocab
from specserve.train import capture
from specserve.train.capture import Capturer, FeatureFolder, open_features
from specserve.train.features import Format, TopK, bytes_per_position, decode, encode, unpack
from specserve.train.features import pack as pack_codes
from specserve.train.head import new_drafter
from specserve.train.learner import TrainingData
from specserve.train.run.folder import RunFolder
from specserve.train.settings import CaptureSettings, TrainRun
from specserve.train.trainer import Trainer

FORMATS: tuple[Format, ...] = ("int8", "int4", "fp8")
IDS = np.arange(8, 56, dtype=np.int32)


@pytest.fixture(scope="module", autouse=True)
def _optax_promotes() -> Iterator[None]:
    """Strict promotion is for our own code; optax raises a Python float to an int32 power."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def rows() -> PackedRows:
    rng = np.random.default_rng(0)
    return pack([Document(rng.integers(0, 64, 30).astype(np.int32), np.ones(30, bool)) for _ in range(14)], 32)


def _run(tmp_path: Path, how: Format = "int8", top_k: int = 20, **changes: Any) -> TrainRun:
    settings = CaptureSettings(capture=str(tmp_path / "features"), capture_format=how, capture_top_k=top_k)
    return tiny_run(tmp_path / "ckpt", features=settings, **changes)


def _open(run: TrainRun, target: Target, rows: PackedRows, ids: np.ndarray = IDS) -> FeatureFolder:
    drafter = new_drafter(run.drafter, run.draft, target.config, len(ids))
    digest = Loader(rows, 4, 0).state()["rows_digest"]
    return open_features(run.features, target, run.quantization, drafter, rows, digest, ids)


def _capture(
    run: TrainRun,
    target: Target,
    rows: PackedRows,
    mesh: Mesh | None = None,
    ids: np.ndarray = IDS,
    on_rows: capture.OnRows = lambda _done, _total: None,
) -> FeatureFolder:
    features = _open(run, target, rows, ids)
    sizes = {"batch_size": run.train.batch_size, "is_checked": run.check_weights, "mesh": mesh}
    capture.capture(features, lambda: Capturer(features, target.folder, rows, ids, **sizes), on_rows)
    assert not features.missing()
    return features


def _losses(
    run: TrainRun,
    target: Target,
    rows: PackedRows,
    features: FeatureFolder | None,
    mesh: Any = None,
    ids: np.ndarray = IDS,
) -> Any:
    """The loss of every step of a run."""
    data = TrainingData(Loader(rows, run.train.batch_size, run.train.seed), ids, 0.75)
    seen: list[float] = []
    trainer = Trainer(
        run, make_learner(run, target, data, features=features, mesh=mesh), {"target": "tiny"}, RunFolder(run)
    )
    if features:
        assert trainer.learner.target.params.layers == ()
        assert (trainer.learner.target.params.head is None) == (len(ids) < 64)  # or the draft's logits are made by it
    trainer.train([lambda progress: seen.append(progress.loss) if progress.loss is not None else None])
    return np.array(seen)


CAPTURES: dict[Format, int] = {"int8": 48, "int4": 48, "fp8": 20}  # and how many tokens are kept


@dataclasses.dataclass(frozen=True)
class Captured:
    run: TrainRun
    features: FeatureFolder


@pytest.fixture(scope="module")
def captured(
    tmp_path_factory: pytest.TempPathFactory, tiny_target: Target, rows: PackedRows
) -> Callable[[Format], Captured]:
    """What is captured in a format, once."""

    @functools.cache
    def of(how: Format) -> Captured:
        run = _run(tmp_path_factory.mktemp(how), how, CAPTURES[how])
        return Captured(run, _capture(run, tiny_target, rows))

    return of


def test_four_bits_come_back(rng: np.random.Generator) -> None:
    codes = rng.integers(-8, 8, (5, 3, 64)).astype(np.int8)
    packed = pack_codes(jnp.asarray(codes))
    assert packed.shape == (5, 3, 32)
    assert packed.dtype == jnp.uint8
    np.testing.assert_array_equal(unpack(packed), codes)


@pytest.mark.parametrize("how", FORMATS)
def test_a_state_is_off_by_half_a_step(rng: np.random.Generator, how: Format) -> None:
    states = rng.standard_normal((40, 64)).astype(np.float32) * 10.0 ** rng.uniform(-3, 3, (40, 1))
    states[7] = 0.0
    got = np.asarray(decode(*encode(jnp.asarray(states, jnp.float32), how), how))
    largest = np.abs(states).max(-1, keepdims=True)
    bound = {"int8": largest / 254, "int4": largest / 14, "fp8": np.abs(states) / 16 + largest / 448 / 1024}[how]
    assert (np.abs(got - states) <= bound + 3 * UNIT * np.abs(states)).all()  # the scale, the ratio, their product
    assert np.abs(got - states).max() > 0


def test_the_likeliest_tokens_are_exact_and_the_mass_is_kept(rng: np.random.Generator) -> None:
    p = rng.dirichlet(np.full(48, 0.3), 10).astype(np.float32) * 0.8
    order = np.argsort(-p, axis=-1)[:, :12]
    top = np.take_along_axis(p, order, axis=-1)
    is_drafted = rng.random(10) < 0.5
    teacher = TopK(*map(jnp.asarray, (order.astype(np.uint16), top, 0.8 - top.sum(-1), is_drafted)))
    config: Any = None
    got, best = teacher.distribution(config, config, DraftVocab(jnp.asarray(IDS)))
    np.testing.assert_array_equal(np.take_along_axis(np.asarray(got), order, axis=-1), top)
    np.testing.assert_allclose(np.asarray(got).sum(-1), 0.8, rtol=2 * 48 * UNIT)  # two sums of 48 positive numbers
    assert (np.asarray(got) > 0).all()
    np.testing.assert_array_equal(best, np.where(is_drafted, order[:, 0], -1))


@pytest.mark.parametrize(("how", "ratio"), [("int8", 2.5), ("fp8", 2.5), ("int4", 4.5)])
def test_features_are_that_much_smaller(
    captured: Callable[[Format], Captured], tiny_target: Target, rows: PackedRows, how: Format, ratio: float
) -> None:
    """Than taps and hidden state in bfloat16, with the default number of tokens; files are as large as is said."""
    top_k = CaptureSettings().capture_top_k
    for width in (512, 4096):
        config = dataclasses.replace(tiny_target.config, d_model=width)
        head = Eagle3(tiny.draft_config(config, draft_vocab_size=32_000))
        kept, plain = bytes_per_position(config, len(head.aux_layers), head.draft_vocab_size, how, top_k)
        assert plain == 8 * width
        assert plain / kept > ratio
    features = captured(how).features
    config: ModelConfig = tiny_target.config
    kept, _ = bytes_per_position(config, 3, len(IDS), how, CAPTURES[how])
    files = list(features.folder.rglob(SINGLE_FILE))
    assert len(files) == 1
    assert 0 <= files[0].stat().st_size - kept * rows.token_ids.size < 1000  # its header


def test_capture_then_train_is_training(
    captured: Callable[[Format], Captured], tmp_path: Path, tiny_target: Target, rows: PackedRows
) -> None:
    """With all tokens of the draft vocabulary kept, the loss is that with the target but for the codes' error: its
    curve stays within 0.1% in int8 and 2% in int4; with the default number, in fp8, within 2%. These bounds are what
    the codes promise."""
    online = _losses(_run(tmp_path / "online"), tiny_target, rows, None)
    assert len(online) == 10
    assert online[-1] < online[0]
    bounds: dict[Format, float] = {"int8": 1e-3, "int4": 2e-2, "fp8": 2e-2}
    alone = load_target(tiny_target.folder, dtype="float32", has_layers=False)
    for how, bound in bounds.items():
        kept = captured(how)
        off = np.abs(_losses(kept.run, alone, rows, kept.features) / online - 1).max()
        assert 0 < off < bound, (how, off)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["p-eagle", "mtp", "dflash", "dspark", "dflash2"])
def test_every_kind_learns_from_what_is_captured(
    tmp_path: Path, tiny_target: Target, rows: PackedRows, kind: str
) -> None:
    """As above, of the target's best tokens; but for P-EAGLE where the head shares the target's output head. A carried
    layer begins with the target's last one, which is not in memory."""
    changes: dict[str, Any] = {"drafter": kind, "teacher": "greedy", "max_steps": 3}
    ids = IDS if kind == "p-eagle" else np.arange(64, dtype=np.int32)
    run = _run(tmp_path, **changes)
    features = _capture(run, tiny_target, rows, ids=ids)
    alone = load_target(tiny_target.folder, dtype="float32", has_layers=False)
    online = dataclasses.replace(run, features=CaptureSettings(), output=str(tmp_path / "online"))
    found, expected = _losses(run, alone, rows, features, ids=ids), _losses(online, tiny_target, rows, None, ids=ids)
    assert 0 < np.abs(found / expected - 1).max() < 1e-3


def test_a_folder_of_more_taps_is_for_other_kinds_too(tmp_path: Path, tiny_target: Target, rows: PackedRows) -> None:
    """A run reads its own taps of it, in its own order, and they are those that it would have captured itself."""
    ids, last = np.arange(64, dtype=np.int32), tiny_target.config.num_layers - 1
    mtp = _run(tmp_path / "mtp", drafter="mtp")
    own = [_capture(run, tiny_target, rows, ids=ids) for run in (_run(tmp_path / "eagle3"), mtp)]
    assert last not in own[0].manifest.aux_layers, "the other kind's tap has to be asked for"
    more = _run(tmp_path / "more")
    more = dataclasses.replace(more, features=dataclasses.replace(more.features, capture_layers=(last,)))
    shared = _capture(more, tiny_target, rows, ids=ids)
    for kind, alone in zip(("eagle3", "mtp"), own, strict=True):
        reading = _open(_run(tmp_path / "more", drafter=kind), tiny_target, rows, ids)
        assert reading.manifest == shared.manifest
        assert not reading.missing()
        assert_tree = functools.partial(jax.tree.map, np.testing.assert_array_equal)
        assert_tree(reading.read(np.arange(len(rows))), alone.read(np.arange(len(rows))))
    beyond = dataclasses.replace(more.features, capture=str(tmp_path / "new"), capture_layers=(last + 1,))
    with pytest.raises(ConfigError, match=rf"features\.capture_layers: .* layers 0 to {last}, and no \[{last + 1}\]"):
        _open(dataclasses.replace(more, features=beyond), tiny_target, rows, ids)


@pytest.mark.slow
def test_features_are_spread_and_split_as_rows_are(tmp_path: Path, tiny_target: Target, rows: PackedRows) -> None:
    mesh = make_mesh(data=2, sequence=2)
    run = _run(tmp_path, max_steps=3, accumulate=2)
    features = _capture(run, tiny_target, rows, mesh)
    alone = load_target(tiny_target.folder, dtype="float32", mesh=mesh, has_layers=False)
    spread = _losses(run, alone, rows, features, mesh)
    alone = load_target(tiny_target.folder, dtype="float32", has_layers=False)
    plain = _run(tmp_path, max_steps=3, save_every=0)

    def losses(target: Target, output: Path) -> np.ndarray:
        return _losses(dataclasses.replace(plain, output=str(output)), target, rows, features)

    assert_same(spread, losses(alone, tmp_path / "plain"), noise_of(losses, alone, tmp_path))


def test_an_interrupted_capture_goes_on(
    tmp_path: Path, tiny_target: Target, rows: PackedRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File by file; what is there is neither computed nor written again, and the result is the undisturbed one. How
    far it is counts what was missing."""
    whole = _capture(_run(tmp_path / "whole"), tiny_target, rows)
    assert whole.manifest.num_files == 1
    monkeypatch.setattr(capture, "SHARD_BYTES", 3 * 32 * 300)
    run, write = _run(tmp_path / "cut"), FeatureFolder.write

    def die(self: FeatureFolder, number: int, features: Any) -> None:
        if number == 2:
            (self.folder / "00002").mkdir()
            (self.folder / "00002" / f"{SINGLE_FILE}.partial").write_bytes(b"half")
            raise KeyboardInterrupt
        write(self, number, features)

    with monkeypatch.context() as patched:
        patched.setattr(FeatureFolder, "write", die)
        with pytest.raises(KeyboardInterrupt):
            _capture(run, tiny_target, rows)
    first = (tmp_path / "cut/features/00000" / SINGLE_FILE).stat().st_mtime_ns
    features = _open(run, tiny_target, rows)
    assert features.manifest.rows_per_file > 1
    assert features.missing() == list(range(2, features.manifest.num_files))
    assert len(features.missing()) > 1
    reported: list[tuple[int, int]] = []
    _capture(run, tiny_target, rows, on_rows=lambda *counts: reported.append(counts))
    missing = len(rows) - 2 * features.manifest.rows_per_file
    assert [reported[0], reported[-1]] == [(0, missing), (missing, missing)]
    assert reported == sorted(reported)
    assert len(reported) > features.manifest.num_files - 2, "a file's batches are counted one by one"
    assert (tmp_path / "cut/features/00000" / SINGLE_FILE).stat().st_mtime_ns == first
    at = np.arange(len(rows))[::-1]
    jax.tree.map(np.testing.assert_array_equal, features.read(at), whole.read(at))
    assert math.prod(features.read(at).codes.shape) == len(rows) * 32 * 3 * 32


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path: Path, tiny_target: Target, rows: PackedRows) -> None:
    """In a row that is read; the others are read as before."""
    features = _capture(_run(tmp_path), tiny_target, rows)
    file, num_rows = features.folder / "00000" / SINGLE_FILE, len(rows)
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for place in np.linspace(header, len(whole) - 1, 9).astype(int).tolist():
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        opened = _open(_run(tmp_path), tiny_target, rows)
        errors = []
        for row in range(num_rows):
            try:
                opened.read([row])
            except CheckpointError as error:
                errors.append(f"row {row} is damaged" in str(error))
        assert errors == [True], place


def test_features_of_something_else_are_refused(tmp_path: Path, tiny_target: Target, rows: PackedRows) -> None:
    run = _run(tmp_path)
    _open(run, tiny_target, rows)
    other = tmp_path / "other"
    other.mkdir()
    tiny.write_target(other, tiny.TARGET, seed=1)
    with pytest.raises(CheckpointError, match=r"manifest\.json: the features captured there .* target is "):
        _open(run, load_target(other, dtype="float32"), rows)
    with pytest.raises(CheckpointError, match="draft_vocab is"):
        _open(run, tiny_target, rows, IDS + 1)
    fewer = dataclasses.replace(rows, token_ids=rows.token_ids + 1)
    with pytest.raises(CheckpointError, match="data is"):
        _open(run, tiny_target, fewer)
    with pytest.raises(CheckpointError, match="aux_layers is"):
        _open(_run(tmp_path, drafter="mtp"), tiny_target, rows)
    with pytest.raises(CheckpointError, match="aux_layers is"):
        _open(dataclasses.replace(run, draft=dataclasses.replace(run.draft, aux_layers=(0, 1, 2))), tiny_target, rows)
    with pytest.raises(CheckpointError, match="format is int8, this run has fp8"):
        _open(_run(tmp_path, "fp8"), tiny_target, rows)
    with pytest.raises(CheckpointError, match="quantization is none, this run has int8"):
        _open(dataclasses.replace(run, quantization="int8"), tiny_target, rows)
    with pytest.raises(ConfigError, match="capture_top_k is 49, the draft vocabulary has 48"):
        _open(_run(tmp_path, top_k=49), tiny_target, rows)
    stray = dataclasses.replace(run, features=dataclasses.replace(run.features, capture=str(other)))
    with pytest.raises(CheckpointError, match="not empty, and without manifest"):
        _open(stray, tiny_target, rows)
