"""A fingerprint distinguishes models and does not care where they lie; records are JSON."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import specserve
from specserve import provenance
from specserve.errors import CheckpointError

CONFIG = {"model_type": "qwen3", "vocab_size": 8}


@pytest.fixture
def make_model(tmp_path):
    def make(name, config=None, **changes):
        """A model folder with 4 MB of weights; `changes` are byte offsets from the end of the file to flip."""
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config or CONFIG))
        weights = folder / "model.safetensors"
        note = {"note": "x" * 150_000}  # a long header, as many tensors would make
        save_file({"w": np.arange(1_000_000, dtype=np.float32)}, weights, note)
        content = bytearray(weights.read_bytes())
        for place in changes.values():
            content[place] ^= 1
        weights.write_bytes(content)
        return folder

    return make


def test_fingerprint_follows_content_not_place(make_model):
    original = provenance.fingerprint(make_model("a"))
    same = make_model("b", config=dict(reversed(CONFIG.items())))
    (same / "README.md").write_text("says nothing about the model")
    assert provenance.fingerprint(same) == original
    others = [
        make_model("c", config=CONFIG | {"vocab_size": 9}),
        make_model("d", header=100_000),
        make_model("e", first_weight=-4_000_000),
        make_model("f", last_weight=-1),
    ]
    assert len({original, *map(provenance.fingerprint, others)}) == 5
    (same / "model.safetensors").rename(same / "other.safetensors")
    assert provenance.fingerprint(same) != original


def test_fingerprint_of_a_broken_folder_is_an_error_or_a_value(make_model, tmp_path):
    broken = make_model("a")
    (broken / "model.safetensors").write_bytes(b"\xff" * 9)  # a header that claims more than there is
    assert len(provenance.fingerprint(broken)) == 16
    (broken / "config.json").write_text("{")
    for folder in (broken, tmp_path):
        with pytest.raises(CheckpointError, match=str(folder)):
            provenance.fingerprint(folder)


def test_record_is_json_and_names_the_code_and_the_machine():
    record = provenance.collect()
    assert json.loads(json.dumps(record)) == record
    assert record["specserve"] == specserve.__version__
    assert {"python", "jax", "jaxlib", "device_kind", "num_devices", "utc_time", "argv"} <= record.keys()
