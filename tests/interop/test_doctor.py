"""The draft doctor: each planted defect is found under its own name, what can be repaired without guessing comes back
as the head it was, and a healthy head is left in peace."""

import contextlib
import importlib.util
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file
from same_head import assert_same_head
from test_dialects import Tensors

from specserve.checkpoints.load import Target
from specserve.checkpoints.source import BUNDLED_FOLDER, BUNDLED_HEADS
from specserve.drafters.interface import Head
from specserve.drafters.layers import windowed
from specserve.errors import SpecServeError
from specserve.interop import doctor
from specserve.interop.convert import describe_target, export_head, write_head
from specserve.interop.eagle3.dialects import CHECKS
from specserve.interop.examined import CHECKS as COMMON_CHECKS
from specserve.interop.format import Dialect
from specserve.interop.head import load_head, save_head
from specserve.interop.key_checks import CHECKS as KEY_CHECKS
from specserve.tokenizer import Tokenizer

Raw = dict[str, Any]
Plant = Callable[[Raw, Tensors], object]
ROOT = Path(__file__).parent.parent.parent
BUNDLED_EAGLE3 = BUNDLED_HEADS["pydoc-eagle3"]  # every engine's layout can hold it
FLAGS = {"fc_norm": True, "norm_before_fc": True}


@pytest.fixture(scope="module")
def described(tiny_target: Target) -> Target:
    return describe_target(tiny_target.folder)


@pytest.fixture(scope="module")
def head(described: Target) -> Head:
    head = tiny.random_head(described.config, seed=1, aux_layers=(0, 2, 4), **FLAGS)
    assert 2 in head.target_ids, "the EOS is to be drafted"
    return head


def write(folder: Path, head: Head, target: Target, dialect: Dialect) -> None:
    save_head(folder.with_name("ours"), head, target, dtype="float32", notes={})
    export_head(folder.with_name("ours"), folder, target, target_name="tiny", dialect=dialect)


def edit(folder: Path, plant: Plant) -> None:
    raw, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    plant(raw, tensors)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")


def layer(raw: Raw) -> Raw:
    return raw.get("transformer_layer_config", raw)


def put(**values: object) -> Plant:
    return lambda raw, tensors: layer(raw).update(values)


def drop(*keys: str) -> Plant:
    return lambda raw, tensors: [place.pop(key, None) for place in (raw, layer(raw)) for key in keys]


def drop_tensor(name: str) -> Plant:
    return lambda raw, tensors: tensors.pop(name)


def change(name: str, how: Callable[[np.ndarray], np.ndarray]) -> Plant:
    return lambda raw, tensors: tensors.update({name: np.ascontiguousarray(how(tensors[name]))})


def both(*plants: Plant) -> Plant:
    return lambda raw, tensors: [plant(raw, tensors) for plant in plants]


def shuffle_rows(raw: Raw, tensors: Tensors) -> None:
    order = np.random.default_rng(0).permutation(48)
    tensors["d2t"] = (tensors["d2t"] + np.arange(48))[order] - np.arange(48)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]


def prefix(raw: Raw, tensors: Tensors) -> None:
    for name in list(tensors):
        tensors[f"model.{name}"] = tensors.pop(name)


def poke(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flat[3] = np.inf
    return array


absolute = change("d2t", lambda d2t: d2t + np.arange(48))
TABLES: list[tuple[set[str], Plant]] = [  # the same tensors in every layout
    ({"absolute-d2t"}, absolute),
    ({"absolute-d2t", "t2d-missing"}, both(absolute, drop_tensor("t2d"))),
    ({"unsorted-d2t"}, shuffle_rows),
    ({"d2t-missing"}, drop_tensor("d2t")),
    ({"d2t-dtype"}, change("d2t", lambda d2t: d2t.astype(np.int32))),
    ({"t2d-missing"}, drop_tensor("t2d")),
    ({"t2d-dtype"}, change("t2d", lambda t2d: t2d.astype(np.uint8))),
]
KEYS_AND_NAMES: list[tuple[set[str], Plant]] = [
    ({"names"}, prefix),
    ({"draft-vocab-size"}, drop("draft_vocab_size")),
    ({"architecture"}, drop("architectures")),
    ({"architecture"}, lambda raw, tensors: raw.update(architectures=["LlamaForCausalLM"])),
    ({"model-type"}, drop("model_type")),
    ({"tied"}, put(tie_word_embeddings=True)),
    ({"norm-flag"}, lambda raw, tensors: raw.update(fc_norm=False)),
    ({"norm-flag"}, drop("norm_before_fc")),
    ({"dtype"}, drop("torch_dtype", "dtype")),
    ({"dtype"}, lambda raw, tensors: raw.update(torch_dtype="bfloat16")),
    ({"max-positions"}, put(max_position_embeddings=100)),
    ({"max-positions"}, drop("max_position_embeddings")),
    ({"rope-spellings"}, put(rope_theta=500_000.0)),
    ({"rope-spellings"}, put(rope_parameters={"rope_type": "default", "rope_theta": 500_000.0})),
    ({"rope-spellings"}, put(rope_parameters={"rope_type": "yarn"})),
    ({"rope-missing"}, drop("rope_theta", "rope_scaling", "rope_parameters")),
]
REPAIRABLE = [("sglang", *each) for each in TABLES + KEYS_AND_NAMES] + [
    ("speculators", *each) for each in KEYS_AND_NAMES
]


@pytest.mark.parametrize(("dialect", "codes", "plant"), REPAIRABLE)
def test_what_can_be_repaired_comes_back_as_it_was(
    tmp_path: Path, described: Target, head: Head, dialect: Dialect, codes: set[str], plant: Plant
) -> None:
    """The repaired head is the original bit for bit, so it proposes what the original proposes."""
    write(tmp_path / "head", head, described, dialect)
    healthy = load_head(tmp_path / "head", described, dtype="float32")
    edit(tmp_path / "head", plant)
    report = doctor.examine(tmp_path / "head", described)
    assert {finding.code for finding in report.findings} == codes
    (tmp_path / "repaired").mkdir()
    write_head(tmp_path / "repaired", *report.repaired(), {})
    assert doctor.examine(tmp_path / "repaired", described).findings == []
    assert_same_head(healthy, load_head(tmp_path / "repaired", described, dtype="float32"))
    assert len(report.changes) == len(codes)


OF_LAYERS: list[tuple[Dialect, str, Plant]] = [  # faults of the options of a head's layers
    ("speculators", "forgotten-window", drop("use_sliding_window")),
    ("speculators", "normed-class", lambda raw, tensors: raw["transformer_layer_config"].update(model_type="llama")),
    ("vllm", "normed-class", lambda raw, tensors: raw.update(architectures=["LlamaForCausalLMEagle3"])),
]


@pytest.mark.parametrize(("dialect", "code", "plant"), OF_LAYERS)
def test_options_of_layers_that_engines_would_miss_are_written(
    tmp_path: Path, described: Target, dialect: Dialect, code: str, plant: Plant
) -> None:
    shape = {"has_embedding": True, "qk_norm": "head", "qkv_bias": True, "o_bias": True, "layers": windowed((16,))}
    head = tiny.random_head(described.config, seed=1, **shape)
    head = replace(head, params=jax.tree.map(lambda x: x + 0.25, head.params))  # no bias is nothing
    write(tmp_path / "head", head, described, dialect)
    assert [finding.code for finding in doctor.examine(tmp_path / "head", described).errors] == []
    edit(tmp_path / "head", plant)
    report = doctor.examine(tmp_path / "head", described)
    assert [finding.code for finding in report.errors] == [code]
    (tmp_path / "repaired").mkdir()
    write_head(tmp_path / "repaired", *report.repaired(), {})
    assert doctor.examine(tmp_path / "repaired", described).errors == []
    assert_same_head(head, load_head(tmp_path / "repaired", described, dtype="float32"))


HOPELESS: list[tuple[str, Plant]] = [
    ("all-zero", change("fc.weight", np.zeros_like)),
    ("all-zero", change("norm.weight", np.zeros_like)),
    ("weight-range", change("lm_head.weight", lambda head: head * np.float32(1e20))),
    ("weight-range", change("lm_head.weight", lambda head: head * np.float32(1e-20))),
    ("uncomputed", put(hidden_act="relu")),
    ("uncomputed", put(rms_norm_eps=1.0)),
    ("uncomputed", put(rms_norm_eps="1e-6")),
    ("windows", put(sliding_window=2048)),
    ("windows", put(layer_types=["sliding_attention"], sliding_window=-1)),
    ("uncomputed", lambda raw, tensors: raw.update(architectures=["Gemma4MTPModel"])),
    ("unknown-key", put(window_size=2048)),
    ("quantization", put(quantization_config={"quant_method": "fp8"})),
    ("unreadable", put(num_aux_hidden_states=5)),
    (
        "stated-twice",
        lambda raw, tensors: raw["eagle_config"].update(norm_output=True) or raw.update(norm_output=False),
    ),
    ("not-finite", change("midlayer.mlp.up_proj.weight", poke)),
    ("missing-tensor", drop_tensor("midlayer.hidden_norm.weight")),
    ("missing-tensor", drop_tensor("fc_norm.1.weight")),
    ("shape", change("fc.weight", lambda fc: fc[:-1])),
    ("missing-tensor", lambda raw, tensors: tensors.update({"midlayer.self_attn.q_norm.weight": np.ones(8, "f4")})),
    ("unknown-tensor", lambda raw, tensors: tensors.update({"midlayer.mlp.up_proj.bias": np.ones(48, "f4")})),
    ("weight-dtype", change("midlayer.mlp.up_proj.weight", lambda w: w.astype(np.int8))),
    ("vocabulary", change("d2t", lambda d2t: d2t * 0 + 7 - np.arange(48))),  # one token, 48 times
    ("vocabulary", change("d2t", lambda d2t: d2t + 40)),
    ("vocabulary", both(drop_tensor("d2t"), drop_tensor("t2d"))),
    ("t2d-disagrees", change("t2d", lambda t2d: ~t2d)),
    ("config-keys", drop("hidden_size")),
    ("layers", put(num_hidden_layers=2)),
    ("rope-spellings", put(rope_theta=2e5, rope_parameters={"rope_type": "default", "rope_theta": 5e5})),
    ("taps-range", lambda raw, tensors: raw["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[0, 2, 6])),
    ("other-target", both(put(vocab_size=65), change("t2d", lambda t2d: np.append(t2d, False)))),
]
SUSPECT: list[tuple[str, Plant]] = [
    ("eps-differs", put(rms_norm_eps=1e-4)),
    ("rope-differs", put(rope_theta=5e5, rope_parameters={"rope_type": "default", "rope_theta": 5e5})),
    ("mixed-dtypes", change("norm.weight", lambda norm: norm.astype(np.float16))),
    ("taps-order", lambda raw, tensors: raw["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[4, 2, 0])),
    ("taps-off-by-one", lambda raw, tensors: raw["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[2, 3, 3])),
]


@pytest.mark.parametrize(("code", "plant"), HOPELESS + SUSPECT)
def test_what_would_be_a_guess_is_said_and_left_alone(
    tmp_path: Path, described: Target, head: Head, code: str, plant: Plant
) -> None:
    write(tmp_path / "head", head, described, "sglang")
    edit(tmp_path / "head", plant)
    report = doctor.examine(tmp_path / "head", described)
    # three taps of a target with six layers cannot differ: 1, 2, 2
    found = [finding for finding in report.findings if (code, finding.code) != ("taps-off-by-one", "taps-order")]
    assert [finding.code for finding in found] == [code]
    assert found[0].fix is None
    assert bool(report.errors) == (code in dict(HOPELESS))
    assert all(found[0].to_json().values()) is False  # is_fixable alone: everything else is said
    assert sum(not value for value in found[0].to_json().values()) == 1


def test_taps_in_the_speculators_layout_are_counted_its_way(tmp_path: Path, described: Target, head: Head) -> None:
    """The slip that cost a public head most of its acceptance: ids of outputs, kept in a layout that names inputs."""
    write(tmp_path / "head", head, described, "speculators")
    edit(tmp_path / "head", lambda raw, tensors: raw.update(eagle_aux_hidden_state_layer_ids=[1, 2, 2]))
    codes = [finding.code for finding in doctor.examine(tmp_path / "head", described).findings]
    assert "taps-off-by-one" in codes
    edit(tmp_path / "head", lambda raw, tensors: raw.pop("norm_before_residual"))
    edit(tmp_path / "head", lambda raw, tensors: raw.pop("speculators_config"))
    codes = [finding.code for finding in doctor.examine(tmp_path / "head", described).findings]
    assert {"implicit-flag", "speculators-config"} <= set(codes)


def test_a_head_of_another_width_needs_an_embedding(tmp_path: Path, described: Target) -> None:
    narrow = tiny.random_head(described.config, seed=1, d_model=16, has_embedding=True)
    write(tmp_path / "head", narrow, described, "sglang")
    assert doctor.examine(tmp_path / "head", described).findings == []
    edit(tmp_path / "head", drop_tensor("embed_tokens.weight"))
    assert [finding.code for finding in doctor.examine(tmp_path / "head", described).findings] == ["embedding"]


def test_a_head_for_a_target_of_another_width_is_reported(tmp_path: Path, described: Target) -> None:
    other = replace(described, config=replace(described.config, d_model=2 * described.config.d_model))
    write(tmp_path / "head", tiny.random_head(other.config, seed=1, has_embedding=True), other, "sglang")
    assert [finding.code for finding in doctor.examine(tmp_path / "head", described).findings] == ["other-target"]


def test_rotary_settings_in_one_spelling_are_written_in_both(tmp_path: Path, described: Target, head: Head) -> None:
    write(tmp_path / "head", head, described, "sglang")
    edit(tmp_path / "head", both(put(rope_theta=5e5), drop("rope_parameters")))
    report = doctor.examine(tmp_path / "head", None)
    assert [finding.code for finding in report.findings] == ["rope-one-spelling"]
    assert report.repaired()[1]["rope_parameters"] == {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize("dialect", ["sglang", "vllm", "speculators"])  # sglang-jax reads what sglang reads
@pytest.mark.parametrize(("with_target", "num_layers"), [(True, 1), (False, 1), (True, 2)])
def test_healthy_heads_are_left_in_peace(
    tmp_path: Path, described: Target, head: Head, dialect: Dialect, with_target: bool, num_layers: int
) -> None:
    if num_layers > 1:
        own = {"qk_norm": "head", "layers": windowed((0, 16))}
        head = tiny.random_head(described.config, seed=1, num_layers=num_layers, aux_layers=(0, 2, 4), **own)
    write(tmp_path / "head", head, described, dialect)
    assert doctor.examine(tmp_path / "head", described if with_target else None).findings == []


@pytest.mark.parametrize(
    ("dialect", "plant"), [("sglang", drop("num_hidden_layers")), ("speculators", put(num_hidden_layers=1))]
)
def test_layers_that_nobody_states_are_counted(
    tmp_path: Path, described: Target, dialect: Dialect, plant: Plant
) -> None:
    write(
        tmp_path / "head",
        tiny.random_head(described.config, seed=1, num_layers=2, aux_layers=(0, 2, 4)),
        described,
        dialect,
    )
    healthy = load_head(tmp_path / "head", described, dtype="float32")
    edit(tmp_path / "head", plant)
    report = doctor.examine(tmp_path / "head", described)
    assert [finding.code for finding in report.findings] == ["layers"]
    (tmp_path / "repaired").mkdir()
    write_head(tmp_path / "repaired", *report.repaired(), {})
    assert_same_head(healthy, load_head(tmp_path / "repaired", described, dtype="float32"))


def test_the_shipped_head_is_healthy_and_its_tokens_are_watched(tmp_path: Path) -> None:
    target = describe_target(BUNDLED_FOLDER)
    assert doctor.examine(BUNDLED_EAGLE3, target).findings == []
    tensors = load_file(BUNDLED_EAGLE3 / "model.safetensors")
    ids = tensors["d2t"] + np.arange(len(tensors["d2t"]))
    unused = np.setdiff1d(np.arange(100, 8192), ids)
    template = Tokenizer.load(BUNDLED_FOLDER).template_token_ids() - set(target.eos_ids)
    num_ends = int(np.isin(ids, target.eos_ids).sum())
    lost = ids[np.isin(ids, [*target.eos_ids, max(template)])]
    ids = np.sort(np.append(np.setdiff1d(ids, lost), unused[: len(lost)]))
    mask = np.zeros(8192, bool)
    mask[ids] = True
    tables = {"d2t": ids - np.arange(len(ids)), "t2d": mask}
    save_file(tensors | tables, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((BUNDLED_EAGLE3 / "config.json").read_bytes())
    found = doctor.examine(tmp_path, target).findings
    assert [(finding.code, finding.level) for finding in found] == [("eos", "warning"), ("template-tokens", "warning")]
    assert f"{num_ends} missing" in found[0].got
    assert f"1 missing: {max(template)} '" in found[1].got
    assert "'<|" in found[0].got, "a token is shown as text"


def test_whatever_is_in_the_files_the_doctor_does_not_stumble(tmp_path: Path, described: Target, head: Head) -> None:
    """Every key and every tensor replaced by junk: a report, or one line that names what is wrong, never a crash."""
    folder, targets = tmp_path / "head", itertools.cycle((described, None))
    write(folder, head, described, "speculators")
    raw, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")

    def examine() -> None:
        with contextlib.suppress(SpecServeError):
            report = doctor.examine(folder, next(targets))
            report.repaired()
            json.dumps(report.to_json())

    for place in (raw, *(value for value in raw.values() if isinstance(value, dict))):
        for key, kept in list(place.items()):
            for junk in ("x", [1, "a"], {"rope_type": "yarn"}):
                place[key] = junk
                (folder / "config.json").write_text(json.dumps(raw))
                examine()
            place[key] = kept
    (folder / "config.json").write_text(json.dumps(raw))
    for name in tensors:
        save_file(tensors | {name: np.zeros((3, 3), np.int32)}, folder / "model.safetensors")
        examine()


def test_the_documents_list_the_catalogue() -> None:
    spec = importlib.util.spec_from_file_location("list_checks", ROOT / "tools" / "list_checks.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    page = tool.PAGE.read_text()
    assert tool.page(page) == page, "run `python tools/list_checks.py`"
    assert all(f"| `{check.code}` | {check.level} |" in page for check in CHECKS.values())


def test_every_check_is_planted_here() -> None:
    """Each entry's code stands in this file beside the fault that it is found by."""
    source, every = Path(__file__).read_text(), [*CHECKS.values(), *KEY_CHECKS.values(), *COMMON_CHECKS.values()]
    assert [check.code for check in every if f'"{check.code}"' not in source] == []
