"""One policy over tokens and over messages: what must hold between the two levels."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevict.policies import H2O, Random, StreamingLLM, Window
from kvevict.policy import Policy
from kvevict.slots import Slots

sizes_of = st.lists(st.integers(1, 9), min_size=1, max_size=12)


def tokens(sizes: list[int], seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return score and group of every token, and the sizes."""
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(len(sizes)), sizes)
    return rng.exponential(size=len(group)), group, np.array(sizes)


def policies(budget: int) -> list[Policy]:
    found: list[Policy] = [Window(budget), Random(budget, seed=3)]
    if budget > 1:
        found += [StreamingLLM(1, budget - 1), H2O(heavy=budget // 2, recent=budget - budget // 2)]
    return [*found, H2O(heavy=budget, recent=0)]


@given(sizes_of, st.integers(1, 60), st.integers(0, 99))
def test_groups_of_tokens_are_chosen_as_messages_are(
    sizes: list[int], budget: int, seed: int
) -> None:
    """P2: a message's score is the sum of its tokens', so both levels choose the same."""
    score, group, size = tokens(sizes, seed)
    at = np.arange(len(group))
    last = np.flatnonzero(np.r_[group[1:] != group[:-1], True])  # a group is as new as its newest
    for policy in policies(budget):
        fine = policy.keep(Slots(position=at, group=group, score=score))
        whole = Slots(position=at[last], size=size, score=np.bincount(group, score))
        assert (fine == policy.keep(whole)[group]).all(), policy


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 99))
def test_messages_of_one_token_are_tokens(count: int, budget: int, seed: int) -> None:
    """P1: size 1 and a group each is the token level itself, slot by slot."""
    score, group, size = tokens([1] * count, seed)
    at = np.arange(count)
    for policy in policies(budget):
        plain = policy.keep(Slots(position=at, score=score))
        assert (policy.keep(Slots(position=at, score=score, group=group)) == plain).all()
        assert (policy.keep(Slots(position=at, score=score, size=size)) == plain).all()
    heavy = H2O(heavy=budget, recent=0).keep(Slots(position=at, score=score))
    assert set(np.flatnonzero(heavy)) == set(np.argsort(score)[::-1][:budget])


@given(sizes_of, st.integers(0, 60), st.integers(0, 99), st.data())
def test_tokens_hold_at_least_the_mass_of_messages(
    sizes: list[int], spare: int, seed: int, data: Any
) -> None:
    """P3: equal roots, budget and scores; whichever messages are chosen, tokens hold as much."""
    score, group, size = tokens(sizes, seed)
    roots = np.array(data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes))))
    budget = int(size[roots].sum()) + spare
    if budget == 0:
        return
    at = np.arange(len(group))
    best = H2O(heavy=budget, recent=0)
    top = best.keep(Slots(position=at, score=score, protected=roots[group]))
    assert top.sum() == min(budget, len(group))
    first = np.flatnonzero(np.r_[True, group[1:] != group[:-1]])
    totals = np.bincount(group, score)
    for policy in policies(budget):
        chosen = policy.keep(Slots(position=at[first], size=size, score=totals, protected=roots))
        assert size[chosen].sum() <= budget
        assert score[top].sum() >= totals[chosen].sum() - 1e-9


@given(sizes_of, st.integers(1, 60), st.integers(0, 99))
def test_choosing_twice_changes_nothing_and_order_stays(
    sizes: list[int], budget: int, seed: int
) -> None:
    """P6, P7, P9: idempotent, never over budget, and nothing goes where all fits."""
    score, group, size = tokens(sizes, seed)
    totals = np.bincount(group, score)
    at = np.arange(len(sizes))
    for policy in policies(budget):
        if isinstance(policy, Random):
            continue  # draws anew by design
        once = policy.keep(Slots(position=at, size=size, score=totals))
        assert size[once].sum() <= budget
        if size.sum() <= budget:
            assert once.all()
        left = Slots(position=at[once], size=size[once], score=totals[once])
        if once.any():
            assert policy.keep(left).all(), policy


def test_a_policy_that_ignores_scores_would_break_the_bound() -> None:
    """The bound's test can fail: a choice of tokens by age holds less than the messages' sum."""
    score = np.array([9.0, 9.0, 0.1, 0.1])
    top = Window(2).keep(Slots(position=np.arange(4), score=score))
    with pytest.raises(AssertionError):
        assert score[top].sum() >= 18.0
