"""The kinds of drafters that can be trained and served, one line each."""

from collections.abc import Mapping
from typing import Any

from specserve.checkpoints.source import BUNDLED_FOLDER
from specserve.drafters.words import DEFAULT_KIND, KindName
from specserve.interop.dflash.kind import DFlashKind
from specserve.interop.eagle3.kind import Eagle3Kind
from specserve.interop.kind import Kind
from specserve.interop.mtp.kind import MtpKind
from specserve.interop.peagle.kind import PEagleKind

KINDS: Mapping[KindName, Kind] = {
    "eagle3": Eagle3Kind(),
    "p-eagle": PEagleKind(),
    "mtp": MtpKind(),
    "dflash": DFlashKind("dflash"),
    "dspark": DFlashKind("dspark"),
    "dflash2": DFlashKind("dflash2"),
}
BUNDLED_HEAD_FOLDER = BUNDLED_FOLDER.parent / "pydoc-mtp"  # which the bundled target is served with


def kind_of(raw: Mapping[str, Any]) -> Kind:
    """Return the kind that a config.json is of. A config that none of them recognises goes to the default kind, which
    says what it lacks."""
    return next((kind for kind in KINDS.values() if kind.is_named(raw)), KINDS[DEFAULT_KIND])
