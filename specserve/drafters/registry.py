"""The kinds of drafters that can be trained and served, one line each. It imports no arrays, so that a command's help
is quick: what makes a drafter of a kind is imported when `load_kind` is called."""

import dataclasses
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pydantic.dataclasses import dataclass as settings_dataclass

from specserve.config import RULES
from specserve.drafters.dflash.settings import BlockSettings, JointSettings, MarkovSettings
from specserve.drafters.eagle3.settings import Eagle3Settings
from specserve.drafters.peagle.settings import PEagleSettings
from specserve.drafters.settings import HeadSettings, WidthSettings

if TYPE_CHECKING:
    from specserve.drafters.interface import Kind


@dataclass(frozen=True)
class KindEntry:
    """A line of the registry."""

    kind: str  # "module:name" of its `interface.Kind`
    settings: type[HeadSettings] = HeadSettings  # the settings of a head that it has a use for

    @property
    def setting_names(self) -> frozenset[str]:
        return frozenset(field.name for field in dataclasses.fields(self.settings))


KINDS: dict[str, KindEntry] = {
    "eagle3": KindEntry("specserve.drafters.eagle3.drafter:EAGLE3", Eagle3Settings),
    "p-eagle": KindEntry("specserve.drafters.peagle.drafter:PEAGLE", PEagleSettings),
    "mtp": KindEntry("specserve.drafters.mtp.drafter:MTP", WidthSettings),
    "dflash": KindEntry("specserve.drafters.dflash.drafter:DFLASH", BlockSettings),
    "dspark": KindEntry("specserve.drafters.dflash.drafter:DSPARK", MarkovSettings),
    "dflash2": KindEntry("specserve.drafters.dflash.drafter:DFLASH2", JointSettings),
    "domino": KindEntry("specserve.drafters.dflash.drafter:DOMINO", JointSettings),
}
DEFAULT_KIND = "eagle3"
CARRIED = "mtp"  # in the place of a head's folder: the layer that the target's own checkpoint carries


def load_kind(name: str) -> "Kind":
    """Import what makes drafters of a kind."""
    module, _, kind = KINDS[name].kind.partition(":")
    return getattr(importlib.import_module(module), kind)


if TYPE_CHECKING:
    KindName: TypeAlias = str

    class DraftSettings(HeadSettings):
        """For a type checker: the settings of all kinds are not known to it."""

        def __init__(self, **settings: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

else:
    KindName = Literal[tuple(KINDS)]
    _parts = dict.fromkeys(entry.settings for entry in KINDS.values())
    _bases = tuple(part for part in _parts if not any(part in other.__mro__[1:] for other in _parts))
    DraftSettings = settings_dataclass(frozen=True, config=RULES)(
        type("DraftSettings", _bases, {"__doc__": HeadSettings.__doc__, "__module__": __name__})
    )
