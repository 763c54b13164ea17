"""The choice of a round's answers among those that are kept: what is trained on, what is held out, and how much of it
one client may give."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from specserve.learn.traffic import ServedAnswer

HELD_OUT_SHARE = 5  # one prompt in five is held out, in every round the same ones
FEW = 16  # answers; where all other clients together gave fewer, the first one may give as many as it likes


@dataclass(frozen=True)
class Selection:
    """The answers of a round, the oldest first."""

    train: tuple[ServedAnswer, ...]
    held_out: tuple[ServedAnswer, ...]


def select(answers: Sequence[ServedAnswer], most_held_out: int) -> Selection:
    """Choose from answers, the oldest first. Of several to one prompt the newest is used. A prompt is trained on in
    every round or held out in every round, so nothing is measured on what was learnt. No client gives more than all
    others together, of either part, and what is held out is taken from the clients in turn: one that sends garbage
    neither fills the training nor judges it alone."""
    newest: dict[str, ServedAnswer] = {}
    for answer in reversed(answers):
        newest.setdefault(answer.key, answer)
    parts: tuple[list[ServedAnswer], list[ServedAnswer]] = ([], [])
    for key, answer in reversed(newest.items()):
        parts[int(key, 16) % HELD_OUT_SHARE == 0].append(answer)
    train, held_out = map(shared_out, parts)
    return Selection(train, _in_turn(held_out, most_held_out))


def shared_out(answers: Sequence[ServedAnswer]) -> tuple[ServedAnswer, ...]:
    """Return the answers without the oldest ones of a client that gave more than all others together."""
    counts = Counter(answer.client for answer in answers)
    (client, number), *_ = counts.most_common(1) or [("", 0)]
    others = len(answers) - number
    to_drop = number - others if others >= FEW else 0
    kept = []
    for answer in answers:
        if answer.client == client and to_drop > 0:
            to_drop -= 1
        else:
            kept.append(answer)
    return tuple(kept)


def _in_turn(answers: Sequence[ServedAnswer], most: int) -> tuple[ServedAnswer, ...]:
    """Return at most so many answers: the newest of each client, then the one before it of each, and so on."""
    turns: defaultdict[str, int] = defaultdict(int)
    ranked = []
    for number, answer in enumerate(reversed(answers)):
        ranked.append((turns[answer.client], number, answer))
        turns[answer.client] += 1
    return tuple(answer for _, _, answer in sorted(ranked, key=lambda each: each[:2])[:most])
