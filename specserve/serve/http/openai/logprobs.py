"""Log-probabilities in the words of the two endpoints: OpenAI's legacy lists, and the objects of chat.

Has the text of single tokens too. Knows nothing of HTTP or of the engine.
"""

from collections import defaultdict
from collections.abc import Sequence

from specserve.serve.engine.interface import TokenizerLike
from specserve.serve.http.transport.json_codec import ReplyObject
from specserve.serve.requests.output import REPLACEMENT
from specserve.serve.requests.request import PromptToken, TokenLogprobs

LOWEST_LOGPROB = -9999.0  # JSON has no infinity; vLLM's floor
MAX_TOKENS_PER_CHAR = 4  # UTF-8 has at most four bytes a character


class PromptLogprob(ReplyObject):
    """The log-probability of one token at a place of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id; null for the first token


class TokenLists(ReplyObject):
    """Log-probabilities in parallel lists, one item for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TokenLogprob(ReplyObject):
    """The log-probability of one token. `bytes` is null for a token that is only a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChosenLogprob(TokenLogprob):
    """The log-probability of a token of the answer."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobLists(ReplyObject):
    """One item for each token."""

    content: list[ChosenLogprob]
    refusal: None


class TokenTexts:
    """A mapping of token ids to their text as it stands inside a longer text. It keeps what it has decoded, one text
    for each token id."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __getitem__(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            # Some decoders strip the space before their first token, never that of the second.
            once, twice = (self._tokenizer.decode([token_id] * n, skip_special_tokens=False) for n in (1, 2))
            text = self._texts[token_id] = twice[len(once) :] if twice.startswith(once) else once
        return text

    def shown(self, token_ids: Sequence[int], *, skip_special_tokens: bool, is_within: bool) -> str:
        """Return the text that these tokens add to a longer text, within it or at its beginning."""
        text = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return self[token_ids[0]] if text and len(token_ids) == 1 and is_within else text

    def name(self, token_id: int, *, as_token_id: bool) -> str:
        """Return the name of a token in log-probabilities: its text, or `token_id:42`."""
        return f"token_id:{token_id}" if as_token_id else self[token_id]


class TextPieces:
    """Turns each token of one answer into the text that it adds. Of the tokens of one character, the last one
    adds it."""

    def __init__(self, texts: TokenTexts, *, skip_special_tokens: bool = True) -> None:
        self._texts = texts
        self.is_within = True  # text stands before the first token, as a prompt does before an answer
        self.skips_special_tokens = skip_special_tokens
        self._open_ids: list[int] = []  # of a character that is not whole yet
        self.num_chars = 0  # of the text so far

    def push(self, token_id: int) -> str:
        """Take the next token of the answer, and return the text that it adds."""
        self._open_ids.append(token_id)
        text = self._texts.shown(
            self._open_ids, skip_special_tokens=self.skips_special_tokens, is_within=self.is_within
        )
        if text.endswith(REPLACEMENT) and len(self._open_ids) < MAX_TOKENS_PER_CHAR:
            return ""
        self._open_ids.clear()
        self.is_within = self.is_within or bool(text)
        self.num_chars += len(text)
        return text


class CompletionLogprobs:
    """Spells log-probabilities as /v1/completions does, in parallel lists. As at OpenAI, `top_logprobs` has the token
    itself besides the most likely ones."""

    def __init__(
        self,
        texts: TokenTexts,
        *,
        as_token_ids: bool = False,
        skip_special_tokens: bool = True,
        echoes: Sequence[str] = (),  # the text of each choice's prompt, where answers begin with it
    ) -> None:
        self._texts, self._as_token_ids, self._echoes = texts, as_token_ids, echoes
        self._skips_special_tokens = skip_special_tokens
        self._pieces = defaultdict[int, TextPieces](lambda: TextPieces(texts, skip_special_tokens=skip_special_tokens))

    def __call__(
        self, index: int, logprobs: Sequence[TokenLogprobs], prompt: Sequence[PromptToken] = (), /
    ) -> TokenLists:
        """Spell the log-probabilities of the tokens of an answer, after those of its prompt, whose first has none."""
        token_ids = [item.token_id for item in (*prompt, *logprobs)]
        as_token_id, pieces = self._as_token_ids, self._pieces[index]
        items = [*(token.logprobs for token in prompt), *logprobs]
        offsets = self._of_prompt(index, [token.token_id for token in prompt]) if prompt else []
        for item in logprobs:  # the tokens of one character all begin where it does
            offsets.append(pieces.num_chars)
            pieces.push(item.token_id)
        return {
            "tokens": [self._texts.name(token_id, as_token_id=as_token_id) for token_id in token_ids],
            "token_logprobs": [None if item is None else finite(item.logprob) for item in items],
            "top_logprobs": [None if item is None else self._top(item) for item in items],
            "text_offset": offsets,
        }

    def _of_prompt(self, index: int, token_ids: Sequence[int]) -> list[int]:
        """Return the places of a prompt's tokens in its echo, which shows special tokens but not those that were put
        before a client's text."""
        pieces, offsets = self._pieces[index], list[int]()
        pieces.is_within, pieces.skips_special_tokens = False, False
        for token_id in token_ids:
            offsets.append(pieces.num_chars)
            pieces.push(token_id)
        num_more = max(0, pieces.num_chars - len(self._echoes[index]))  # below: the last character is not whole
        pieces.num_chars, pieces.skips_special_tokens = len(self._echoes[index]), self._skips_special_tokens
        return [max(0, offset - num_more) for offset in offsets]

    def _top(self, item: TokenLogprobs) -> dict[str, float]:
        found: dict[str, float] = {}
        for token_id, logprob in (*item.top, (item.token_id, item.logprob)):
            name = self._texts.name(token_id, as_token_id=self._as_token_ids)
            found.setdefault(name, finite(logprob))  # of two tokens of one text, the likelier
        return found


def prompt_logprobs(texts: TokenTexts, prompt: Sequence[PromptToken]) -> PromptLogprobs:
    """Spell the log-probabilities of a prompt as vLLM does: null for the first token, then objects by token id, of the
    token itself and of the most likely ones."""

    def entry(token_id: int, logprob: float, rank: int) -> PromptLogprob:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": texts[token_id]}

    found: PromptLogprobs = []
    for token in prompt:
        if token.logprobs is None:
            found.append(None)
            continue
        top = {str(each): entry(each, value, rank) for rank, (each, value) in enumerate(token.logprobs.top, 1)}
        found.append({str(token.token_id): entry(token.token_id, token.logprobs.logprob, token.rank)} | top)
    return found


def chat_logprobs(
    texts: TokenTexts, logprobs: Sequence[TokenLogprobs], *, as_token_ids: bool = False
) -> list[ChosenLogprob]:
    """Spell log-probabilities as /v1/chat/completions does, one object for each token."""

    def entry(token_id: int, logprob: float) -> TokenLogprob:
        text = texts[token_id]
        data = None if REPLACEMENT in text else list(text.encode())
        return {"token": texts.name(token_id, as_token_id=as_token_ids), "logprob": finite(logprob), "bytes": data}

    return [
        {**entry(item.token_id, item.logprob), "top_logprobs": [entry(*each) for each in item.top]} for item in logprobs
    ]


def finite(logprob: float) -> float:
    """Return the log-probability as JSON can have it."""
    return max(LOWEST_LOGPROB, logprob)
