"""The one reader of a server's /metrics, be it ours or vLLM's. Names of series are vLLM's, where vLLM has them. The
counts of several models or engines behind one address are added up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from specserve.speculative.acceptance import Acceptance

OWN_STEPS = "specserve:sequence_steps_total"  # plain ones of a server that speculates are among them
DRAFTS = "vllm:spec_decode_num_drafts_total"  # steps that verified draft tokens
DRAFT_TOKENS, ACCEPTED = "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"
BY_DEPTH = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
TOKENS = "vllm:generation_tokens_total"


@dataclass(frozen=True)
class Series:
    """The samples of one reading of /metrics."""

    samples: Mapping[str, Sequence[tuple[Mapping[str, str], float]]]  # name -> labels and value

    @classmethod
    def parse(cls, text: str) -> "Series":
        """Read the text of /metrics. Raises ValueError for what is no text of Prometheus."""
        samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
        return cls(samples)

    def total(self, *names: str) -> float | None:
        """Return the sum of the first of these series that is there, or None where none is."""
        found = next((self.samples[name] for name in names if name in self.samples), None)
        return None if found is None else sum(value for _, value in found)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return the sums of a series by the values of a label."""
        found: dict[str, float] = {}
        for labels, value in self.samples.get(name, ()):
            found[labels.get(label, "")] = found.get(labels.get(label, ""), 0.0) + value
        return found

    def acceptance(self, *steps: str) -> Acceptance | None:
        """Return what was counted of speculation since the server started. Steps are counted by the first of these
        counters that is there; None where none is."""
        num_steps = self.total(*steps)
        if num_steps is None:
            return None
        by_depth = {int(depth): int(count) for depth, count in self.by(BY_DEPTH, "position").items()}
        per_depth = tuple(by_depth.get(d, 0) for d in range(max(by_depth, default=-1) + 1))
        return Acceptance(
            int(num_steps), int(self.total(DRAFT_TOKENS) or 0), per_depth or (int(self.total(ACCEPTED) or 0),)
        )
