"""The tokens of a draft model in terms of the target's.

Where both tokenizers have the same id for each token, ids are what they are. Otherwise tokens are the same where their
text is: the draft reads such a token by its own id, and proposes these alone (the intersection of Timor et al. 2025,
arXiv 2502.05202). A target's token that the draft lacks is read as the last of the draft's tokens that spell its text,
because each token of a sequence has one entry, and what comes next depends most on what came last. Tokens that begin or
end a sequence are the same whatever they are called, unless the other tokenizer has their text. Nothing of this can
change a token: it decides about acceptance alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specserve.errors import CheckpointError
from specserve.tokenizer import Tokenizer


@dataclass(frozen=True)
class SharedTokens:
    """See `speculative.vocab.DraftVocab` for both arrays."""

    target_ids: np.ndarray  # [draft vocab] int32
    draft_ids: np.ndarray | None  # [vocab] int32
    what: str  # is shared, in words


def share_tokens(
    target: Tokenizer, draft: Tokenizer, *, vocab_size: int, draft_vocab_size: int, where: str
) -> SharedTokens:
    """Find the tokens that a draft can propose. The sizes are those of the models, which may be padded beyond their
    tokenizers'. Raises CheckpointError where they are too few, and where a tokenizer cannot say the text of its
    tokens."""
    if target.vocabulary() != draft.vocabulary():
        return _by_text(target, draft, vocab_size, draft_vocab_size, where)
    same = min(vocab_size, draft_vocab_size)
    target_ids, draft_ids = (np.arange(size, dtype=np.int32) for size in (draft_vocab_size, vocab_size))
    target_ids[same:] = -1
    draft_ids[same:] = _end_of(draft)  # rows that no token of the tokenizer stands for
    what = f"the tokenizer is the target's, of {target.vocab_size:,} tokens"
    return SharedTokens(target_ids, draft_ids if vocab_size > same else None, what)


def least_shared(vocab_size: int) -> int:
    """Return how many of a target's tokens a draft must be able to propose. Where the frequencies of tokens follow
    Zipf's law, the n most frequent of V make a share of about log n / log V of all text. With fewer than the square
    root of V even the best n make less than half, and a step emits less than two tokens however well they are
    proposed."""
    return math.isqrt(vocab_size)


def _by_text(target: Tokenizer, draft: Tokenizer, vocab_size: int, draft_vocab_size: int, where: str) -> SharedTokens:
    spelling = _speller(draft, where)
    texts = _texts(target, _speller(target, where))[:vocab_size]
    own_texts = _texts(draft, spelling)[:draft_vocab_size]
    id_of, own_id_of = _ids_of(target, texts), _ids_of(draft, own_texts)
    target_ids = np.full(draft_vocab_size, -1, np.int32)
    draft_ids = np.full(vocab_size, _end_of(draft), np.int32)
    for token_id, text in enumerate(texts):
        if text in own_id_of:
            draft_ids[token_id] = own_id_of[text]
        elif spelt := spelling.tokenize_bytes(text):
            draft_ids[token_id] = min(spelt[-1], draft_vocab_size - 1)
    for text in id_of.keys() & own_id_of.keys():
        target_ids[own_id_of[text]] = id_of[text]
    for its, own in ((target.bos_token_id, draft.bos_token_id), (target.eos_token_id, draft.eos_token_id)):
        if its is not None and own is not None and texts[its] not in own_id_of and own_texts[own] not in id_of:
            draft_ids[its], target_ids[own] = own, its
    shared, least = int((target_ids >= 0).sum()), least_shared(len(texts))
    what = f"{shared:,} of its {len(own_texts):,} tokens have the text of one of the target's {len(texts):,}"
    if shared < least:
        raise CheckpointError(
            f"{where}: {what}, and it can propose no others; with fewer than {least:,} even a perfect draft is "
            "accepted less than every other time. Give a draft whose tokenizer is nearer to the target's"
        )
    what += "; it proposes these alone, and reads each other one as the last of its own tokens that spell it"
    return SharedTokens(target_ids, draft_ids, what)


def _speller(tokenizer: Tokenizer, where: str) -> Any:
    """Return what knows the bytes of a tokenizer's tokens, and the tokens that spell bytes. Raises CheckpointError."""
    import llguidance  # as grammars do, when there is need of it

    try:
        return llguidance.LLTokenizer(tokenizer.as_json())
    except ValueError as error:
        raise CheckpointError(
            f"{where}: its tokens are not the target's, and cannot be compared by their texts ({error}); give a draft "
            "with the target's own tokenizer"
        ) from error


def _texts(tokenizer: Tokenizer, speller: Any) -> list[bytes]:
    return [speller.decode_bytes([token_id]) for token_id in range(tokenizer.vocab_size)]


def _ids_of(tokenizer: Tokenizer, texts: Sequence[bytes]) -> dict[bytes, int]:
    """Return the id of each text. Of several with the same text it is the first that is no byte's, where there are
    such: a vocabulary may have every byte beside its letters."""
    as_bytes = tokenizer.byte_token_ids()
    order = sorted(range(len(texts)), key=lambda token_id: (token_id not in as_bytes, -token_id))
    return {texts[token_id]: token_id for token_id in order if texts[token_id]}


def _end_of(tokenizer: Tokenizer) -> int:
    return tokenizer.eos_token_id or 0
