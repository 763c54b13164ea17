"""From token ids to what a client gets: where a sequence ends, and which text is certain."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from specserve.serve.engine.delivery import stats_of
from specserve.serve.engine.sequence import Sequence
from specserve.serve.requests.output import OutputStream
from specserve.serve.requests.request import Delta, FinishReason, Request, SamplingParams
from specserve.tokenizer import Tokenizer


def _stream(tokenizer: Tokenizer, params: SamplingParams, max_new_tokens: int, stop_id: int) -> OutputStream:
    request = Request("r", (1,), params, max_new_tokens, 0, lambda _delta: None, stop_ids=frozenset({stop_id}))
    return OutputStream(request, tokenizer)


TEXT = "def f(x):\n    # größer 日本語 🎉\n    return x  END of it; END"


@given(
    cuts=st.lists(st.integers(0, 60), max_size=12),
    stops=st.lists(st.sampled_from(["END", " return", "x  E", "本", "\n\n", "ENDs", "zzz", "🎉\n"]), max_size=3),
    limit=st.integers(1, 60),
    keeps_stop=st.booleans(),
)
def test_stop_strings_hold_however_the_tokens_arrive(
    pydoc_tokenizer: Tokenizer, cuts: list[int], stops: list[str], limit: int, keeps_stop: bool
) -> None:
    """In any pieces: the text is cut before the first stop string, or after it, and nothing beyond is ever given out.
    The delta says which it was."""
    token_ids = pydoc_tokenizer.encode(TEXT, add_special_tokens=False)
    assert len(token_ids) <= 60
    stream = _stream(pydoc_tokenizer, SamplingParams(stop=stops, include_stop_str_in_output=keeps_stop), limit, 2)
    text, taken, reason, cause = "", [], None, None
    bounds = sorted({0, len(token_ids), *(cut for cut in cuts if cut < len(token_ids))})
    for start, stop in itertools.pairwise(bounds):
        delta = stream.push(token_ids[start:stop])
        text, reason, cause = text + delta.text, delta.finish_reason, delta.stop_reason
        taken += delta.token_ids
        if reason is not None:
            break
    whole = pydoc_tokenizer.decode(token_ids[:limit])
    found = [(at, string) for string in stops if (at := whole.find(string)) >= 0]
    if found:
        at, first = min(found, key=lambda item: (item[0], len(item[1])))
        assert (reason, cause) == (FinishReason.STOP, first)
        assert text == whole[:at] + first * keeps_stop
        shorter = pydoc_tokenizer.decode(taken[:-1])
        assert not any(string in shorter for string in stops), "it stops at the first token that completes one"
    else:
        assert (reason, cause) == (FinishReason.LENGTH if limit <= len(token_ids) else None, None)
        held = max((len(stop) - 1 for stop in stops), default=0)
        assert whole.startswith(text)
        assert len(whole) - len(text) <= (0 if reason else held)
    assert taken == token_ids[: len(taken)]


def test_stop_ids_end_a_sequence_and_are_not_text(pydoc_tokenizer: Tokenizer) -> None:
    [a], [b] = (pydoc_tokenizer.encode(text, add_special_tokens=False) for text in ("a", "b"))
    stream = _stream(pydoc_tokenizer, SamplingParams(), 9, b)
    assert stream.push([a, a]) == Delta((a, a), "aa", num_chars=(1, 1))
    assert stream.push([a, b, a]) == Delta((a, b), "a", FinishReason.STOP, num_chars=(1, 0))
    for keeps_stop, text in ((False, "a"), (True, "ab")):
        params = SamplingParams(stop_token_ids=[b], include_stop_str_in_output=keeps_stop)
        expected = Delta((a, b), text, FinishReason.STOP, b, num_chars=(1, len(text) - 1))
        assert _stream(pydoc_tokenizer, params, 9, b).push([a, b, a]) == expected
    long = next(i for i in pydoc_tokenizer.encode(TEXT) if len(pydoc_tokenizer.decode([i])) > 2)
    word = pydoc_tokenizer.decode([long])
    for stops in ([word, word[:-1]], [word[:-1], word]):  # the shorter one is complete earlier
        delta = _stream(pydoc_tokenizer, SamplingParams(stop=stops), 9, b).push([long])
        assert (delta.text, delta.stop_reason) == ("", word[:-1])
    stream = _stream(pydoc_tokenizer, SamplingParams(), 3, 2)
    assert stream.push([a, b, b, b]) == Delta((a, b, b), "abb", FinishReason.LENGTH, num_chars=(1, 1, 1))


@given(
    cuts=st.lists(st.integers(0, 60), max_size=6), end=st.integers(0, 60), stop=st.sampled_from(["zzz", "ENDs", "x?"])
)
def test_an_answer_that_is_ended_from_outside_has_all_of_its_text(
    pydoc_tokenizer: Tokenizer, cuts: list[int], end: int, stop: str
) -> None:
    """Also what was held back because a stop string, or a character, might have gone on."""
    token_ids = pydoc_tokenizer.encode(TEXT, add_special_tokens=False)[:end]
    stream = _stream(pydoc_tokenizer, SamplingParams(stop=(stop,)), 99, -1)
    borders = sorted({0, len(token_ids), *(cut for cut in cuts if cut < len(token_ids))})
    said = "".join(stream.push(token_ids[a:b]).text for a, b in itertools.pairwise(borders))
    assert said + stream.finish() == pydoc_tokenizer.decode(token_ids)


@given(st.lists(st.sampled_from(["token", "0", "1", "2"]), max_size=12))
def test_an_answer_names_the_versions_that_gave_it_tokens(events: list[str]) -> None:
    """Whichever the weights were changed to meanwhile; one without tokens, the first that it was to begin with."""
    request = Request("r", (1,), SamplingParams(), 99, 0, lambda _delta: None)
    sequence, of_tokens = Sequence(request, OutputStream(request, None)), []
    sequence.note_version("first")
    version = "first"
    for event in events:
        if event == "token":
            sequence.output_ids.append(7)
            of_tokens.append(version)
        else:
            sequence.note_version(version := event)
    versions = stats_of(sequence, 0).versions
    starts = [*versions, (len(of_tokens), "")]
    assert [name for (a, name), (b, _) in itertools.pairwise(starts) for _ in range(a, b)] == of_tokens
    assert len(versions) == max(1, sum(a != b for a, b in itertools.pairwise(["", *of_tokens])))
