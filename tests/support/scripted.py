"""An engine whose answers are written down, for what asks and reads them."""

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import chats

from specserve.data.conversations import Conversation, Message
from specserve.serve.requests.request import Delta, FinishReason, SamplingParams, SpeculationStats


class Scripted:
    """An engine whose target says `reply(prompt, seed)`, and ends sequences in any order."""

    def __init__(self, family: str, reply: Callable[[str, int], str], max_model_len: int = 200) -> None:
        self.tokenizer, self.vocabulary = chats.load(family), chats.vocabulary()
        ends = [chats.FAMILIES[family]["eos_token"], *chats.FAMILIES[family]["ends"]]
        self.eos_ids = frozenset(self.vocabulary.get_vocab()[token] for token in ends)
        self.max_model_len, self.runner = max_model_len, SimpleNamespace(shapes=SimpleNamespace(num_slots=2))
        self.reply, self.prompts, self.fails = reply, list[str](), False
        self._delays = random.Random(0)

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, on_delta: Callable[[Delta], None]) -> Any:
        prompt = self.tokenizer.decode(prompt_ids, skip_special_tokens=False)
        self.prompts.append(prompt)
        token_ids = self.vocabulary.encode(self.reply(prompt, params.seed or 0), add_special_tokens=False).ids
        token_ids = tuple([*token_ids, min(self.eos_ids)][: params.max_tokens])
        is_done = token_ids[-1] in self.eos_ids
        reason = FinishReason.STOP if is_done else FinishReason.LENGTH
        if self.fails:
            reason = FinishReason.CANCELLED
        stats = SpeculationStats(num_steps=len(token_ids), accepted_per_depth=(len(token_ids),))
        hidden = self.tokenizer.special_token_ids - {*params.shown_special_ids}
        shown = [token_id for token_id in token_ids if token_id not in hidden]
        text = self.tokenizer.decode(shown, skip_special_tokens=False)
        delta = Delta(token_ids, text, reason, stats=stats)
        threading.Timer(self._delays.random() * 0.01, on_delta, [delta]).start()
        return SimpleNamespace(cancel=lambda: None)


def is_users(prompt: str) -> bool:
    """Return whether the user speaks where the prompt ends."""
    return prompt.rpartition("<|im_start|>")[2].startswith("user\n") and not prompt.endswith("<|im_end|>\n")


def echo(prompt: str, seed: int) -> str:
    """Its own words for every question: how much was said, and the question."""
    asked = prompt.rpartition("user\n")[2].partition("<|im_end|>")[0]
    return f"<think>\nhm {seed % 97}\n</think>\n\n{prompt.count('<|im_start|>')} of {asked}"


def ask(*contents: str, first: str = "user") -> Conversation:
    roles = itertools.cycle(("user", "assistant"))
    messages = [Message(next(roles), content) for content in contents]
    if first == "system":
        messages.insert(0, Message("system", "Be brief."))
    return Conversation(tuple(messages), "docs", "here:1")
