"""How a target is held where nobody says it: as its head was trained, or as its files store it where that is exact."""

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from specserve.checkpoints import form
from specserve.checkpoints.form import own_form
from specserve.kernels import native


@pytest.mark.parametrize("has_few_bits", [True, False])
@pytest.mark.parametrize("trained", ["none", "stored", "int8", "int4", "of a later version"])
def test_numbers_of_few_bits_stay_where_floats_would_give_the_same(has_few_bits, trained, monkeypatch):
    monkeypatch.setattr(form, "has_few_bits", lambda folder: has_few_bits)
    monkeypatch.setattr(native, "is_available", lambda: True)
    folder, is_said = Path("any"), trained in ("stored", "int8", "int4")
    assert own_form(trained, folder, None) == (trained if is_said else "stored" if has_few_bits else "none")
    over_devices = own_form(trained, folder, Mesh(np.array(jax.devices()[:1]), ("tensor",)))
    monkeypatch.setattr(native, "is_available", lambda: False)
    assert own_form(trained, folder, None) == over_devices == (trained if is_said else "none")
