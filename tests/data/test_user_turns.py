"""Laws of the place where the user writes: in the chat template of every family, the words that a target writes there
are those that the template would have written for a user who says them."""

import chats
import pytest

from specserve.data.user_turns import next_user_turn
from specserve.errors import DataError

WORDS = "what is one plus two?"


@pytest.mark.parametrize("messages", [[], chats.chat("one", "two"), chats.chat("one", "two", "three", "four")], ids=len)
@pytest.mark.parametrize("family", chats.NAMES)
def test_the_users_words_stand_where_the_template_writes_them(family: str, messages: list[dict[str, str]]) -> None:
    tokenizer = chats.load(family)
    turn = next_user_turn(tokenizer, messages)
    whole = tokenizer.template.render([*messages, {"role": "user", "content": WORDS}])
    before = tokenizer.decode(turn.prompt, skip_special_tokens=False)
    assert whole.startswith(before)
    said, _, after = whole[len(before) :].partition(WORDS)
    assert not said.strip(" ")
    following = tokenizer.encode(after, add_special_tokens=False)
    assert after.strip().startswith(turn.end_text or after.strip())
    assert turn.end_text or following[0] in turn.end_ids or not after.strip()
    assert tokenizer.end_ids <= {*turn.end_ids}


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "no chat template"),
        ("{% for m in messages %}{{ m.content | upper | replace('\ue000', '') }}{% endfor %}", "does not write"),
        ("{{ raise_exception('never') }}", "never"),
    ],
)
def test_a_template_without_such_a_place_is_refused(template: str | None, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        next_user_turn(chats.with_template(template or ""))
