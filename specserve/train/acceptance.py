"""Acceptance measured by the code that serves: prefill and speculative steps of `speculative.step` over a small state
of its own. Tau here is tau in production, for chains and trees, greedy and sampled (a test holds the two equal).

Its loop is another one than the server's, and shorter: all prompts are known beforehand, none arrives, leaves or is
preempted, and each step is read before the next. So it has no scheduler, no page allocator and nothing in flight.
"""

import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specserve.checkpoints.load import Target
from specserve.data.dataset import Prompt
from specserve.drafters.interface import TrainedDrafter
from specserve.drafters.speculation import drafter_for, parse_speculation
from specserve.errors import ConfigError, DataError
from specserve.mesh import on_mesh, whole
from specserve.speculative import slot_state, step
from specserve.speculative.acceptance import Acceptance
from specserve.speculative.drafter import DraftWeights, Weights
from specserve.speculative.sampling import IN_PROMPT, IS_STOP, UNBOUNDED, DrawOptions, SamplerRows
from specserve.speculative.slot_state import PromptChunks, SlotState, StepConfig, StepResult
from specserve.speculative.tree import Tree
from specserve.speculative.vocab import DraftVocab

PAGE_SIZE = 32
MAX_SLOTS = 32  # prompts that are answered at once
MAX_CONTEXT = 4096  # prompt and answer together, where the models would take more
PREFILL_CHUNK = 256

Run = Callable[..., tuple[SlotState, StepResult]]


@dataclass(frozen=True)
class Arm:
    """A tree and a temperature that are measured together."""

    speculation: str  # as `parse_speculation` reads it
    temperature: float = 0.0  # 0 is greedy

    @property
    def name(self) -> str:
        return f"{self.speculation} T={self.temperature:g}"

    @property
    def tree(self) -> Tree:
        """The tree that the head proposes. Raises ConfigError where it proposes none, or not alone."""
        tree = parse_speculation(self.speculation)
        if tree is None or tree.lookup:
            raise ConfigError(
                f"eval.speculation {self.speculation!r}: a head's acceptance is measured with a chain or a tree that "
                "it alone proposes, such as chain:3 or tree:4x4x12"
            )
        return tree


def arms(speculations: Sequence[str], temperatures: Sequence[float]) -> tuple[Arm, ...]:
    """Return the arm of every speculation at every temperature, each once, beginning with the first speculation at the
    first temperature. Raises ConfigError where one cannot be measured."""
    if not speculations or not temperatures:
        raise ConfigError("eval.speculation and eval.temperature need at least one value each")
    found = tuple(dict.fromkeys(Arm(*pair) for pair in itertools.product(speculations, temperatures)))
    for arm in found:
        _ = arm.tree  # refused before the run, not after it
    return found


@dataclass(frozen=True)
class ArmAcceptance:
    """The acceptance of one arm, over all prompts and by the source of the prompts."""

    arm: Arm
    total: Acceptance
    by_source: dict[str, Acceptance]
    answers: tuple[tuple[int, ...], ...] = ()  # token ids, by prompt; empty where it does not fit the context
    by_prompt: tuple[Acceptance, ...] = ()  # without steps where it does not fit the context


class AcceptanceMeter:
    """Answers fixed prompts by speculative decoding with whatever head it is given, and counts what is accepted."""

    def __init__(
        self,
        target: Target,
        drafter: TrainedDrafter,
        arms: Sequence[Arm],
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int,
        seed: int = 0,  # prompt i is sampled with seed + i, as a request with this seed would be
        mesh: Mesh | None = None,  # the target is spread over it
    ) -> None:
        """Compiles on first use: one program for prompts, and one for each tree. Raises DataError when no prompt fits
        the context, ConfigError where a tree is deeper than the head can look."""
        self._target, self._max_new_tokens, self._seed = target, max_new_tokens, seed
        self._context = min(target.config.max_len, drafter.max_len, MAX_CONTEXT)
        # alike lengths are answered together; the order changes no answer
        fitting = [i for i, prompt in enumerate(prompts) if 0 < len(prompt.token_ids) < self._context]
        self._order = sorted(fitting, key=lambda i: -len(prompts[i].token_ids))
        if not fitting:
            raise DataError(
                f"none of {len(prompts)} held-out prompts fits a context of {self._context} tokens; draw more of them "
                "(--eval-prompts), or give 0 to measure nothing"
            )
        self._prompts = prompts
        self.num_skipped = len(prompts) - len(fitting)
        self._num_slots = min(MAX_SLOTS, len(fitting))
        trees = {arm.speculation: arm.tree for arm in arms}
        self._max_depth = max(tree.depth for tree in trees.values())
        self._max_pages = self._num_pages(self._order[0])
        self._config = StepConfig(target.config, drafter_for(list(trees.values()), drafter), self._max_depth)
        # over a mesh a part of the state may be made in one place and returned in another: nothing to reuse there
        donated = () if mesh is not None else (1,)
        chunk = min(PREFILL_CHUNK, len(prompts[self._order[0]].token_ids))
        self._chunk = chunk
        self._prefill: Run = jax.jit(
            functools.partial(on_mesh(mesh, step.prefill), self._config, chunk=chunk, width=self._max_pages),
            donate_argnums=donated,
            out_shardings=whole(mesh),
        )
        self._steps: dict[str, Run] = {
            name: jax.jit(
                functools.partial(on_mesh(mesh, step.speculate), self._config, tree=tree, width=self._max_pages),
                donate_argnums=donated,
                out_shardings=whole(mesh),
            )
            for name, tree in trees.items()
        }

    def measure(
        self,
        params: Any,
        target_ids: np.ndarray,
        arm: Arm,
        options: Sequence[DrawOptions] = (),  # of each prompt; empty: the arm's temperature alone
    ) -> ArmAcceptance:
        """Answer every prompt with at most `max_new_tokens` tokens, or fewer where the context ends, and count."""
        options = options or [DrawOptions(arm.temperature)] * len(self._prompts)
        target = self._target.params
        weights = Weights(target, DraftWeights(params, DraftVocab(jnp.asarray(target_ids))))
        by_source: defaultdict[str, Acceptance] = defaultdict(Acceptance)
        answers: list[tuple[int, ...]] = [()] * len(self._prompts)
        by_prompt = [Acceptance()] * len(self._prompts)
        for start in range(0, len(self._order), self._num_slots):
            group = self._order[start : start + self._num_slots]
            for i, (found, answer) in zip(group, self._answer(weights, group, arm, options), strict=True):
                by_source[self._prompts[i].source] += found
                answers[i], by_prompt[i] = tuple(answer), found
        total = sum(by_source.values(), Acceptance())
        return ArmAcceptance(arm, total, dict(sorted(by_source.items())), tuple(answers), tuple(by_prompt))

    def _num_pages(self, i: int) -> int:
        longest = min(len(self._prompts[i].token_ids) + self._max_new_tokens, self._context)
        return -(-(longest + self._max_depth + 1) // PAGE_SIZE)

    def _answer(
        self, weights: Weights, group: list[int], arm: Arm, options: Sequence[DrawOptions]
    ) -> list[tuple[Acceptance, list[int]]]:
        """Answer one group, and return for each prompt what was accepted of it, and its tokens. Slots beyond the group
        stay empty."""
        count = len(group)
        lens = np.array([len(self._prompts[i].token_ids) for i in group])
        limits = np.minimum(self._max_new_tokens, self._context - lens)
        eos = np.array(self._target.eos_ids)
        state, tree = self._admit(group, options), arm.tree
        found = [Acceptance(accepted_per_depth=(0,) * tree.depth) for _ in group]
        answers: list[list[int]] = [[] for _ in group]
        is_open = limits > 1
        for start in range(0, int(lens.max()), self._chunk):
            num_tokens = self._fill(np.clip(lens - start, 0, self._chunk), 0)
            is_last = self._fill(lens <= start + self._chunk, False)
            chunks = PromptChunks(self._slots(lens > start), num_tokens, is_last)
            state, result = self._prefill(weights, state, chunks)
            is_first = (lens > start) & (lens <= start + self._chunk)
            first_ids = np.asarray(result.counts)[:count, 2]
            for row in np.flatnonzero(is_first):
                answers[row].append(int(first_ids[row]))
            is_open &= ~(is_first & np.isin(first_ids, eos))
        while is_open.any():
            state, result = self._steps[arm.speculation](weights, state, self._slots(is_open))
            counts = np.asarray(result.counts)
            for row in np.flatnonzero(is_open):
                n_accepted, room = int(counts[row, 0]), limits[row] - len(answers[row])
                emitted = counts[row, 2 : 2 + n_accepted + 1][:room]
                ends = np.flatnonzero(np.isin(emitted, eos))
                emitted = emitted[: ends[0] + 1] if ends.size else emitted
                found[row] = found[row].after_step(
                    n_accepted, depth=tree.depth, num_draft_tokens=tree.num_nodes, num_emitted=len(emitted)
                )
                answers[row] += emitted.tolist()
                is_open[row] = not ends.size and len(answers[row]) < limits[row]
        return list(zip(found, answers, strict=True))

    def _admit(self, group: list[int], options: Sequence[DrawOptions]) -> SlotState:
        """Make a state whose slots hold the group's prompts, each with pages for its own answer."""
        num_slots, max_pages = self._num_slots, self._max_pages
        num_pages = sum(self._num_pages(i) for i in self._order[:num_slots])  # of the longest group
        history = np.zeros((num_slots, max_pages * PAGE_SIZE), np.int32)
        page_table = np.full((num_slots, max_pages), num_pages, np.int32)
        seeds, first_page = np.zeros((num_slots, 2), np.uint32), 0
        seen = np.zeros((num_slots, self._target.config.vocab_size), np.int32)
        size = self._target.config.vocab_size
        seen[:, [each for each in self._target.eos_ids if 0 <= each < size]] |= IS_STOP
        for slot, i in enumerate(group):
            token_ids, own = self._prompts[i].token_ids, self._num_pages(i)
            history[slot, : len(token_ids)] = token_ids
            page_table[slot, :own] = np.arange(first_page, first_page + own)
            first_page += own
            seen[slot, [each for each in token_ids if 0 <= each < size]] |= IN_PROMPT
            seed = self._seed + i
            seeds[slot] = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
        state = slot_state.init_state(
            self._config, num_slots=num_slots, num_pages=num_pages, page_size=PAGE_SIZE, max_pages=max_pages
        )
        lens = [len(self._prompts[i].token_ids) for i in group]
        return dataclasses.replace(
            state,
            page_table=jnp.asarray(page_table),
            history=jnp.asarray(history),
            rows=_sampler_rows([options[i] for i in group], lens, seeds),
            tokens=dataclasses.replace(state.tokens, seen=jnp.asarray(seen)),
        )

    def _slots(self, is_active: np.ndarray) -> jax.Array:  # [slot] int32; a slot that is not active is a padded one
        active = np.full(self._num_slots, self._num_slots, np.int32)
        active[: len(is_active)][is_active] = np.flatnonzero(is_active)
        return jnp.asarray(active)

    def _fill(self, values: np.ndarray, rest: int | bool) -> jax.Array:  # [slot]
        filled = np.full(self._num_slots, rest, bool if values.dtype == bool else np.int32)
        filled[: len(values)] = values
        return jnp.asarray(filled)


def _sampler_rows(options: Sequence[DrawOptions], prompt_lens: Sequence[int], seeds: np.ndarray) -> SamplerRows:
    """Return the rows of some sequences' options; those beyond them, for which there are seeds too, are greedy."""
    blank = SamplerRows.greedy(len(seeds))

    def filled(name: str) -> jax.Array:
        column = np.array(getattr(blank, name))
        column[: len(options)] = [min(getattr(own, name), UNBOUNDED) for own in options]
        return jnp.asarray(column)

    names = [each.name for each in dataclasses.fields(DrawOptions) if each.name != "min_tokens"]
    stop_start = np.zeros(len(seeds), np.int32)
    stop_start[: len(options)] = [
        min(num + own.min_tokens, UNBOUNDED) for num, own in zip(prompt_lens, options, strict=True)
    ]
    columns = {name: filled(name) for name in names}
    return dataclasses.replace(blank, **columns, seed=jnp.asarray(seeds), stop_start=jnp.asarray(stop_start))
