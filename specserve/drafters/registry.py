"""The kinds of drafters with weights, one line each. It imports no arrays, so that a command's help
is quick: what makes a drafter of a kind is imported when `load_kind` is called."""

import dataclasses
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import AfterValidator, WithJsonSchema
from pydantic.dataclasses import dataclass as settings_dataclass

from specserve.config import RULES
from specserve.drafters.dflash.settings import BlockSettings, JointSettings, MarkovSettings
from specserve.drafters.eagle3.settings import Eagle3Settings
from specserve.drafters.peagle.settings import PEagleSettings
from specserve.drafters.settings import HeadSettings, WidthSettings
from specserve.errors import ConfigError, first_line

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
    "dspark": KindEntry("specserve.drafters.dflash.drafter:DSPARK", MarkovSettings),
    "dflash2": KindEntry("specserve.drafters.dflash.drafter:DFLASH2", JointSettings),
    "language-model": KindEntry("specserve.drafters.language_model.drafter:LANGUAGE_MODEL", is_trained=False),
    "gemma4-assistant": KindEntry("specserve.drafters.gemma_assistant.drafter:ASSISTANT", is_trained=False),
    "domino": KindEntry("specserve.drafters.dflash.drafter:DOMINO", JointSettings),
}
_NAMES = [name for name, entry in KINDS.items() if entry.is_trained]  # as help and errors list them
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
        what = (
            "that is a language model, which drafts as it is" if kind == WHOLE else f"{kind} drafts as it is published"
        )
        raise ConfigError(
            f"{given}: {what}; it is served (specserve serve --draft FOLDER), and not trained or converted as heads "
            f"are. Give a head, of the kinds {', '.join(_NAMES)}"
        )


def register(kind: "Kind", place: str) -> None:
    """Add a kind from outside, which `place` ("module:name") names, under the name of its drafters. Raises ConfigError
    where another kind has that name."""
    name = getattr(getattr(kind, "drafter", None), "name", None)
    if not isinstance(name, str):
        raise ConfigError(f"{place} is no drafters.interface.Kind whose class of drafters has a `name`")
    if name in KINDS and KINDS[name].kind != place:
        raise ConfigError(f"{place}: its drafters are named {name!r}, as those of {KINDS[name].kind}; rename them")
    KINDS[name] = KindEntry(place)
    if name not in _NAMES:
        _NAMES.append(name)


def add_module(path: str) -> str:
    """Import a drafter from outside by its import path, "package.module:NAME" of a `Kind`, or "package.module" of a
    module that calls `register`; an empty one adds nothing. Returns the path. Raises ConfigError."""
    if not path:
        return path
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module)
    except Exception as error:  # other people's code may raise anything
        raise ConfigError(
            f"drafter_module {path!r} cannot be imported ({first_line(error)}); is its folder on PYTHONPATH?"
        ) from error
    if name:
        if not hasattr(found, name):
            raise ConfigError(f"drafter_module {path!r}: {found.__file__} has no {name}")
        register(getattr(found, name), path)
    elif not any(entry.kind.partition(":")[0].split(".")[0] == module.split(".")[0] for entry in KINDS.values()):
        raise ConfigError(
            f"drafter_module {path!r} registers nothing; call drafters.registry.register there, or name a Kind of it: "
            f"{module}:NAME"
        )
    return path


def outside_kinds() -> list[str]:
    """Return the places ("module:name") of the kinds from outside, as `add_module` takes them."""
    own = f"{__name__.split('.')[0]}."
    return [entry.kind for entry in KINDS.values() if not entry.kind.startswith(own)]


def outside_files() -> list[Path]:
    """Return the files of the kinds from outside, whose code programs are made of: all that is imported of their
    packages."""
    roots = {place.partition(":")[0].split(".")[0] for place in outside_kinds()}
    loaded = list(sys.modules.copy().items())  # a copy at once: other threads import meanwhile
    modules = [module for name, module in loaded if name.split(".")[0] in roots]
    return sorted({Path(file) for module in modules if (file := getattr(module, "__file__", None))})


def _known(name: str) -> str:
    if name not in KINDS:
        raise ValueError(name)
    check_trained(name, f"--drafter {name}")
    return name


if TYPE_CHECKING:
    KindName: TypeAlias = str
    ModulePath: TypeAlias = str

    class DraftSettings(HeadSettings):
        """For a type checker: the settings of all kinds are not known to it."""

        def __init__(self, **settings: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

else:
    ModulePath = Annotated[str, AfterValidator(add_module)]
    KindName = Annotated[str, AfterValidator(_known), WithJsonSchema({"type": "string", "enum": _NAMES})]
    _parts = dict.fromkeys(entry.settings for entry in KINDS.values())
    _bases = tuple(part for part in _parts if not any(part in other.__mro__[1:] for other in _parts))
    DraftSettings = settings_dataclass(frozen=True, config=RULES)(
        type("DraftSettings", _bases, {"__doc__": HeadSettings.__doc__, "__module__": __name__})
    )
