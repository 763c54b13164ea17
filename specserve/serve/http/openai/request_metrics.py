"""The `metrics` object of a reply, in vLLM's words: the times and the speculation of its one sequence. The server's
flags say what is in it."""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from specserve.serve.http.openai.replies import Json
from specserve.serve.requests.request import SpeculationStats

Detail = Literal["none", "summary", "detailed"]


@dataclass(frozen=True)
class RequestMetrics:
    """The settings of the `metrics` object: whether it has times, and in how much detail it describes speculation."""

    has_times: bool = False
    speculation: Detail = "none"

    def spell(self, stats: SpeculationStats, num_tokens: int) -> Json | None:
        """Return the object for a sequence that has ended, of so many new tokens, or None where it would be empty."""
        spelled: Json = _times(stats, num_tokens) if self.has_times else {}
        if self.speculation != "none":
            spelled["speculative_decoding"] = _speculation(stats, self.speculation) if stats.max_accepted else None
        return spelled or None


def _times(stats: SpeculationStats, num_tokens: int) -> Json:
    """Return the times in milliseconds. As in vLLM, the time to the first token begins where the time in the queue
    ends."""
    inference = stats.prefill_seconds + stats.decode_seconds
    return {
        "queue_time_ms": 1e3 * stats.queue_seconds,
        "time_to_first_token_ms": 1e3 * stats.prefill_seconds,
        "generation_time_ms": 1e3 * stats.decode_seconds,
        "mean_itl_ms": 1e3 * stats.decode_seconds / (num_tokens - 1) if num_tokens > 1 else None,
        "tokens_per_second": num_tokens / inference if inference else None,
    }


def _speculation(stats: SpeculationStats, detail: Detail) -> Json:
    accepted = Counter(n_accepted for _, n_accepted in stats.drafts)
    num_draft_tokens, num_accepted = stats.num_draft_tokens, stats.num_accepted
    spelled: Json = {
        "mean_acceptance_length": 1.0 + num_accepted / max(1, stats.num_drafts),
        "draft_acceptance_rate": num_accepted / max(1, num_draft_tokens),
        "acceptance_histogram": [accepted[n] for n in range(stats.max_accepted + 1)],
        "num_spec_steps": stats.num_drafts,
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": num_draft_tokens,
        "num_spec_tokens": stats.max_accepted,
    }
    if detail == "detailed":
        spelled["per_step_accepted"] = [n_accepted for _, n_accepted in stats.drafts]
        spelled["per_step_drafted"] = [num_drafted for num_drafted, _ in stats.drafts]
    return spelled
