"""The laws of the one reader of heads' config.json, over every kind and layout: a key is known and read wherever it
stands, known to be harmless, or refused by its path; what two places state differently is refused with both."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny
from dflash_case import GEMMA, MARKOV, SELECTOR

from specserve.checkpoints.load import Target
from specserve.checkpoints.tensors import write_json, write_tensors
from specserve.drafters.interface import Head, TrainedDrafter
from specserve.drafters.layers import windowed
from specserve.errors import ConfigError, SpecServeError
from specserve.interop import doctor
from specserve.interop.dflash.dialects import KEYS as BLOCK_KEYS
from specserve.interop.eagle3.dialects import KEYS as EAGLE3_KEYS
from specserve.interop.eagle3.dialects import draft_config_from_hf
from specserve.interop.format import Dialect
from specserve.interop.head import head_files, load_head, read_drafter
from specserve.interop.keys import HARMLESS, LAYER, OLD_ROPE, ROPE, ROTARY, KeyTable, without
from specserve.interop.peagle.files import KEYS as PEAGLE_KEYS
from specserve.models.families.table import model_config
from specserve.models.rope import yarn_magnitude

TESTS = Path(__file__).parents[1]
Raw = dict[str, Any]
Make = Callable[[Target], Head]


def _block(target: Target, changes: Raw, **settings: Any) -> Head:
    return tiny.random_joint_head(target.config, 1, changes, num_layers=2, window=16, **settings)


MAKE: dict[str, tuple[Make, KeyTable | None]] = {
    "eagle3": (lambda target: tiny.random_head(target.config, 1, aux_layers=(0, 2, 4), fc_norm=True), EAGLE3_KEYS),
    "p-eagle": (lambda target: tiny.random_masked_head(target.config, 1), PEAGLE_KEYS),
    "dflash": (lambda target: tiny.random_block_head(target.config, 1, num_layers=2, window=16), BLOCK_KEYS),
    "dspark": (lambda target: _block(target, MARKOV | {"foresees_anchor": True}), BLOCK_KEYS),
    "dflash2": (lambda target: _block(target, SELECTOR, vocab_size=64), BLOCK_KEYS),
    "mtp": (lambda target: tiny.random_carried_layer(target.config, 1), None),
}
LAYOUTS: dict[str, tuple[Dialect, ...]] = {"eagle3": ("sglang", "vllm", "speculators")}
CASES = [(kind, dialect) for kind in MAKE for dialect in LAYOUTS.get(kind, ("vllm", "speculators"))]
TABLED = [case for case in CASES if case[0] != "mtp"]


class Files:
    """A head's folder whose config.json is edited."""

    def __init__(self, folder: Path, target: Target, kind: str, dialect: Dialect) -> None:
        self.folder, self.target, self.table, self.case = folder, target, MAKE[kind][1], (kind, dialect)
        head = MAKE[kind][0](target)
        tensors, self.raw = head_files(head, target, dtype="float32", dialect=dialect, target_name="tiny")
        folder.mkdir(exist_ok=True)
        write_tensors(folder / "model.safetensors", tensors)
        self.drafter = self.read(self.raw)

    def load(self, raw: Mapping[str, Any]) -> TrainedDrafter:
        write_json(self.folder / "config.json", raw)
        return load_head(self.folder, self.target, dtype="float32").drafter

    def read(self, raw: Mapping[str, Any]) -> TrainedDrafter:
        """Load no weights, where they are not needed to find a fault."""
        if self.table is None:
            return self.load(raw)
        write_json(self.folder / "config.json", raw)
        return read_drafter(self.folder, self.target.config, "tiny", dtype="float32")

    def error(self, raw: Mapping[str, Any], *, has_weights: bool = False, is_examined: bool = True) -> str:
        """Return why a config.json is refused; the draft doctor reports it too."""
        with pytest.raises(SpecServeError) as error:
            (self.load if has_weights else self.read)(raw)
        assert not is_examined or doctor.examine(self.folder, self.target).errors, error.value
        assert "\n" not in str(error.value)
        return str(error.value)

    @property
    def places(self) -> list[tuple[str, ...]]:
        """The objects of config.json in which settings may stand, some of which are not there yet."""
        outer = [(), (LAYER,)] if LAYER in self.raw else [()]
        inside = sorted(self.table.places) if self.table else []
        return outer + [(*place, name) for place in outer for name in inside]


@pytest.fixture
def files(tmp_path: Path, tiny_target: Target, request: pytest.FixtureRequest) -> Files:
    return Files(tmp_path / "head", tiny_target, *request.param)


def _at(raw: Raw, place: tuple[str, ...]) -> Raw:
    """Return an object inside a config.json, which is made if it is not there."""
    for name in place:
        raw[name] = raw.get(name) or {}
        raw = raw[name]
    return raw


def _with(raw: Raw, place: tuple[str, ...], **values: Any) -> Raw:
    out = json.loads(json.dumps(raw))
    _at(out, place).update(values)
    return out


every = pytest.mark.parametrize("files", CASES, indirect=True, ids="-".join)
tabled = pytest.mark.parametrize("files", TABLED, indirect=True, ids="-".join)


@every
def test_a_key_that_nobody_knows_is_refused_in_each_place(files: Files) -> None:
    ropes = [(*place, name) for place in files.places for name in (ROPE, OLD_ROPE)] if files.table else []
    for place in (*files.places, *ropes):
        path = ".".join((*place, "window_size"))
        assert f" {path}" in files.error(_with(files.raw, place, window_size=64))
        assert files.read(_with(files.raw, place, window_size=None)) == files.drafter


@every
def test_what_says_nothing_of_a_head_is_harmless_in_each_place(files: Files) -> None:
    raw = files.raw
    for place in files.places:
        raw = _with(raw, place, unsloth_version="2026.1", _commit_hash="f00", transformers_version="5.0")
    assert files.read(raw) == files.drafter
    kinds = {
        "architectures",
        "speculators_model_type",
        "speculators_config",
        "model_type",
    }  # by which a reader is chosen
    more = dict.fromkeys(HARMLESS - kinds - files.raw.keys(), "anything")
    if files.table:
        read = {key.name for key in files.table.keys}
        assert files.read(raw | {name: value for name, value in more.items() if name not in read}) == files.drafter


@every
def test_a_quantisation_of_plain_tensors_is_refused_in_each_place(files: Files) -> None:
    for place in files.places:
        for name in ("quantization_config", "compression_config"):
            stated = {"quant_method": "fp8", "weight_block_size": [16, 16]}
            error = files.error(_with(files.raw, place, **{name: stated}), has_weights=True)
            assert f"{'.'.join((*place, name))} is stated, and no tensor is in 8 bits" in error
            assert "quantization" in {each.code for each in doctor.examine(files.folder, files.target).errors}


def _settings(files: Files) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """List the settings of a config.json by the objects that they stand in, the rotary ones under their own names."""
    table = files.table
    assert table is not None
    known = {spelled for key in table.keys for spelled in (key.name, *key.aliases)}
    for place in files.places:
        part: Any = files.raw
        for name in place:
            part = part.get(name) or {}
        yield from ((place, name, value) for name, value in part.items() if name in known and value is not None)


def _other(value: Any) -> Any:
    """Return a value that is not this one, and of its type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 + 1
    return [*value[:-1], 1] if isinstance(value, list) else f"{value}-too"


@tabled
def test_a_key_is_read_wherever_it_stands_and_refused_where_two_places_disagree(files: Files) -> None:
    found = list(_settings(files))
    assert len(found) > 10
    for place, name, value in found:
        for other in files.places:
            if other == place:
                continue
            both = _with(files.raw, other, **{name: value})
            if name not in ("mask_token_id", "ptd_token_id") or len(other) == 1:
                assert files.read(both) == files.drafter
            moved = json.loads(json.dumps(both))
            del _at(moved, place)[name]
            assert files.read(moved) == files.drafter
            wrong = _with(files.raw, other, **{name: _other(value)})
            error = files.error(wrong, is_examined=other == files.places[-1])
            for path in (".".join((*place, name)), ".".join((*other, name))):
                assert f"{path}: " in error, error


@tabled
def test_other_spellings_of_a_key_are_the_key(files: Files) -> None:
    assert files.table is not None
    by_name = {name: (place, value) for place, name, value in _settings(files)}
    for key in files.table.keys:
        for alias in key.aliases if key.name in by_name else ():
            place, value = by_name[key.name]
            assert files.read(_with(files.raw, place, **{alias: value})) == files.drafter
            assert f"{alias}: " in files.error(_with(files.raw, (), **{alias: _other(value)}))


@tabled
def test_a_switch_of_another_type_is_refused(files: Files) -> None:
    """A string that is not empty is not a true."""
    assert files.table is not None
    places = {name: place for place, name, _ in _settings(files)}
    for key in files.table.keys:
        if isinstance(key.default, bool | float):
            expected = "expected true or false" if isinstance(key.default, bool) else "expected a number"
            for value in ("false", 1 if isinstance(key.default, bool) else True):
                wrong = _with(files.raw, places.get(key.name, ()), **{key.name: value})
                error = files.error(wrong, is_examined=key.name in places)
                assert f"{key.name} is {value!r}" in error
                assert expected in error


@every
def test_a_name_of_another_kind_of_head_is_refused(files: Files) -> None:
    """Also one that stands alone, where a list of names is usual."""
    named = files.raw["architectures"]
    if files.table:
        assert "Medusa" in files.error(files.raw | {"architectures": "MedusaModel"})
        assert "Medusa" in files.error(files.raw | {"architectures": [*named, "MedusaModel"]})
    assert files.read(files.raw | {"architectures": named[0]}) == files.drafter
    if LAYER in files.raw:
        error = files.error(files.raw | {"speculators_model_type": "mlp_speculator"}, has_weights=True)
        assert "mlp_speculator" in error or files.raw["architectures"][0] in error


@pytest.mark.parametrize("files", [case for case in CASES if "eagle" in case[0]], indirect=True, ids="-".join)
def test_layers_of_another_model_or_turned_otherwise_are_refused(files: Files) -> None:
    for place in files.places:
        assert "rope_interleave is True" in files.error(_with(files.raw, place, rope_interleave=True))
        assert files.read(_with(files.raw, place, rope_interleave=False)) == files.drafter
        assert "draft_vocab_size is 0" in files.error(
            _with(without(files.raw, ["draft_vocab_size"]), place, draft_vocab_size=0)
        )
    nested = _with(files.raw, (LAYER,), model_type="gemma3_text")
    assert f"{LAYER}.model_type is 'gemma3_text'" in files.error(nested)


def _without_rope(raw: Raw) -> Raw:
    return without(raw, (ROPE, OLD_ROPE, *ROTARY))


ROPES: list[tuple[Raw, Raw]] = [  # keys of config.json, and the fields of the rotary embedding
    ({"rope_theta": 5e5}, {"theta": 5e5}),
    ({ROPE: {"rope_theta": 5e5}}, {"theta": 5e5}),
    ({OLD_ROPE: {"rope_theta": 5e5, "type": "default"}}, {"theta": 5e5}),
    ({ROPE: {"rope_type": "default", "partial_rotary_factor": 0.25}}, {"rotary_dim": 2}),
    ({"partial_rotary_factor": 0.5, ROPE: {"rope_type": "mrope", "mrope_section": [1, 1, 2]}}, {"rotary_dim": 4}),
    ({"rotary_dim": 4, ROPE: {"partial_rotary_factor": 0.5, "mrope_interleaved": True}}, {"rotary_dim": 4}),
    (  # as Model-Optimizer stretches heads at export
        {"rope_theta": 5e5, OLD_ROPE: {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}},
        {"theta": 5e5, "kind": "yarn", "factor": 32.0, "original_max_len": 2048, "magnitude": yarn_magnitude(32.0)},
    ),
    ({OLD_ROPE: {"type": "linear", "factor": 2.0}, ROPE: {"rope_type": "linear"}}, {"kind": "linear", "factor": 2.0}),
]


@tabled
def test_rotary_settings_are_read_wherever_they_stand(files: Files) -> None:
    loaded, bare = load_head(files.folder, files.target, dtype="float32"), _without_rope(files.raw)
    for place in files.places:
        for stated, expected in ROPES:
            drafter = files.read(_with(bare, place, **stated))
            assert drafter.shape.rope == dataclasses.replace(tiny.PLAIN_ROPE, **expected), (place, stated)
            head = dataclasses.replace(loaded, drafter=drafter)
            _, raw = head_files(head, files.target, dtype="float32", dialect=files.case[1], target_name="tiny")
            assert files.read(raw) == drafter, "it is written as it is computed"


WRONG_ROPES: list[tuple[Raw, str]] = [
    ({"rope_theta": 5e5, ROPE: {"rope_theta": 1e4}}, r"rope_theta: 500000.0; rope_parameters.rope_theta: 10000.0"),
    ({ROPE: {"rope_type": "default"}, OLD_ROPE: {"type": "linear"}}, "rope_parameters.rope_type: 'default'"),
    ({ROPE: {"rope_type": "linear", "type": "yarn", "factor": 2}}, "rope_parameters.type: 'yarn'"),
    ({"partial_rotary_factor": 0.5, ROPE: {"partial_rotary_factor": 0.25}}, "partial_rotary_factor: 0.5; "),
    ({"rotary_dim": 4, "partial_rotary_factor": 0.25}, "rotary_dim and partial_rotary_factor disagree"),
    ({"partial_rotary_factor": 0.4}, "3 of 8 channels turn"),
    ({"partial_rotary_factor": 2}, "16 of 8 channels turn"),
    ({"rope_theta": "10000"}, "rope_theta is '10000'; expected a number"),
    ({"rope_theta": -1}, "rotary settings that make no sense (theta -1"),
    ({ROPE: {"rope_type": "longrope", "factor": 2, "short_factor": 1}}, "rope of type 'longrope' lacks or misstates"),
    ({ROPE: {"rope_type": "yarn"}}, "lacks or misstates 'factor'"),
    ({ROPE: {"rope_type": "xdrope"}}, "'xdrope' is not one of"),
    ({OLD_ROPE: {"type": "dynamic", "factor": 2, "alpha": 1000}}, "rope_scaling.alpha: not known"),
    ({ROPE: {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters.full_attention: not known"),
]


@tabled
def test_rotary_settings_that_disagree_or_are_not_known_are_refused(files: Files) -> None:
    bare = _without_rope(files.raw)
    for stated, words in WRONG_ROPES:
        assert words in files.error(bare | stated)


WINDOWS: list[tuple[Raw, str]] = [
    ({"layer_types": ["sliding_attention"]}, "windows without a size: sliding_window is None"),
    ({"layer_types": ["sliding_attention"], "sliding_window": 0}, "{at}sliding_window is 0"),
    ({"layer_types": ["sliding_attention"], "sliding_window": 8.0}, "{at}sliding_window is 8.0"),
    ({"layer_types": "full_attention"}, "{at}layer_types is 'full_attention'; expected a list"),
    ({"layer_types": ["chunked_attention"]}, "{at}layer_types is ['chunked_attention']; expected a list"),
    ({"layer_types": ["full_attention"] * 2}, "{at}layer_types has 2 entries for 1 layers"),
    ({"layer_types": ["sliding_attention"], "sliding_window": 8, "use_sliding_window": False}, "use_sliding_window is"),
    ({"sliding_window": 16}, "{at}sliding_window is 16, and no layer_types"),
    ({"swa_window_size": 16}, "{at}swa_window_size is 16, and no layer_types"),
    ({"use_swa": True}, "{at}use_swa is True"),
    ({"use_sliding_window": True, "sliding_window": 8}, "{at}use_sliding_window is True, and no layer_types"),
]
NO_WINDOWS: list[Raw] = [
    {"sliding_window": 16, "use_sliding_window": False},
    {"sliding_window": 16, "layer_types": ["full_attention"]},
    {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 28, "layer_types": ["full_attention"]},
]


@pytest.mark.parametrize("files", [case for case in CASES if "eagle" in case[0]], indirect=True, ids="-".join)
def test_windows_are_those_of_the_kinds_of_layers_and_others_are_refused(files: Files) -> None:
    for place in files.places:
        at = "".join(f"{name}." for name in place)
        for stated, words in WINDOWS:
            error = files.error(_with(files.raw, place, **stated), is_examined=place == ())
            assert words.format(at=at) in error
        for stated in NO_WINDOWS:
            assert files.read(_with(files.raw, place, **stated)) == files.drafter
        own: Any = files.read(_with(files.raw, place, layer_types=["sliding_attention"], sliding_window=16))
        assert own.shape == dataclasses.replace(files.drafter.shape, layers=windowed((16,)))


@pytest.mark.parametrize("files", [case for case in CASES if case[0] == "dflash"], indirect=True, ids="-".join)
def test_windows_of_block_drafters_are_those_of_qwen3_where_no_kinds_are_stated(files: Files) -> None:
    place = (LAYER,) if LAYER in files.raw else ()
    for first in (0, 1, 2):
        stated = {"layer_types": None, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": first}
        backbone = files.read(_with(files.raw, place, **stated)).config.backbone
        assert [backbone.kind(i).window for i in range(2)] == [16 * (i >= first) for i in range(2)]


def test_the_heads_of_specforge_model_optimizer_and_deepspec_are_read(tmp_path: Path, tiny_target: Target) -> None:
    """Their own keys say what is computed, or that nothing else is asked for."""
    dspark = Files(tmp_path / "dspark", tiny_target, "dspark", "vllm")
    own = {"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0}
    named = dspark.raw | {"architectures": ["DSparkDraftModel"]}
    assert dspark.read(_with(named, ("dflash_config",), **own)) == dspark.drafter
    assert "projector_type is 'domino'" in dspark.error(_with(dspark.raw, ("dflash_config",), projector_type="domino"))
    assert "attention_mode is 'mla'" in dspark.error(_with(dspark.raw, ("dflash_config",), attention_mode="mla"))
    dflash = Files(tmp_path / "dflash", tiny_target, "dflash", "vllm")
    assert "projector_type is 'dspark'" in dflash.error(_with(dflash.raw, ("dflash_config",), projector_type="dspark"))
    eagle = Files(tmp_path / "eagle", tiny_target, "eagle3", "vllm")
    switches = {
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": None,
    }
    assert eagle.read(_with(eagle.raw, ("eagle_config",), **switches)) == eagle.drafter
    assert files_of_deepspec(tmp_path / "deepspec", tiny_target).aux_layers == (0, 2, 4)
    for name, value in switches.items():
        if value is not None:
            assert f"{name} is " in eagle.error(_with(eagle.raw, ("eagle_config",), **{name: _other(value)}))


def files_of_deepspec(folder: Path, target: Target) -> Any:
    """Return a head as DeepSpec saves it: a Qwen3's config.json with keys of its own, and a head for all tokens."""
    head = tiny.random_head(target.config, 1, aux_layers=(0, 2, 4), qk_norm="head", draft_vocab_size=64)
    tensors, raw = head_files(head, target, dtype="float32", dialect="vllm", target_name="tiny")
    folder.mkdir()
    write_tensors(folder / "model.safetensors", {n: value for n, value in tensors.items() if n not in ("d2t", "t2d")})
    ours = ("eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states", "draft_vocab_size", "target_hidden_size")
    own = {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [0, 2, 4], "layer_types": ["full_attention"]}
    own |= {"ttt_length": 7, "step_loss_decay": 0.8, "draft_num_hidden_layers": 1, "num_target_layers": 6}
    own |= {"target_model_name_or_path": "tiny", "use_sliding_window": False, "max_window_layers": 6}
    write_json(folder / "config.json", without(raw, ours) | own)
    found = load_head(folder, target, dtype="float32").drafter
    assert found == head.drafter
    return found


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_gemma_4s_layers_are_read_from_the_config_of_a_gemma_4(tmp_path: Path, tiny_target: Target, kind: str) -> None:
    """DeepSpec's heads: the text config of their target, with keys of their own. Each value that their layers do not
    compute is refused by its key."""
    head = tiny.random_head(tiny_target.config, 1, aux_layers=(0, 2, 4), draft_vocab_size=64, **tiny.GEMMA)
    if kind == "dspark":
        changes = GEMMA[1] | {"embedding_scale": 32**0.5, "has_confidence_bias": False}
        sizes = {"num_layers": 2, "vocab_size": 64, "aux_layers": (0, 2, 4)}
        head = tiny.random_joint_head(tiny_target.config, 1, changes, **sizes)
    tensors, ours = head_files(head, tiny_target, dtype="float32", dialect="vllm", target_name="tiny")
    write_tensors(tmp_path / "model.safetensors", {n: t for n, t in tensors.items() if n not in ("d2t", "t2d")})
    raw = ours | {
        "head_dim": 4,
        "num_key_value_heads": 4,
        "sliding_window": 512,
        "use_bidirectional_attention": "vision",
        "vocab_size_per_layer_input": 262_144,
        "num_experts": None,
        "target_text_model_type": "gemma4_text",
        "rope_parameters": ours["rope_parameters"] | {"sliding_attention": {"rope_type": "default", "rope_theta": 1.0}},
    }

    def read(changes: Raw) -> TrainedDrafter:
        write_json(tmp_path / "config.json", raw | changes)
        return load_head(tmp_path, tiny_target, dtype="float32").drafter

    assert read({}) == head.drafter
    assert not doctor.examine(tmp_path, tiny_target).errors
    for changes in (
        *({"enable_moe_block": True}, {"hidden_size_per_layer_input": 8}, {"num_kv_shared_layers": 1}),
        *({"use_double_wide_mlp": True}, {"hidden_activation": "silu"}, {"layer_types": ["sliding_attention"] * 2}),
        *({"global_head_dim": None}, {"num_global_key_value_heads": None}, {"surprise": 1}),
        {"rope_parameters": {"sliding_attention": raw["rope_parameters"]["full_attention"]}},
    ):
        with pytest.raises(ConfigError, match=next(iter(changes))):
            read(changes)


def test_latent_attention_is_read_as_that_of_its_target(tmp_path: Path, tiny_target: Target) -> None:
    """A config.json of Model-Optimizer's is the target's own, with the keys of its experts."""
    raw = json.loads((TESTS / "goldens" / "kimi-k2" / "config.json").read_text())
    raw |= {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "num_hidden_layers": 1, "draft_vocab_size": 8}
    expected = model_config(raw, dtype="float32")
    found = draft_config_from_hf(EAGLE3_KEYS.read(raw, "config.json"), None, frozenset(), dtype="float32")
    for name in ("latent", "rope", "attention_scale", "head_dim", "num_heads", "num_kv_heads", "d_ff", "max_len"):
        assert getattr(found, name) == getattr(expected, name), name
    eagle = Files(tmp_path / "eagle", tiny_target, "eagle3", "vllm")
    sizes = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
    assert "kv_lora_rank 12" in eagle.error(eagle.raw | sizes)
    named = eagle.raw | {"architectures": ["Eagle3DeepseekV3ForCausalLM"]}
    assert "v_head_dim None, q_lora_rank None; expected all but q_lora_rank" in eagle.error(
        named | sizes | {"v_head_dim": None}
    )


@pytest.mark.parametrize("files", [case for case in CASES if case[0] == "mtp"], indirect=True, ids="-".join)
def test_a_layer_of_multi_token_prediction_has_the_settings_of_its_target(files: Files) -> None:
    place = (LAYER,) if LAYER in files.raw else ()
    for stated, words in (
        ({"rope_theta": 5e5}, "rope.theta 500000.0, not 10000.0"),
        ({"rms_norm_eps": 1e-5}, "norm_eps 1e-05"),
        ({ROPE: {"partial_rotary_factor": 0.5}}, "rope.rotary_dim 4, not 0"),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "other layers"),
        ({ROPE: {"rope_theta": 1e4}, "rope_theta": 5e5}, "rope_theta is 500000.0"),
    ):
        assert words in files.error(_with(files.raw, place, **stated))
    for stated in ({ROPE: {"rope_theta": 1e4}}, {"layer_types": ["full_attention"] * 6, "use_sliding_window": False}):
        assert files.read(_with(files.raw, place, **stated)) == files.drafter


def test_a_key_that_one_object_states_twice_is_refused(tmp_path: Path, tiny_target: Target) -> None:
    files = Files(tmp_path / "head", tiny_target, "eagle3", "vllm")
    text = json.dumps(files.raw)
    (files.folder / "config.json").write_text(
        text.replace('"hidden_size": 32', '"hidden_size": 16, "hidden_size": 32', 1)
    )
    with pytest.raises(SpecServeError, match="stated twice, and differently: hidden_size: 16 and 32"):
        load_head(files.folder, tiny_target, dtype="float32")
    (files.folder / "config.json").write_text(
        text.replace('"hidden_size": 32', '"hidden_size": 32, "hidden_size": 32', 1)
    )
    assert load_head(files.folder, tiny_target, dtype="float32").drafter == files.drafter


JUNK: tuple[Any, ...] = ("x", [1, "a"], {"rope_type": "yarn"}, -1, 2.5, True, 10**400)


@every
def test_whatever_a_key_holds_there_is_an_error_that_says_so_or_none(files: Files) -> None:
    """Never a crash, of the loader or of the doctor."""
    parts = [files.raw, *(value for value in files.raw.values() if isinstance(value, dict))]
    for part in parts:
        for key, kept in list(part.items()):
            for junk in JUNK:
                part[key] = junk
                with contextlib.suppress(SpecServeError):
                    files.read(files.raw)
            with contextlib.suppress(SpecServeError):
                doctor.examine(files.folder, files.target).to_json()
            part[key] = kept
