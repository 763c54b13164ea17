"""The draft doctor by running: whether a head accepts what its notes promise, and which slip of its files explains it
where it does not.

The target answers prompts greedily while the head speculates (the code that serves, `train.acceptance`). Where the head
falls short, or promises nothing, every repair that its kind knows is tried on these answers: the head is run over them
with the target's states, as in training, which takes a moment for each repair and needs no engine.
"""

import functools
import logging
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specserve.checkpoints.load import QUANTIZATIONS, Target, load_target
from specserve.checkpoints.source import resolve_target
from specserve.data.dataset import Prompt
from specserve.drafters.interface import Head, TrainedDrafter
from specserve.drafters.learning import Rollout, Rows
from specserve.drafters.registry import check_trained
from specserve.errors import DataError, SpecServeError
from specserve.eval.prompts import load_questions, render
from specserve.interop.doctor import RUNNING
from specserve.interop.findings import Copy, Finding, Repair
from specserve.interop.formats import format_of
from specserve.interop.head import load_head, write_head
from specserve.interop.notes import plain_acceptance, read_notes
from specserve.kernels.rows import Documents
from specserve.mesh import default_dtype
from specserve.models import target as target_model
from specserve.models.config import ModelConfig
from specserve.speculative.acceptance import Acceptance
from specserve.tokenizer import Tokenizer
from specserve.train.acceptance import AcceptanceMeter, Arm

logger = logging.getLogger(__name__)

SPECULATION = "chain:3"
DEPTH = 2  # of the trials: what is handed on from one draft step to the next shows at the second
DEVIATIONS = 6.0  # by which a repair must gain more than chance: many are tried, and texts repeat themselves
NOTED_DEVIATIONS = 4.0
ANCHOR_EVERY = 4  # tokens of a text, for a drafter that is tried at some places alone
_PADDED_TO = 64


@dataclass(frozen=True)
class Trial:
    """The results of running a head."""

    acceptance: Acceptance  # of the head as it is, as served
    noted: tuple[float, ...]  # acceptance by depth that its notes promise; empty: nothing
    num_tried: int  # repairs
    findings: list[Finding]

    def summary(self) -> str:
        """Return the measurement in one line."""
        found, tried = self.acceptance, ""
        if self.num_tried:
            tried = f"; {self.num_tried} other readings tried"
        return (
            f"{SPECULATION}, greedy, {found.num_steps:,} steps: tau {found.tau:.2f}, accepted by depth "
            f"{_rates(found.accept_rate)}; its notes say {_rates(self.noted) or 'nothing'}{tried}"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "speculation": SPECULATION,
            "tau": self.acceptance.tau,
            "accept_rate": list(self.acceptance.accept_rate),
            "steps": self.acceptance.num_steps,
            "noted_accept_rate": list(self.noted),
            "repairs_tried": self.num_tried,
        }


class Texts:
    """The target's own greedy answers, and its states over them. They are the same whatever head is tried."""

    def __init__(self, target: Target, prompts: Sequence[Prompt], answers: Sequence[Sequence[int]]) -> None:
        pairs = [
            (prompt.token_ids, answer) for prompt, answer in zip(prompts, answers, strict=True) if len(answer) > DEPTH
        ]
        if not pairs:
            raise DataError(f"all answers end within {DEPTH} tokens, so there is nothing to draft; give other prompts")
        self.target = target
        longest = -(-max(len(prompt) + len(answer) for prompt, answer in pairs) // _PADDED_TO) * _PADDED_TO
        self._token_ids = np.zeros((len(pairs), longest), np.int32)
        self._is_tried = np.zeros(self._token_ids.shape, bool)  # at t: the token at t + 1 is a root, t + 2 is drafted
        for row, (prompt, answer) in enumerate(pairs):
            end = len(prompt) + len(answer)
            self._token_ids[row, :end] = [*prompt, *answer]
            self._is_tried[row, len(prompt) - 1 : end - 1 - DEPTH] = True
        self._states: dict[int, jax.Array] = {}  # [batch, seq, d_model], by layer
        self.commonest = Counter(self._token_ids[:, 1:][self._is_tried[:, :-1]].tolist()).most_common(1)[0][1]

    @property
    def num_places(self) -> int:
        return int(self._is_tried.sum())

    def accepted(self, head: Head) -> np.ndarray:  # [place] int64
        """Return how many draft tokens in a row are right at each place of the answers, or at a fixed choice of places
        where the head looks at some only."""
        drafter = head.drafter
        shape = self._token_ids.shape
        rows = Rows(
            token_ids=jnp.asarray(self._token_ids),
            loss_mask=jnp.ones(shape, bool),
            document_ids=jnp.ones(shape, jnp.int32),
            position_ids=jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape),
            seeds=jnp.arange(shape[0], dtype=jnp.uint32),
        )
        aux = jnp.concatenate([self._state(i) for i in drafter.aux_layers], axis=-1).astype(drafter.dtype)
        found, positions, bears = jax.device_get(
            _draft(drafter, head.params, self.target.params, jnp.asarray(head.target_ids), rows, aux)
        )
        row, last = np.arange(shape[0])[:, None], shape[1] - 1
        is_right = found == self._token_ids[row, np.minimum(positions + 1, last)]
        roots = positions[0]
        is_tried = (roots > 0) & self._is_tried[row, roots - 1] & bears
        return np.cumprod(is_right, axis=0).sum(axis=0)[is_tried]

    def _state(self, layer: int) -> jax.Array:
        if layer not in self._states:
            self._states[layer] = _tap(self.target.config, layer, self.target.params, jnp.asarray(self._token_ids))
        return self._states[layer]


@functools.partial(jax.jit, static_argnums=0)
def _draft(
    drafter: TrainedDrafter, params: Any, target: Any, target_ids: jax.Array, rows: Rows, aux: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the head's first drafts, [step, batch, n] int32 target ids; the position that each column follows; and
    whether a column is one of the row's, [batch, n] bool. A column has the drafts after one root."""
    # so many anchors whatever its slots are, since a repair may change how many it has
    anchors = -(-rows.token_ids.shape[1] // ANCHOR_EVERY)
    rollout = Rollout(max(DEPTH, drafter.num_steps(DEPTH)), remat=False, anchors=anchors)
    states, targets = drafter.learn(params, target, rows, aux, rollout)[:DEPTH], drafter.draft_targets(rows, rollout)
    fewest = min(x.shape[1] for x in states)  # later steps may have states for the first columns alone
    output = drafter.output(params)
    ids = jnp.stack([target_ids[jnp.argmax(drafter.logits(output, target, x[:, :fewest]), axis=-1)] for x in states])
    if targets.positions is not None:
        return ids, targets.positions[:DEPTH, :, :fewest], targets.weights[0, :, :fewest] > 0
    step, column = jnp.arange(DEPTH)[:, None, None], jnp.arange(ids.shape[2])
    drafts = jnp.stack([jnp.roll(each, -k, axis=1) for k, each in enumerate(ids)])  # the root's column, not their own
    return drafts, jnp.broadcast_to(step + column, ids.shape), jnp.ones(ids.shape[1:], bool)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _tap(config: ModelConfig, layer: int, params: Any, token_ids: jax.Array) -> jax.Array:
    n = token_ids.shape[1]
    position_ids = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), token_ids.shape)
    mask = Documents(jnp.ones(token_ids.shape, jnp.int32))
    out = target_model.forward(params, config, token_ids, position_ids, mask, aux_layers=(layer,))
    assert out.aux_hidden_states is not None, "a layer was tapped"
    return out.aux_hidden_states


def load_target_of(folder: Path, name: str) -> Target:
    """The target of a head with its weights, rounded as the head's notes say. Raises ConfigError or CheckpointError."""
    stated = read_notes(folder).get("quantization", "none")
    quantization = stated if stated in QUANTIZATIONS else "none"
    return load_target(resolve_target(name).folder, dtype=default_dtype(), quantization=quantization)


def render_prompts(target: Target, bench: str, limit: int) -> list[Prompt]:
    """The first turns of a bench by the target's chat template. Raises DataError or CheckpointError."""
    tokenizer = Tokenizer.load(target.folder)
    return [
        Prompt(question.category, render(tokenizer, [{"role": "user", "content": question.turns[0]}]))
        for question in load_questions(bench, limit)
    ]


def run_head(
    folder: Path,
    target: Target,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    dtype: str,
    on_repair: Callable[[int, int, str], None] = lambda _done, _total, _what: None,
) -> Trial:
    """Run the head in a folder over prompts, and look for what is wrong where it accepts too little. Raises
    ConfigError or CheckpointError where it cannot be loaded, DataError where no prompt fits."""
    check_trained(format_of(folder).kind, str(folder))
    head = load_head(folder, target, dtype=dtype)
    arm = Arm(SPECULATION)
    meter = AcceptanceMeter(target, head.drafter, [arm], prompts, max_new_tokens=max_tokens)
    measured = meter.measure(head.params, head.target_ids, arm)
    found, noted = measured.total, noted_rates(read_notes(folder))
    if noted and not is_below(found, noted):
        return Trial(found, noted, 0, [])
    texts = Texts(target, prompts, measured.answers)
    misread, num_tried = find_misreading(folder, texts, dtype=dtype, on_repair=on_repair)
    if misread:
        return Trial(found, noted, num_tried, [misread])
    where, got = "the head, running", f"{found.accept_rate[0]:.0%} of {found.num_steps:,} first drafts are accepted"
    if found.accept_rate[0] * texts.num_places <= texts.commonest:
        expected = f"more than {texts.commonest / texts.num_places:.0%}, the share of the commonest token"
        return Trial(found, noted, num_tried, [RUNNING["knows-nothing"].found(where, expected, got)])
    if noted:
        below = RUNNING["below-notes"].found(where, f"{_rates(noted)} by depth", _rates(found.accept_rate))
        return Trial(found, noted, num_tried, [below])
    return Trial(found, noted, num_tried, [])


def _rates(rates: Sequence[float]) -> str:
    return " ".join(f"{rate:.2f}" for rate in rates)


def noted_rates(notes: dict[str, Any]) -> tuple[float, ...]:
    """The acceptance by depth that a head's notes promise of a chain beside the plain target; empty where they promise
    nothing of one."""
    stated = plain_acceptance(notes)
    if not isinstance(stated, dict) or not str(stated.get("speculation", "")).startswith("chain:"):
        return ()
    return tuple(float(rate) for rate in stated.get("accept_rate", ()))


def is_below(found: Acceptance, noted: Sequence[float]) -> bool:
    """Return whether less is accepted than noted, at any depth, by more than the draw of the prompts explains."""
    seen = (found.num_steps, *found.accepted_per_depth)
    rates = zip(found.accept_rate, noted, seen, strict=False)
    return any(p - rate > NOTED_DEVIATIONS * math.sqrt(p * (1 - p) / max(1, n)) for rate, p, n in rates)


def find_misreading(
    folder: Path,
    texts: Texts,
    *,
    dtype: str,
    on_repair: Callable[[int, int, str], None] = lambda _done, _total, _what: None,
) -> tuple[Finding | None, int]:
    """Try every repair, and then every further one on top of the best, for as long as one helps. Also returns how many
    were tried. A repair is offered as a fix where no other one does as well."""
    kind = format_of(folder)
    chosen: list[Repair] = []
    others: list[str] = []
    num_tried = 0
    with tempfile.TemporaryDirectory() as scratch:
        first = now = texts.accepted(load_head(folder, texts.target, dtype=dtype))
        at = folder
        while True:
            tried: list[tuple[Repair, np.ndarray]] = []
            repairs = kind.repairs(at, texts.target)
            for number, repair in enumerate(repairs):
                on_repair(number, len(repairs), repair.what)
                copy = _repaired(folder, [*chosen, repair], Path(scratch) / "tried")
                try:
                    tried.append((repair, texts.accepted(load_head(copy, texts.target, dtype=dtype))))
                except SpecServeError:
                    continue  # the files cannot mean that
            num_tried += len(tried)
            logger.debug("%s", {repair.what: round(deviations(found, now), 1) for repair, found in tried})
            helping = [each for each in tried if deviations(each[1], now) > DEVIATIONS]
            if not helping:
                break
            best, gained = max(helping, key=lambda each: each[1].mean())
            others = [repair.what for repair, found in helping if repair is not best and deviations(gained, found) < 2]
            chosen, now = [*chosen, best], gained
            at = _repaired(folder, chosen, Path(scratch) / f"repaired-{len(chosen)}")
    if not chosen:
        return None, num_tried
    how = " and ".join(repair.what for repair in chosen)
    expected, got = (f"{each.mean():.2f} of {DEPTH} drafts in a row" for each in (now, first))
    names = {"how": how, "others": ", or ".join(others)}
    fix = None if others else _all(chosen)
    where = f"the head, over {texts.num_places:,} places of the target's own answers"
    return RUNNING["misread"].found(where, expected, got, fix, **names), num_tried


def deviations(found: np.ndarray, before: np.ndarray) -> float:
    """Return by how many standard deviations more places are better than worse, if both were equally likely (McNemar
    1947)."""
    better, worse = int((found > before).sum()), int((found < before).sum())
    return (better - worse) / math.sqrt(max(1, better + worse))


def _all(repairs: Sequence[Repair]) -> Callable[[Copy], None]:
    def fix(repaired: Copy) -> None:
        for repair in repairs:
            repair.fix(repaired)

    return fix


def _repaired(folder: Path, repairs: Sequence[Repair], to: Path) -> Path:
    copy = Copy.of(folder)
    _all(repairs)(copy)
    to.mkdir(exist_ok=True)
    write_head(to, copy.tensors, copy.raw, read_notes(folder))
    return to
