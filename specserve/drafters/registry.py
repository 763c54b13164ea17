"""The kinds of drafters that can be trained and served, one line each."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specserve.drafters.door import Kind
from specserve.drafters.eagle3.kind import Eagle3Kind

KINDS: Mapping[str, Kind] = {"eagle3": Eagle3Kind()}
DEFAULT = "eagle3"
BUNDLED_HEAD_FOLDER = Path(__file__).parent.parent / "targets" / "pydoc-eagle3"  # of the bundled target


def kind_of(raw: Mapping[str, Any]) -> Kind:
    """The kind that a config.json is of. One that none of them recognises goes to the default, which says what it
    lacks."""
    return next((kind for kind in KINDS.values() if kind.is_named(raw)), KINDS[DEFAULT])
