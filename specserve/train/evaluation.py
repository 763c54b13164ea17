"""The held-out prompts of a run, measured in all the ways that its settings ask for."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import Mesh

from specserve.checkpoints.load import Target, in_few_bits
from specserve.data.dataset import Prompt
from specserve.drafters.interface import TrainedDrafter
from specserve.drafters.settings import DraftQuantization
from specserve.speculative.acceptance import Acceptance
from specserve.train.acceptance import AcceptanceMeter, ArmAcceptance, arms
from specserve.train.settings import EvalSettings


@dataclass(frozen=True)
class Measurement:
    """The results of measuring a head, by arm. The run's own arm, which is the first speculation at the first
    temperature, comes first."""

    arms: tuple[ArmAcceptance, ...]
    num_skipped: int  # prompts that do not fit the context
    identity: str  # of the evaluator

    @property
    def tau(self) -> float:
        """The mean number of tokens that a step of the run's own arm emits. By it the best head is chosen."""
        return self.arms[0].total.tau

    def to_json(self) -> dict[str, Any]:
        """Return the entries that the metrics and the head's notes keep of this measurement."""
        first = self.arms[0].total
        return {
            "tau": first.tau,
            "accept_rate": list(first.accept_rate),
            "arms": {found.arm.name: _arm_json(found) for found in self.arms},
            "skipped_prompts": self.num_skipped,
            "measurement": self.identity,
        }


class HeldOutEvaluator:
    """Measures a head on the run's held-out prompts: the first arm while the run goes on, all of them at its end. The
    programs are compiled once, at the first measurement that needs them."""

    def __init__(
        self,
        target: Target,
        drafter: TrainedDrafter,
        target_ids: np.ndarray,  # [draft_vocab] int32
        prompts: Sequence[Prompt],
        settings: EvalSettings,
        *,
        quantization: DraftQuantization = "none",  # of the head where it will be served
        seed: int,
        mesh: Mesh | None = None,  # the target is spread over it
    ) -> None:
        """Raises ConfigError where an arm cannot be measured, DataError where no prompt fits the context."""
        self._arms = arms(settings.speculation, settings.temperature)
        self._target_ids = target_ids
        self._quantization: DraftQuantization = quantization
        asked = str([(prompt.source, tuple(prompt.token_ids)) for prompt in prompts])
        digest = hashlib.sha256(asked.encode()).hexdigest()[:8]
        self.identity = f"{self._arms[0].name}, {settings.eval_tokens} tokens, {len(prompts)} prompts ({digest})"
        self._meter = AcceptanceMeter(
            target, drafter, self._arms, prompts, max_new_tokens=settings.eval_tokens, seed=seed, mesh=mesh
        )

    def measure(self, params: Any, *, is_last: bool) -> Measurement:
        if self._quantization != "none":
            params = in_few_bits(params, self._quantization)
        chosen = self._arms[:1]
        if is_last:
            chosen = self._arms
        found = tuple(self._meter.measure(params, self._target_ids, arm) for arm in chosen)
        return Measurement(found, self._meter.num_skipped, self.identity)


def _arm_json(found: ArmAcceptance) -> dict[str, Any]:
    return {
        "speculation": found.arm.speculation,
        "temperature": found.arm.temperature,
        **_acceptance_json(found.total),
        "by_source": {source: _acceptance_json(acceptance) for source, acceptance in found.by_source.items()},
    }


def _acceptance_json(acceptance: Acceptance) -> dict[str, Any]:
    return {"tau": acceptance.tau, "accept_rate": list(acceptance.accept_rate), "steps": acceptance.num_steps}
