"""The settings of block drafters."""

from typing import Literal

from pydantic.dataclasses import dataclass

from specserve.config import RULES, setting
from specserve.drafters.settings import MaskSettings, WindowSettings


@dataclass(frozen=True, config=RULES)
class BlockSettings(WindowSettings, MaskSettings):
    """The settings of a drafter that fills a block of masked positions."""

    causal: Literal["", "all", "none"] = setting(
        "", help="of a block drafter: layers whose masked positions see those before them alone; empty: with a window"
    )
    sinks: bool = setting(False, help="of a block drafter: heads may attend to nothing, by a learned sink each")


@dataclass(frozen=True, config=RULES)
class JointSettings(BlockSettings):
    """The settings of a block drafter whose positions depend on each other."""

    rank: int = setting(0, help="of a block drafter's joint head; 0: half the target's width, at most 256", ge=0)


@dataclass(frozen=True, config=RULES)
class MarkovSettings(JointSettings):
    """The settings of a block drafter with a bias by the tokens before."""

    markov: Literal["vanilla", "gated", "rnn"] = setting(
        "vanilla",
        help="of a dspark drafter's bias: by the token before, also gated by the position, or by all before",
    )
