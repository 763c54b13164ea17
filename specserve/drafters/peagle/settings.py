"""The settings of a P-EAGLE head: those of its network, and those of its masked positions."""

from pydantic.dataclasses import dataclass

from specserve.config import RULES
from specserve.drafters.eagle3.settings import NetworkSettings
from specserve.drafters.settings import MaskSettings


@dataclass(frozen=True, config=RULES)
class PEagleSettings(NetworkSettings, MaskSettings):
    """The settings of a network with masked positions."""
