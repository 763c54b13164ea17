"""The file formats of heads by kind. A kind of `drafters.registry` that has no line here is written in the plain format
of `HeadFormat`."""

from collections.abc import Mapping
from typing import Any

from specserve.drafters.registry import DEFAULT_KIND, KINDS
from specserve.interop.dflash.files import DFlashFormat
from specserve.interop.eagle3.files import Eagle3Format
from specserve.interop.format import HeadFormat
from specserve.interop.mtp.files import MtpFormat
from specserve.interop.peagle.files import PEagleFormat

FORMATS: Mapping[str, HeadFormat] = {
    "eagle3": Eagle3Format("eagle3"),
    "p-eagle": PEagleFormat("p-eagle"),
    "mtp": MtpFormat("mtp"),
    "dflash": DFlashFormat("dflash"),
    "dspark": DFlashFormat("dspark"),
    "dflash2": DFlashFormat("dflash2"),
    "domino": DFlashFormat("domino"),
}


def format_for(kind: str) -> HeadFormat:
    """Return the format of a kind."""
    return FORMATS.get(kind) or HeadFormat(kind)


def format_of(raw: Mapping[str, Any]) -> HeadFormat:
    """Return the format that a config.json is in. A config that none of them recognises goes to that of the default
    kind, which names what it lacks."""
    return next((found for found in map(format_for, KINDS) if found.is_named(raw)), format_for(DEFAULT_KIND))
