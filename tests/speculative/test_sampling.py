"""The one rule of drawing: truncation equals a plain sort, the noise is uniform and independent, rows do not mix."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from specserve.kernels.rowwise import argmax, largest
from specserve.mesh import made_for
from specserve.speculative import sampling
from specserve.speculative.sampling import SamplerRows

VOCAB = 12


def _rows(
    temperature: list[float],
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seeds: np.ndarray | None = None,
) -> SamplerRows:
    batch = len(temperature)
    seeds = np.arange(batch, dtype=np.uint64) if seeds is None else seeds
    words = np.stack([seeds & np.uint64(0xFFFFFFFF), seeds >> np.uint64(32)], axis=1).astype(np.uint32)
    return dataclasses.replace(
        SamplerRows.greedy(batch),
        temperature=_array(temperature, np.float32),
        top_k=_array([top_k] * batch, np.int32),
        top_p=_array([top_p] * batch, np.float32),
        min_p=_array([min_p] * batch, np.float32),
        seed=_array(words, np.uint32),
    )


def _array(values: Any, dtype: type) -> jax.Array:
    return jnp.asarray(np.asarray(values, dtype))  # nothing compiles for it


_truncate, _sample, _noise = jax.jit(sampling.truncate), jax.jit(sampling.sample), jax.jit(sampling.noise)


@jax.jit
def _truncate_by_digits(rows: SamplerRows, logits: jax.Array) -> jax.Array:
    """As accelerators do it, here."""
    with made_for("gpu"):
        return sampling.truncate(rows, logits)


@given(
    values=st.lists(st.integers(-6, 6), min_size=VOCAB, max_size=VOCAB),  # small integers: many ties
    jitter=st.booleans(),
    top_k=st.integers(0, VOCAB + 2),
    top_p=st.sampled_from([0.05, 0.3, 0.5, 0.77, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.11, 0.5, 1.0]),
)
def test_truncation_equals_a_sort(values: list[int], jitter: bool, top_k: int, top_p: float, min_p: float) -> None:
    logits = np.array(values, np.float32) / 2
    if jitter:
        logits += np.linspace(0, 0.3, VOCAB, dtype=np.float32) * np.float32(1.7)
    kept = _sorted_truncation(logits.astype(np.float64), top_k, top_p, min_p)
    for truncate in (_truncate, _truncate_by_digits):
        got = np.asarray(truncate(_rows([1.0], top_k, top_p, min_p), jnp.asarray(logits)[None, None]))[0, 0]
        np.testing.assert_array_equal(np.isfinite(got), kept)
        np.testing.assert_array_equal(got[kept], logits[kept])


def _sorted_truncation(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Which tokens stay: top-k, then top-p over what is left, then min-p. Tokens equal to the last one stay with it."""
    kept = np.ones(len(logits), bool)
    if 0 < top_k < len(logits):
        kept = logits >= np.sort(logits)[::-1][top_k - 1]
    probs = np.where(kept, np.exp(logits - logits.max()), 0)
    probs /= probs.sum()
    if top_p < 1:
        mass = np.cumsum(np.sort(probs)[::-1])
        assume(np.abs(mass - top_p).min() > 1e-4)  # far above float32's 12 roundings, 1e-6: it may fall on either side
        kept &= probs >= np.sort(probs)[::-1][np.argmax(mass >= top_p)]
    if min_p > 0:
        assume(np.abs(probs / probs.max() - min_p)[probs < probs.max()].min(initial=1) > 1e-5)
        kept &= probs >= min_p * probs.max() * (1 - 1e-9)  # float64's rounding, where min_p is 1
    return kept


@pytest.mark.parametrize("top_p", [1e-45, 1e-40, 1e-30, 1e-6])
def test_next_to_no_mass_is_the_likeliest_token(top_p: float, rng: np.random.Generator) -> None:
    """Also where float32 has no such number, or flushes it to zero. The first token is never the likeliest."""
    logits = rng.standard_normal((2, 3, VOCAB)).astype(np.float32)
    logits[..., 0] -= 9
    for rows in (_rows([1.0, 0.2], top_p=top_p), _rows([1.0, 0.2], top_p=top_p, min_p=1.0)):
        np.testing.assert_array_equal(_sample(rows, logits, np.zeros((2, 3), np.int32)), logits.argmax(-1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_every_token_is_banned_nothing_is_drawn(temperature: float) -> None:
    logits = np.full((1, 3, VOCAB), -np.inf, np.float32)
    logits[0, 1, 4] = -1e30
    for rows in (_rows([temperature]), _rows([temperature], top_k=2, top_p=0.5, min_p=0.1)):
        assert np.asarray(_sample(rows, logits, np.zeros((1, 3), np.int32))).tolist() == [[-1, 4, -1]]


def test_rows_do_not_mix(rng: np.random.Generator) -> None:
    """Greedy rows are the argmax, and a sampled row draws what it draws alone."""
    logits = rng.standard_normal((4, 3, VOCAB)).astype(np.float32)
    positions = rng.integers(0, 99, (4, 3)).astype(np.int32)
    rows = _rows([0.0, 1.0, 0.0, 0.3], top_p=0.9)
    together = np.asarray(_sample(rows, logits, positions))
    np.testing.assert_array_equal(together[::2], np.argmax(logits, axis=-1)[::2])
    for i in range(4):
        one = jax.tree.map(lambda x, i=i: np.asarray(x)[i : i + 1], rows)
        np.testing.assert_array_equal(together[i], _sample(one, logits[i : i + 1], positions[i : i + 1])[0])


def test_a_draw_depends_on_the_position_and_not_on_the_node(rng: np.random.Generator) -> None:
    logits = np.broadcast_to(rng.standard_normal(VOCAB).astype(np.float32), (1, 5, VOCAB))
    drawn = np.asarray(_sample(_rows([1.5]), logits, np.array([[7, 8, 7, 9, 7]], np.int32)))[0]
    assert drawn[0] == drawn[2] == drawn[4]


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_argmax_takes_the_first_of_equals_and_survives_nan(platform: str) -> None:
    x = jnp.asarray([[1.0, 3.0, 3.0], [float("nan")] * 3, [-np.inf, -np.inf, -1.0]], jnp.float32)
    with made_for(platform):
        first, of_nan, last = argmax(x).tolist()
    assert (first, last) == (1, 2)
    assert 0 <= of_nan < 3


def _uniform(seeds: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> np.ndarray:  # [seed, position, token]
    rows = _rows([1.0] * len(seeds), seeds=seeds)
    position_ids = np.broadcast_to(positions.astype(np.int32), (len(seeds), len(positions)))
    gumbel = np.asarray(_noise(rows, position_ids, tokens.astype(np.uint32)))
    assert np.isfinite(gumbel).all()
    return np.exp(-np.exp(-gumbel.astype(np.float64)))


@pytest.mark.parametrize("axis", [0, 1, 2], ids=["seed", "position", "token"])
def test_noise_is_uniform_and_independent_along(axis: int) -> None:
    """Consecutive values of one key, the others few: what a server draws for seeds 0, 1, 2, ... of one prompt."""
    sizes = [3, 3, 3]
    sizes[axis] = 20_000
    seeds, positions, tokens = (np.arange(size, dtype=np.uint64) for size in sizes)
    uniform = np.moveaxis(_uniform(seeds, positions, tokens), axis, -1).reshape(9, -1)
    for series in uniform:
        assert stats.kstest(series, "uniform").pvalue > 1e-4  # 27 such tests, with fixed seeds, and 81 of pairs
        for lag in (1, 2, 256):
            pairs, _, _ = np.histogram2d(series[:-lag], series[lag:], bins=8, range=[[0, 1], [0, 1]])
            assert stats.chisquare(pairs.ravel()).pvalue > 1e-5, f"lag {lag}"
    correlation = np.corrcoef(uniform) - np.eye(9)
    assert np.abs(correlation).max() < 5 / np.sqrt(20_000)


def test_both_words_of_the_seed_count() -> None:
    seeds = np.array([5, 5 + 2**32, 5 + 2**63], np.uint64)
    uniform = _uniform(seeds, np.arange(4), np.arange(5))
    assert len(np.unique(uniform.round(12))) == uniform.size


def test_draft_rows_read_the_targets_noise() -> None:
    everything = _uniform(np.arange(2, dtype=np.uint64), np.arange(3), np.arange(VOCAB))
    some = np.array([1, 4, 9])
    np.testing.assert_array_equal(_uniform(np.arange(2, dtype=np.uint64), np.arange(3), some), everything[..., some])


@given(
    values=hnp.arrays(
        np.float32, (2, 3, VOCAB), elements=st.sampled_from([-np.inf, -1.5, 0.0, 0.25, 3.0])
    ),  # many ties
    k=st.integers(1, VOCAB),
)
def test_the_largest_are_those_of_a_sort(values: np.ndarray, k: int) -> None:
    """As TPUs find them, ties and bans among them."""
    with made_for("tpu"):
        found = largest(jnp.asarray(values), k)
    for one, other in zip(found, jax.lax.top_k(jnp.asarray(values), k), strict=True):
        np.testing.assert_array_equal(one, other)
