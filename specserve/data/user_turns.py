"""The place in a chat where the user writes: the tokens before a user's words, and what ends them.

A model that was trained on whole chats can write the user's part too, where it is asked to go on from there. So a
target asks the questions that it is used to (Magpie, arXiv 2406.08464).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specserve.chat_template import Messages
from specserve.errors import DataError, RequestError
from specserve.tokenizer import Tokenizer

_PLACEHOLDER = "\ue000"  # a private character, which no template writes of itself


@dataclass(frozen=True)
class UserTurn:
    """A chat up to where the user's next words begin, and what follows them there."""

    prompt: list[int]
    end_ids: tuple[int, ...]  # the special tokens that may end them
    end_text: str  # the text that ends them where no special token does; empty: there is none


def next_user_turn(
    tokenizer: Tokenizer, messages: Messages = (), *, template_kwargs: Mapping[str, Any] | None = None
) -> UserTurn:
    """Find where the user writes after these messages: what the template writes around a user's words. Raises DataError
    where the target has no chat template, or its template rejects the messages or does not show the words."""
    asked = [*messages, {"role": "user", "content": _PLACEHOLDER}]
    try:
        text = tokenizer.template.render(asked, template_kwargs=template_kwargs)
    except RequestError as error:
        raise DataError(f"the user's turn cannot be found: {error}") from error
    before, found, after = text.rpartition(_PLACEHOLDER)
    if not found:
        raise DataError(
            "the user's turn cannot be found: the chat template does not write the user's words as they are"
        )
    # a space before the words is a part of the first of them in most vocabularies
    prompt = tokenizer.encode(before.rstrip(" "), add_special_tokens=False)
    special = min(tokenizer.special_tokens_in(after), key=after.find, default="")
    end_text = after.partition(special)[0].strip() if special else after.strip()
    following = tokenizer.encode(after, add_special_tokens=False)
    first = [token_id for token_id in following if token_id in tokenizer.special_token_ids][:1]
    end_ids = tuple(sorted({*tokenizer.end_ids, *first}))
    if not (end_ids or end_text):
        raise DataError("the user's turn cannot be found: nothing in the chat template ends the user's words")
    return UserTurn(prompt, end_ids, end_text)
