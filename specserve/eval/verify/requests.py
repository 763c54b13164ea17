"""The requests of `specserve verify`: the same prompts greedily and sampled, longer ones that begin like them, and
every option of a request."""

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specserve.serve.engine.interface import TokenizerLike
from specserve.serve.requests.completion import CompletionOutput
from specserve.serve.requests.request import GrammarSpec, SamplingParams

NUM_LOGPROBS = 5
SEEDS = (1, 2**40 + 2, -3)  # of both halves of the 64 bits, and a negative one


@dataclass(frozen=True, eq=False)
class ProofRequest:
    """A request of the proof. Its seed is set, so two runs of it must agree."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams

    @property
    def max_tokens(self) -> int:
        """The number of tokens of the answer, at most."""
        return self.params.max_tokens or 0

    @property
    def num_tokens(self) -> int:
        """The number of tokens of prompt and answer together, at most."""
        return len(self.prompt) + self.max_tokens


def base_requests(prompts: Sequence[Sequence[int]], max_tokens: int, seed: int) -> list[ProofRequest]:
    """Make a greedy request and a sampled one of every prompt."""
    requests = []
    for i, prompt in enumerate(prompts):
        options: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True, "logprobs": NUM_LOGPROBS}
        options["return_tree"] = True  # to compare what was proposed
        greedy = SamplingParams(temperature=0.0, seed=0, **options)
        sampled = SamplingParams(seed=SEEDS[i % len(SEEDS)] + seed + i, **options)
        requests += [
            ProofRequest(f"prompt {i}, greedy", tuple(prompt), greedy),
            ProofRequest(f"prompt {i}, sampled", tuple(prompt), sampled),
        ]
    return requests


def follow_ups(requests: Sequence[ProofRequest], answers: Sequence[CompletionOutput]) -> list[ProofRequest]:
    """Make the requests of a second turn: the prompt and its answer, whose pages a server has already."""
    return [
        dataclasses.replace(request, name=f"{request.name}, a second turn", prompt=(*request.prompt, *answer.token_ids))
        for request, answer in zip(requests, answers, strict=True)
    ]


def draw_requests(prompt: Sequence[int], number: int, max_tokens: int, seed: int) -> list[ProofRequest]:
    """Make requests of one prompt at temperature 1, with `number` seeds from this one on."""
    options: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True}
    seeds = range(seed, seed + number)
    return [ProofRequest(f"seed {each}", tuple(prompt), SamplingParams(seed=each, **options)) for each in seeds]


def option_requests(
    prompts: Sequence[Sequence[int]],
    answers: Sequence[CompletionOutput],  # greedy ones, whose tokens the options name
    tokenizer: TokenizerLike | None,
    *,
    max_tokens: int,
    seed: int,
    has_grammars: bool,
) -> list[ProofRequest]:
    """Make requests with every option, over the prompts in turn, greedily and sampled. Options that name tokens name
    some that the target would draw, so that each option changes answers."""
    counts = Counter(token_id for answer in answers for token_id in answer.token_ids)
    common = [token_id for token_id, _ in counts.most_common()]
    first, second = common[0], common[min(1, len(common) - 1)]
    middle = answers[0].token_ids[len(answers[0].token_ids) // 2]
    options: dict[str, dict[str, Any]] = {
        "temperature": {"temperature": 0.7},
        "top_p": {"top_p": 0.9},
        "top_k": {"top_k": 20},
        "min_p": {"min_p": 0.05},
        "top_p, top_k, min_p": {"top_p": 0.8, "top_k": 50, "min_p": 0.02},
        "presence_penalty": {"presence_penalty": 0.8},
        "frequency_penalty": {"frequency_penalty": 0.5},
        "repetition_penalty": {"repetition_penalty": 1.3},
        "logit_bias": {"logit_bias": {first: -4.0, second: 2.0}},
        "allowed_token_ids": {"allowed_token_ids": common[:1024]},
        "stop_token_ids": {"stop_token_ids": [middle]},
        "min_tokens": {"stop_token_ids": [middle], "min_tokens": max_tokens // 2},
        "speculation": {"speculation": 1},
        "end of sequence": {"ignore_eos": False},
        **_text_options(answers, tokenizer),
        **(_grammars() if tokenizer is not None and has_grammars else {}),
    }
    requests = []
    for i, (name, changes) in enumerate(options.items()):
        for temperature in (0.0, changes.get("temperature", 1.0)):
            given = {"ignore_eos": "grammar" not in changes, "seed": seed + i, "temperature": temperature}
            params = SamplingParams(**{"max_tokens": max_tokens, "logprobs": NUM_LOGPROBS, **changes, **given})
            if "ignore_eos" in changes:
                params = dataclasses.replace(params, ignore_eos=changes["ignore_eos"])
            how = "sampled" if temperature else "greedy"
            requests.append(ProofRequest(f"{name}, {how}", tuple(prompts[i % len(prompts)]), params))
    return requests


def _text_options(answers: Sequence[CompletionOutput], tokenizer: TokenizerLike | None) -> dict[str, dict[str, Any]]:
    """Make options that need a tokenizer: a bad word and a stop string that the target's own answers contain."""
    if tokenizer is None:
        return {}
    found: dict[str, dict[str, Any]] = {}
    texts = [tokenizer.decode([token_id]) for answer in answers for token_id in answer.token_ids]
    word = next((text.strip() for text in texts if text.strip().isalpha()), "")
    ids = answers[0].token_ids
    stop = tokenizer.decode(ids[len(ids) // 2 : len(ids) // 2 + 2])
    if word:
        found["bad_words"] = {"bad_words": [word]}
    if stop and "\ufffd" not in stop:
        found["stop"] = {"stop": [stop]}
    return found


def _grammars() -> dict[str, dict[str, Any]]:
    specs = [GrammarSpec("regex", "[a-z ]{4,40}"), GrammarSpec("choice", json.dumps(["yes", "no", "nobody knows"]))]
    return {f"grammar ({spec.kind})": {"grammar": spec} for spec in specs}
