"""The settings of an EAGLE-3 head, and of others on its network."""

from pydantic.dataclasses import dataclass

from specserve.config import RULES, setting
from specserve.drafters.settings import WidthSettings, WindowSettings


@dataclass(frozen=True, config=RULES)
class NetworkSettings(WidthSettings, WindowSettings):
    """The switches of the network."""

    qk_norm: bool = setting(False, help="norm queries and keys, as the layers of a Qwen3 do")
    fc_norm: bool = setting(False, help="normalise each tapped state before fusing (version 3.1)")


@dataclass(frozen=True, config=RULES)
class Eagle3Settings(NetworkSettings):
    """The switches of a head that runs ahead over its own states."""

    norm_output: bool = setting(False, help="hand the normed state to the next draft step (version 3.1)")
