"""Facts about one sequence besides its tokens, for requests that want to know."""

import time

from specserve.serve.engine.handles import HostResult
from specserve.serve.engine.scheduler import Sequence
from specserve.serve.requests.request import Delta, DraftTree, PromptToken, Request, SpeculationStats, TokenLogprobs
from specserve.speculative.tree import Tree


def prompt_tokens(request: Request, start: int, num_tokens: int, result: HostResult, row: int) -> list[PromptToken]:
    """The next tokens of a scored prompt, of which `start` are known, by the row of its chunk. A chunk tells of the
    tokens after its own; the last one's is drawn, and the first of all has nothing before it."""
    assert result.prompt is not None
    assert request.params.prompt_logprobs is not None
    found = [] if start else [PromptToken(request.prompt_ids[0], None, 0)]
    token_ids = request.prompt_ids[start + len(found) :][:num_tokens]
    scores, num_top = result.prompt.logprobs, request.params.prompt_logprobs
    told = scores.chosen, scores.top, scores.top_ids, result.prompt.ranks
    each = zip(token_ids, *(array[row] for array in told), strict=False)
    for token_id, chosen, top, top_ids, rank in each:
        likeliest = tuple(zip(top_ids[:num_top].tolist(), top[:num_top].tolist(), strict=True))
        found.append(PromptToken(token_id, TokenLogprobs(token_id, float(chosen), likeliest), int(rank)))
    return found


def logprobs(token_ids: tuple[int, ...], result: HostResult, row: int, num_top: int) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of the tokens that a row of a result emits, one for each of `token_ids`."""
    assert result.logprobs is not None
    chosen, top, top_ids = (array[row] for array in result.logprobs)
    return tuple(
        TokenLogprobs(
            token_id,
            float(chosen[i]),
            tuple(zip(top_ids[i, :num_top].tolist(), top[i, :num_top].tolist(), strict=True)),
        )
        for i, token_id in enumerate(token_ids)
    )


def draft_tree(tree: Tree, result: HostResult, row: int, delta: Delta) -> DraftTree:
    """Return the tree that a step proposed for a row, and the way that the tokens of its delta take through it."""
    assert result.node_ids is not None
    assert result.parents is not None
    # a deterministic step pads each tree with nodes of its own
    token_ids, parents = (array[row, : tree.num_nodes + 1].tolist() for array in (result.node_ids, result.parents))
    accepted, current = [], 0
    for token_id in delta.token_ids[: delta.num_accepted]:
        nodes = range(current + 1, len(parents))  # parents come before their children
        current = next(node for node in nodes if (parents[node], token_ids[node]) == (current, token_id))
        accepted.append(current)
    return DraftTree(tuple(token_ids), tuple(parents), tuple(accepted))


def stats_of(sequence: Sequence, max_accepted: int) -> SpeculationStats:
    """Return the statistics of a sequence that ends now."""
    now = time.monotonic()
    admitted = sequence.admit_time or now
    first = sequence.first_time or now
    return SpeculationStats(
        **vars(sequence.acceptance),
        num_cached_tokens=sequence.num_cached or 0,
        drafts=tuple(sequence.drafts),
        max_accepted=max_accepted,
        queue_seconds=admitted - sequence.request.submit_time,
        prefill_seconds=first - admitted,
        decode_seconds=(sequence.last_time or now) - first,
    )
