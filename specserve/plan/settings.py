"""The settings of `specserve plan serve` (see `config`)."""

from typing import Literal

from pydantic.dataclasses import dataclass

from specserve.config import RULES, setting
from specserve.drafters.registry import DEFAULT_KIND, KindName


@dataclass(frozen=True, config=RULES)
class PlanServeRun:
    """The settings of `specserve plan serve`."""

    target: str = setting("pydoc", rank=1, help="preset, or folder of a config.json, as of `train --dry-run`")
    devices: str = setting(
        rank=2, help="kind and number of chips, such as h100-16 (`specserve plan devices` lists the kinds)"
    )
    qps: float = setting(1.0, rank=3, help="requests per second", gt=0)
    prompt: int = setting(1000, rank=4, help="tokens of a prompt", ge=1)
    answer: int = setting(500, rank=5, help="tokens of an answer", ge=1)
    shared_prompt: int = setting(
        0, help="tokens at the beginning of a prompt that others share, such as a system prompt's", ge=0
    )
    speculation: str = setting("chain:3", help="one shape, as of `serve`: off, a chain or a tree")
    drafter: KindName = setting(DEFAULT_KIND, help="kind of the head, as `train` would make it for the target")
    draft: str = setting(
        "", help="in place of a head: a language model that drafts, a preset or a folder of a config.json"
    )
    tau: float = setting(
        0.0, help="tokens per step that speculation brings; 0: as published, of the nearest target", ge=0
    )
    quantization: Literal["none", "int8", "fp8", "int4"] = setting(
        "none",
        help="weights of the target in few bits, as of `serve`; int4 takes 5 on one device, 10 over a mesh",
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "int8", "fp8"] = setting(
        "auto", help="of the pages, as of `serve`; float32 is for CPUs"
    )
    mesh: str = setting("", help="devices of a replica by axis, as of `serve`; empty: the one with the fastest tokens")
    max_slots: int = setting(256, help="sequences that run at once in a replica, at most", ge=1)
    page_size: int = setting(0, help="tokens per cache page; 0: as `serve` chooses for such devices", ge=0)
    compile: bool = setting(
        False, help="also compile the steps for the devices, which need not be here, and print what the compiler counts"
    )
    json: bool = setting(False, help="print JSON instead of tables")
