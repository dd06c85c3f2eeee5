"""What holds for every policy in the registry, on numpy and on torch, whatever the slots."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvevict import Policy, PolicyError, Slots, parse
from kvevict.policies import H2O, Full, Random, StreamingLLM, Window
from kvevict.policy import REGISTRY

EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True)
small = st.integers(0, 6)


@st.composite
def policies(draw: Any) -> Policy:
    kind = draw(st.sampled_from(["window", "streaming_llm", "h2o", "random"]))
    if kind == "window":
        return Window(draw(st.integers(1, 9)))
    if kind == "streaming_llm":
        return StreamingLLM(draw(small), draw(st.integers(1, 9)))
    if kind == "random":
        sinks, recent = draw(small), draw(small)
        return Random(sinks + recent + draw(st.integers(1, 6)), sinks, recent, draw(small))
    heavy, recent, sinks = draw(small), draw(small), draw(small)
    assume(heavy + recent + sinks)
    normalize = draw(st.sampled_from(["none", "age"]))
    return H2O(heavy, recent, sinks, normalize, draw(st.sampled_from([1.0, 0.5])))


@st.composite
def rows(draw: Any, tied: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Positions, distinct and unsorted with some -1, and scores; two rows."""
    n = draw(st.integers(1, 24))
    position, score = [], []
    for _ in range(2):
        drawn = draw(st.lists(st.integers(0, 60), min_size=n, max_size=n, unique=True))
        empty = draw(st.lists(st.sampled_from([False] * 3 + [True]), min_size=n, max_size=n))
        position.append([-1 if e else p for p, e in zip(drawn, empty, strict=True)])
        top = 2 if tied else 10_000
        score.append(draw(st.lists(st.integers(0, top), min_size=n, max_size=n)))
    return np.array(position), np.array(score, dtype=np.float32) / 8


def kept(policy: Policy, position: Any, score: Any = None, **more: Any) -> np.ndarray:
    """Return keep() after checking that numpy and torch agree."""
    ours = policy.keep(Slots(position, score=score, **more))
    there = {k: torch.as_tensor(v) for k, v in more.items()}
    theirs = policy.keep(
        Slots(
            torch.as_tensor(position),
            score=None if score is None else torch.as_tensor(score),
            **there,
        )
    )
    assert isinstance(theirs, torch.Tensor)
    assert ours.dtype == np.bool_
    assert np.array_equal(ours, theirs.numpy())
    return ours


@EXAMPLES
@given(policies(), rows())
def test_kept_is_within_the_budget_and_holds_head_and_recent(policy: Policy, drawn: Any) -> None:
    position, score = drawn
    keep = kept(policy, position, score)
    assert policy.extents is not None
    head, recent, _ = policy.extents
    for row, mask in zip(position, keep, strict=True):
        live = sorted(p for p in row if p >= 0)
        chosen = sorted(row[mask])
        assert all(p >= 0 for p in chosen)
        assert len(chosen) == min(len(live), policy.capacity or 0)
        assert set(live[:head]) <= set(chosen)
        assert set(live[len(live) - min(recent, len(live) - len(live[:head])) :]) <= set(chosen)


@EXAMPLES
@given(policies(), rows(), st.randoms(use_true_random=False))
def test_the_order_of_slots_does_not_matter(policy: Policy, drawn: Any, random: Any) -> None:
    position, score = drawn
    order = list(range(position.shape[1]))
    random.shuffle(order)
    keep = kept(policy, position, score)
    assert np.array_equal(kept(policy, position[:, order], score[:, order]), keep[:, order])


@EXAMPLES
@given(policies(), rows())
def test_keeping_twice_keeps_the_same(policy: Policy, drawn: Any) -> None:
    position, score = drawn
    keep = kept(policy, position, score)
    again = kept(policy, np.where(keep, position, -1), score)
    assert np.array_equal(again, keep)


@EXAMPLES
@given(policies(), rows())
def test_rows_do_not_know_of_each_other(policy: Policy, drawn: Any) -> None:
    position, score = drawn
    together = kept(policy, position, score)
    for i in range(2):
        assert np.array_equal(kept(policy, position[i], score[i]), together[i])


@EXAMPLES
@given(policies(), st.booleans(), st.data())
def test_victim_is_what_keep_drops_of_a_cache_one_over_its_budget(
    policy: Policy, tied: bool, data: Any
) -> None:
    capacity = policy.capacity
    assert capacity is not None
    seen = data.draw(st.integers(capacity + 1, capacity + 30))
    assert policy.extents is not None
    head, recent, heavy = policy.extents
    middle = list(range(head, seen - recent))
    assume(len(middle) > heavy)
    chosen = data.draw(st.permutations(middle))[: heavy + 1]
    position = np.array([*range(head), *chosen, *range(seen - recent, seen)])
    position = position[data.draw(st.permutations(range(len(position))))]
    top = 2 if tied else 1000
    score = np.array(
        data.draw(st.lists(st.integers(0, top), min_size=len(position), max_size=len(position))),
        dtype=np.float32,
    )
    keep = kept(policy, position, score)
    assert (~keep).sum() == 1
    for count in (seen, np.array([seen])):
        assert int(policy.victim(score, position, count)) == int(np.flatnonzero(~keep)[0])
    theirs = policy.victim(torch.as_tensor(score), torch.as_tensor(position), seen)
    assert int(theirs) == int(np.flatnonzero(~keep)[0])


@EXAMPLES
@given(policies(), rows())
def test_an_empty_slot_is_the_first_victim(policy: Policy, drawn: Any) -> None:
    position, score = drawn
    position = position.copy()
    position[:, -1] = -1
    victim = policy.victim(score, position, int(position.max()) + 1)
    assert (np.take_along_axis(position, victim[:, None], -1) == -1).all()


@EXAMPLES
@given(policies(), rows(tied=True))
def test_of_equal_scores_the_older_goes(policy: Policy, drawn: Any) -> None:
    position, score = drawn
    if not isinstance(policy, H2O) or policy.normalize == "age":
        return
    keep = kept(policy, position, score)
    for row, worth, mask in zip(position, score, keep, strict=True):
        live = sorted(p for p in row if p >= 0)
        rest = live[policy.sinks :]
        middle = rest[: max(0, len(rest) - int(policy.recent))]
        in_middle = [i for i, p in enumerate(row) if p in middle]
        dropped = [(worth[i], row[i]) for i in in_middle if not mask[i]]
        held = [(worth[i], row[i]) for i in in_middle if mask[i]]
        if dropped and held:
            assert max(dropped) < min(held)


@EXAMPLES
@given(policies(), rows(), st.data())
def test_protected_slots_always_stay_and_count(policy: Policy, drawn: Any, data: Any) -> None:
    position, score = drawn
    n = position.shape[1]
    protected = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    keep = kept(
        policy, position, score, protected=np.broadcast_to(protected, position.shape).copy()
    )
    roots = protected & (position >= 0)
    assert (keep | ~roots).all()
    assert (keep.sum(-1) <= np.maximum(policy.capacity, roots.sum(-1))).all()
    assert not (keep & (position < 0)).any()


@EXAMPLES
@given(policies(), st.data())
def test_sizes_are_respected_and_groups_stay_or_leave_together(policy: Policy, data: Any) -> None:
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=20))
    n = len(sizes)
    cuts = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    group = np.cumsum(cuts)
    position = np.arange(n)
    score = np.array(
        data.draw(st.lists(st.integers(0, 100), min_size=n, max_size=n)), dtype=np.float32
    )
    size = np.array(sizes)
    keep = kept(policy, position, score, size=size, group=group)
    assert (size * keep).sum() <= (policy.capacity or 0)
    for g in np.unique(group):
        assert len(set(keep[group == g].tolist())) == 1
    alone = kept(policy, position, score, size=size)
    assert (size * alone).sum() <= (policy.capacity or 0)


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_a_budget_above_everything_keeps_everything(name: str) -> None:
    policy = REGISTRY[name]()
    position = np.array([4, 2, -1, 0, 9])
    assert kept(policy, position, np.ones(5, dtype=np.float32)).tolist() == [1, 1, 0, 1, 1]


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_every_policy_is_a_frozen_value(name: str) -> None:
    policy = REGISTRY[name]()
    assert policy == REGISTRY[name]()
    assert hash(policy) == hash(REGISTRY[name]())
    with pytest.raises(AttributeError):
        policy.anything = 3  # type: ignore[attr-defined]
    assert parse(str(policy)) == policy


def test_no_slots_and_only_empty_slots_keep_nothing() -> None:
    for policy in (Window(3), StreamingLLM(2, 3), H2O(2, 2), Random(4), Full()):
        assert kept(policy, np.full((2, 4), -1), np.ones((2, 4), np.float32)).sum() == 0


def test_half_precision_scores_that_tie_fall_back_on_age() -> None:
    # In bfloat16 most scores of a long prompt tie, and top-k order decides in the peers' code.
    score = torch.full((8,), 300.0, dtype=torch.bfloat16)
    keep = H2O(heavy=2, recent=2).keep(Slots(torch.arange(8), score=score))
    assert keep.nonzero().flatten().tolist() == [4, 5, 6, 7]


def test_full_has_no_victim() -> None:
    with pytest.raises(PolicyError, match="keeps everything"):
        Full().victim(None, np.arange(3), 3)


def test_what_each_policy_is_made_of() -> None:
    assert StreamingLLM(4, 252).extents == (4, 252, 0)
    assert Window(9).extents == (0, 9, 0)
    assert H2O(3, 2, sinks=1).extents == (1, 2, 3)
    assert Random(10, 2, 3).extents == (2, 3, 5)
    assert [p.capacity for p in (StreamingLLM(), Window(), H2O(), Random(), Full())] == [
        1024,
        1024,
        1024,
        1024,
        None,
    ]
    assert [p.needs_scores for p in (StreamingLLM(), Window(), H2O(), Random(), Full())] == [
        False,
        False,
        True,
        False,
        False,
    ]
    assert (StreamingLLM(4, 8).band, Window(8).band, H2O().band, Full().band) == (8, 8, None, None)


def test_random_is_a_uniform_sample() -> None:
    counts = np.zeros(64)
    for seed in range(600):
        counts[kept(Random(16, seed=seed), np.arange(64))] += 1
    assert abs(counts - 150).max() < 5 * np.sqrt(150 * 0.75)


def test_heavy_hitter_stays_when_the_window_has_passed() -> None:
    score = np.array([0.0, 9.0, 0.0, 0.0, 0.0, 0.0], dtype=np.float32)
    keep = H2O(heavy=1, recent=2).keep(Slots(np.arange(6), score=score))
    assert np.flatnonzero(keep).tolist() == [1, 4, 5]


def test_age_divides_by_the_queries_that_could_see_a_token() -> None:
    score = np.array([8.0, 1.0, 3.0, 0.0], dtype=np.float32)  # seen by 4, 3, 2 and 1 queries
    old = H2O(heavy=1, recent=1).keep(Slots(np.arange(4), score=score))
    aged = H2O(heavy=1, recent=1, normalize="age").keep(
        Slots(np.arange(4), score=np.array([5.0, 1.0, 3.0, 0.0], dtype=np.float32))
    )
    assert np.flatnonzero(old).tolist() == [0, 3]
    assert np.flatnonzero(aged).tolist() == [2, 3]
