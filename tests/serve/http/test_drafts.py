"""What speculation did for each token: what the engine reports of it is true, and the server gives it on request."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from engines import VOCAB, Ask, Dice, Fixed, Inbox, make_engine, run, serving
from fakes import STORY, USER

from specserve.drafters.speculation import parse_speculation
from specserve.serve.engine.delivery import draft_tree
from specserve.serve.programs.runner import Runner
from specserve.serve.requests.request import Delta, SamplingParams
from specserve.speculative.slot_state import StepResult

PROMPTS = np.random.default_rng(4).integers(3, VOCAB, (12, 9)).tolist()


def _asks(**options: Any) -> list[Ask]:
    """Answers of several lengths, so that some end within an accepted path."""
    shared = {"ignore_eos": True, "seed": 3, "temperature": 0.7, "return_tree": True} | options
    return [Ask(tuple(prompt), SamplingParams(max_tokens=36 + i, **shared)) for i, prompt in enumerate(PROMPTS)]


def _check_origins(inbox: Inbox) -> None:
    """Tokens by depth are what the counts say."""
    *_, last = inbox.deltas
    stats = inbox.wait().stats
    assert stats is not None
    reported = Counter(depth for delta in inbox.deltas for depth in delta.draft_depths)
    for depth, num_accepted in enumerate(stats.accepted_per_depth, 1):
        assert num_accepted == reported.pop(depth, 0)
    assert stats.num_cut == (last.num_accepted == len(last.token_ids))
    assert reported == {0: 1 + stats.num_steps - stats.num_cut}  # and one of the prompt's forward


def _check_trees(inbox: Inbox) -> int:
    """The accepted path of each tree spells its step's tokens, and no node could have followed; the number of trees."""
    last_id, num_trees = -1, 0
    for delta in inbox.deltas:
        assert (delta.tree is not None) >= (delta.num_accepted > 0)
        if delta.tree is not None:
            num_trees += 1
            token_ids, parents, path = delta.tree.token_ids, delta.tree.parents, delta.tree.accepted
            assert token_ids[0] == last_id
            assert parents[0] == 0
            assert all(parent < node for node, parent in enumerate(parents[1:], 1))
            assert [token_ids[node] for node in path] == list(delta.token_ids[: delta.num_accepted])
            assert [parents[node] for node in path] == [0, *path][: len(path)]
            if len(delta.token_ids) > len(path):
                end, bonus = [0, *path][-1], delta.token_ids[-1]
                assert all(token_ids[n] != bonus for n in range(1, len(parents)) if parents[n] == end)
        last_id = delta.token_ids[-1]
    return num_trees


def test_origins_and_trees_say_what_the_steps_did(runner: Runner) -> None:
    """Also where an answer ends within an accepted path, which depends on when requests come: so they come again."""
    assert any(_ends_within_a_path(runner, seed) for seed in range(1, 9)), "none ended within a path"


def _ends_within_a_path(runner: Runner, seed: int) -> bool:
    """Check what is said of answers by steps of any kind, and return whether one of them ended within a path."""
    with serving(make_engine(runner, Dice(seed))) as engine:
        inboxes = run(engine, [*_asks(), *_asks(speculation=0)])
    for inbox in inboxes:
        _check_origins(inbox)
    spoken, plain = inboxes[: len(PROMPTS)], inboxes[len(PROMPTS) :]
    assert sum(map(_check_trees, spoken)) > 40
    assert sum(map(_check_trees, plain)) == 0
    assert all(depth == 0 for inbox in plain for delta in inbox.deltas for depth in delta.draft_depths)
    assert any(delta.num_accepted > 1 for inbox in inboxes for delta in inbox.deltas)
    lasts = [inbox.deltas[-1] for inbox in spoken]
    return any(last.tree and last.num_accepted == len(last.token_ids) for last in lasts)


def test_the_accepted_path_is_that_of_the_tree_where_tokens_are_repeated() -> None:
    tree = parse_speculation("tree:2x2x6")
    node_ids, parents = np.array([[9, 5, 6, 6, 7, 6, 7]], np.int32), np.array([[0, 0, 0, 1, 1, 2, 2]], np.int32)
    for (a, b), path in {(5, 6): (1, 3), (5, 7): (1, 4), (6, 6): (2, 5), (6, 7): (2, 6)}.items():
        result = StepResult(np.array([[2, 0, a, b, 8]]), None, node_ids=node_ids, parents=parents)  # type: ignore[arg-type]
        assert tree is not None
        assert draft_tree(tree, result, 0, Delta((a, b, 8), num_accepted=2)).accepted == path
        assert draft_tree(tree, result, 0, Delta((a,), num_accepted=1)).accepted == path[:1]


@pytest.mark.parametrize("speculation", ["tree:3x3x8", "chain:3"])
def test_a_tree_has_the_nodes_that_its_name_says(runner: Runner, speculation: str) -> None:
    tree = parse_speculation(speculation)
    assert tree is not None
    with serving(make_engine(runner, Fixed(tree))) as engine:
        [inbox] = run(engine, _asks()[:1])
    assert {len(delta.tree.parents) for delta in inbox.deltas if delta.tree} == {1 + tree.num_nodes}
    assert _check_trees(inbox) == len(inbox.deltas) - 1


def test_no_refused_words_of_another_answer_are_shown(runner: Runner) -> None:
    """A lookup proposes what finished answers have, other clients' too: of that a tree has the accepted nodes."""
    tree = parse_speculation("head+suffix:3")
    first = Ask(tuple(PROMPTS[0]), SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True))
    with serving(make_engine(runner, Fixed(tree))) as engine:
        [answered] = run(engine, [first])
        asked = [SamplingParams(max_tokens=9, temperature=2.0, seed=i, return_tree=True) for i in range(20)]
        others = [Ask((*first.prompt, *answered.token_ids[: 10 + i]), params) for i, params in enumerate(asked)]
        inboxes = run(engine, others)
    shown = [delta.tree for inbox in inboxes for delta in inbox.deltas if delta.tree]
    assert sum(map(_check_trees, inboxes)) == len(shown)
    of_head, found = ([each for each in shown if (len(each.parents) == 4) == is_whole] for is_whole in (True, False))
    assert of_head
    text = (*first.prompt, *answered.token_ids)
    assert not {each.token_ids for each in of_head} & {text[i : i + 4] for i in range(len(text))}
    assert found
    assert all(len(each.parents) == 1 + len(each.accepted) for each in found)


def test_grammars_do_not_change_what_is_reported(runner: Runner) -> None:
    asks = [Ask(ask.prompt, ask.params, is_constrained=True) for ask in _asks()]
    with serving(make_engine(runner, Dice(1))) as engine:
        inboxes = run(engine, asks)
    for inbox in inboxes:
        _check_origins(inbox)
    assert sum(map(_check_trees, inboxes)) > 20


def test_nothing_is_reported_without_request(runner: Runner) -> None:
    plain = Ask(tuple(PROMPTS[0]), SamplingParams(max_tokens=20, seed=3))
    with serving(make_engine(runner, Fixed(parse_speculation("chain:3")))) as engine:
        asked, other = run(engine, [_asks()[0], plain])
    assert _check_trees(asked)
    assert all(delta.tree is None for delta in other.deltas)


ROUTES = {"/v1/completions": {"prompt": "x"}, "/v1/chat/completions": {"messages": USER}}


def _choices(http, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The choices of every chunk of a stream."""
    with http.stream("POST", path, json=ROUTES[path] | body | {"stream": True}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                yield from json.loads(line.removeprefix("data: "))["choices"]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("text", ["x", "unicode", "held"])
def test_the_tokens_of_a_reply_spell_its_text(http, path: str, text: str) -> None:
    ask = {"prompt": text} if "prompt" in ROUTES[path] else {"messages": [{"role": "user", "content": text}]}
    body = ask | {"return_draft_depths": True}
    [whole] = http.post(path, json=ROUTES[path] | body).json()["choices"]
    choices = list(_choices(http, path, body))
    pieces = [choice["draft_depths"] for choice in choices if "draft_depths" in choice]
    for name in ("tokens", "depths"):
        assert [item for each in pieces for item in each[name]] == whole["draft_depths"][name]
    said = whole["text"] if "text" in whole else whole["message"]["content"]
    assert "".join(whole["draft_depths"]["tokens"]) == said
    assert len(said.encode()) == len(whole["draft_depths"]["depths"])  # a token is a byte
    assert whole["draft_depths"]["depths"] == [1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0][: len(said.encode())]
    assert all("tree" not in choice for choice in [whole, *choices])


@pytest.mark.parametrize("path", ROUTES)
def test_the_trees_of_a_reply(http, path: str) -> None:
    body = {"return_tree": True, "max_tokens": 5}
    trees = [choice["tree"] for choice in _choices(http, path, body) if "tree" in choice]
    assert trees[1] == {"tokens": [STORY[1], "!", STORY[2], "?"], "parents": [0, 0, 0, 2], "accepted": [2]}
    [whole] = http.post(path, json=ROUTES[path] | body).json()["choices"]
    assert whole["tree"] == trees[-1]  # a whole reply describes its last step
    assert len(trees) == 3


@pytest.mark.parametrize("path", ROUTES)
def test_a_reply_tells_nothing_unless_asked(http, path: str) -> None:
    [whole] = http.post(path, json=ROUTES[path]).json()["choices"]
    for choice in [whole, *_choices(http, path, {})]:
        assert not {"draft_depths", "tree"} & choice.keys()
    off = {"speculation": "off", "return_tree": True, "return_draft_depths": True}
    [whole] = http.post(path, json=ROUTES[path] | off).json()["choices"]
    assert set(whole["draft_depths"]["depths"]) == {0}
    assert "tree" not in whole
