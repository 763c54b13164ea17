"""The kinds of drafters with weights, one line each. It imports no arrays, so that a command's help
is quick: what makes a drafter of a kind is imported when `load_kind` is called."""

import dataclasses
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pydantic.dataclasses import dataclass as settings_dataclass

from specserve.config import RULES
from specserve.drafters.dflash.settings import BlockSettings, JointSettings
from specserve.drafters.eagle3.settings import Eagle3Settings
from specserve.drafters.peagle.settings import PEagleSettings
from specserve.drafters.settings import HeadSettings, WidthSettings
from specserve.errors import ConfigError

if TYPE_CHECKING:
    from specserve.drafters.interface import Kind


@dataclass(frozen=True)
class KindEntry:
    """A line of the registry."""

    kind: str  # "module:name" of its `interface.Kind`
    settings: type[HeadSettings] = HeadSettings  # the settings of a head that it has a use for
    is_trained: bool = True  # here; otherwise it is served as it was published

    @property
    def setting_names(self) -> frozenset[str]:
        return frozenset(field.name for field in dataclasses.fields(self.settings))


KINDS: dict[str, KindEntry] = {
    "eagle3": KindEntry("specserve.drafters.eagle3.drafter:EAGLE3", Eagle3Settings),
    "p-eagle": KindEntry("specserve.drafters.peagle.drafter:PEAGLE", PEagleSettings),
    "mtp": KindEntry("specserve.drafters.mtp.drafter:MTP", WidthSettings),
    "dflash": KindEntry("specserve.drafters.dflash.drafter:DFLASH", BlockSettings),
    "dspark": KindEntry("specserve.drafters.dflash.drafter:DSPARK", JointSettings),
    "dflash2": KindEntry("specserve.drafters.dflash.drafter:DFLASH2", JointSettings),
    "language-model": KindEntry("specserve.drafters.language_model.drafter:LANGUAGE_MODEL", is_trained=False),
    "gemma4-assistant": KindEntry("specserve.drafters.gemma_assistant.drafter:ASSISTANT", is_trained=False),
}
DEFAULT_KIND = "eagle3"
WHOLE = "language-model"  # a draft that is a whole model of its own
CARRIED = "mtp"  # in the place of a head's folder: the layer that the target's own checkpoint carries


def load_kind(name: str) -> "Kind":
    """Import what makes drafters of a kind."""
    module, _, kind = KINDS[name].kind.partition(":")
    return getattr(importlib.import_module(module), kind)


def check_trained(kind: str, given: str) -> None:
    """Check that drafters of a kind are trained here, of whatever was given. Raises ConfigError."""
    if not KINDS[kind].is_trained:
        others = ", ".join(name for name, entry in KINDS.items() if entry.is_trained)
        raise ConfigError(
            f"{given}: that is a language model, which drafts as it is; it is served (specserve serve --draft FOLDER), "
            f"and not trained or converted as heads are. Give a head, of the kinds {others}"
        )


if TYPE_CHECKING:
    KindName: TypeAlias = str

    class DraftSettings(HeadSettings):
        """For a type checker: the settings of all kinds are not known to it."""

        def __init__(self, **settings: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

else:
    KindName = Literal[tuple(name for name, entry in KINDS.items() if entry.is_trained)]
    _parts = dict.fromkeys(entry.settings for entry in KINDS.values())
    _bases = tuple(part for part in _parts if not any(part in other.__mro__[1:] for other in _parts))
    DraftSettings = settings_dataclass(frozen=True, config=RULES)(
        type("DraftSettings", _bases, {"__doc__": HeadSettings.__doc__, "__module__": __name__})
    )
