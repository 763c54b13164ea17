"""The settings of `specserve data regenerate` (see `config`)."""

from typing import Literal

from pydantic.dataclasses import dataclass

from specserve.config import RULES, setting
from specserve.serve.settings import HeadRun
from specserve.speculative.ranges import Temperature, TopK, TopP


@dataclass(frozen=True, config=RULES)
class RegenerateRun(HeadRun):
    """The settings of `specserve data regenerate`."""

    target: str = setting("pydoc", help="preset, Hugging Face folder, GGUF file or hub id of the answering model")
    speculation: str = setting(
        "",
        help="as of `serve`; changes no token. Empty: auto where there is a head, off on CPUs for 8 or more at once",
    )
    source: tuple[str, ...] = setting(
        ("pydoc",), help="questions: pydoc, self, data sets by name, owner/name of the hub, or files, as of `train`"
    )
    columns: tuple[str, ...] = setting((), help="what the columns of a source hold, as data.columns of `train`")
    output: str = setting("regenerated.jsonl", help="file that rows are appended to; answered ones are skipped")
    count: int = setting(2000, help="conversations, drawn by the seed; 0: all", ge=0)
    self_turns: int = setting(
        2, help="how often the user speaks in each conversation of the source self, at most", ge=1
    )
    self_openings: str = setting(
        "varied", help="first words of half of its questions, as data.self_openings of `train`"
    )
    samples: int = setting(1, help="rows per conversation, each drawn anew", ge=1)
    max_tokens: int = setting(256, help="longest answer", ge=1)
    temperature: Temperature = setting(0.0, help="0 is greedy")
    top_p: TopP = setting(1.0, help="draw from the most likely tokens that together reach this probability")
    top_k: TopK = setting(0, help="draw from so many most likely tokens; 0: all")
    seed: int = setting(0, help="which conversations are drawn, and the sampling", ge=0)
    thinking: Literal["keep", "drop"] = setting("keep", help="reasoning in the rows")
    enable_thinking: Literal["", "true", "false"] = setting(
        "", help="reasoning, as a variable of the chat template; empty: not given"
    )
    template_kwargs: tuple[str, ...] = setting(
        (), help="variables of the chat template, as data.template_kwargs of `train`"
    )
    cut: Literal["keep", "drop"] = setting("keep", help="answers that end at max_tokens")
    max_slots: int = setting(
        0, help="answers at once, at most, as memory has room; 0: 16 on a CPU, 64 for each data rank elsewhere", ge=0
    )
    max_model_len: int = setting(
        1024,
        help="prompt and answer together; 0: the target's context, at most 4,096; longer questions are left out",
        ge=0,
    )
    ray: bool = setting(False, help="have several engines answer, each in a worker of a Ray cluster")
    ray_address: str = setting(
        "", help="host:port of the cluster; auto: the one on this machine; empty: one of its own, on this machine alone"
    )
    num_workers: int = setting(1, help="engines, with ray; the mesh is that of each", ge=1)
