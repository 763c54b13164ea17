"""The file formats of heads by kind. A kind of `drafters.registry` that has no line here is written in the plain format
of `HeadFormat`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specserve.checkpoints.tensors import CONFIG, read_json
from specserve.drafters.registry import DEFAULT_KIND, KINDS, WHOLE
from specserve.errors import CheckpointError
from specserve.interop.assistant import AssistantFormat
from specserve.interop.dflash.files import DFlashFormat
from specserve.interop.eagle3.files import Eagle3Format
from specserve.interop.format import ARCHITECTURE, KIND, HeadFormat
from specserve.interop.language_model.files import LanguageModelFormat, is_language_model
from specserve.interop.mtp.files import MtpFormat
from specserve.interop.peagle.files import PEagleFormat

_MADE: Mapping[str, type[HeadFormat]] = {
    "eagle3": Eagle3Format,
    "p-eagle": PEagleFormat,
    "mtp": MtpFormat,
    **dict.fromkeys(("dflash", "dspark", "dflash2", "domino"), DFlashFormat),
    "language-model": LanguageModelFormat,
    "gemma4-assistant": AssistantFormat,
}
FORMATS = {kind: make(kind) for kind, make in _MADE.items()}


def format_for(kind: str) -> HeadFormat:
    """Return the format of a kind."""
    return FORMATS.get(kind) or HeadFormat(kind)


def format_named(raw: Mapping[str, Any]) -> HeadFormat | None:
    """Return the format that a config.json names; None where it names none that is known."""
    return next((found for found in map(format_for, KINDS) if found.is_named(raw)), None)


def format_of(folder: Path) -> HeadFormat:
    """Return the format that a folder is in. One that none of them recognises goes to that of the default kind, which
    names what it lacks. Raises CheckpointError where there is no config.json."""
    raw = read_json(folder / CONFIG)
    if raw.get("architectures") == [ARCHITECTURE] and raw.get(KIND) not in KINDS:
        raise CheckpointError(
            f"{folder}: a head of the kind {raw.get(KIND)!r}, which is none of {', '.join(KINDS)}; name its module "
            "with --drafter-module, where the command takes that"
        )
    return format_named(raw) or format_for(WHOLE if is_language_model(folder, raw) else DEFAULT_KIND)
