"""The draft fields of replies, for a client that asks for them: where each token comes from, and the tree of the last
step.

Knows nothing of HTTP or of the engine.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from specserve.serve.http.openai.logprobs import TextPieces, TokenTexts
from specserve.serve.requests.request import DraftTree

Json = dict[str, Any]
TokenOrigin = tuple[int, int]  # a token id, and its depth as `Delta.draft_depths` has it


class DraftFormat:
    """Spells the fields of a choice that `return_draft_depths` and `return_tree` ask for."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._pieces: defaultdict[int, TextPieces] = defaultdict(lambda: TextPieces(texts))

    def __call__(self, index: int, origins: Sequence[TokenOrigin], tree: DraftTree | None) -> Json:
        """Return the fields of the choice `index`, whose next tokens have these origins. They are empty where there is
        nothing to report."""
        fields: Json = {}
        if origins:
            tokens = [self._pieces[index].push(token_id) for token_id, _ in origins]
            fields["draft_depths"] = {"tokens": tokens, "depths": [depth for _, depth in origins]}
        if tree is not None:
            tokens = [self._texts[token_id] for token_id in tree.token_ids]
            fields["tree"] = {"tokens": tokens, "parents": tree.parents, "accepted": tree.accepted}
        return fields
