from typing import Any

import numpy as np
import pytest
import torch

from kvevict import Slots


def make(kind: str, values: Any) -> Any:
    return np.asarray(values) if kind == "numpy" else torch.as_tensor(values)


@pytest.fixture(params=["numpy", "torch"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def test_only_positions_are_needed(kind: str) -> None:
    slots = Slots(make(kind, [[3, 1, -1]]))
    full = slots.filled()
    assert slots.n == 3
    assert slots.size is None
    assert full.size.tolist() == [1, 1, 1]
    assert full.score.tolist() == [[0, 0, 0]]
    assert full.protected.tolist() == [[False] * 3]
    assert full.recoverable.tolist() == [0, 0, 0]
    assert full.lifetime.tolist() == [1, 1, 1]
    assert type(full.size) is type(slots.position)
    assert full.filled().size is full.size


def test_given_arrays_are_kept_as_they_are(kind: str) -> None:
    score = make(kind, [0.5, 0.25])
    assert Slots(make(kind, [0, 1]), score=score).filled().score is score


@pytest.mark.parametrize("name", ["size", "group", "protected", "score", "recoverable", "lifetime"])
def test_an_array_of_another_length_is_named(kind: str, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Slots(make(kind, [0, 1, 2]), **{name: make(kind, [1, 1])})


def test_groups_become_one_slot_each(kind: str) -> None:
    slots = Slots(
        position=make(kind, [0, 1, 2, 3, 4]),
        size=make(kind, [5, 1, 2, 3, 7]),
        group=make(kind, [4, 4, 9, 9, 1]),
        protected=make(kind, [False, True, False, False, False]),
        score=make(kind, [1.0, 2.0, 0.5, 0.25, 4.0]),
        lifetime=make(kind, [0, 1, 0, 2, 1]),
        recoverable=make(kind, [0.0, 0.5, 0.1, 0.2, 1.0]),
    )
    coarse, index = slots.coarsened()
    assert index.tolist() == [0, 0, 1, 1, 2]
    assert coarse.position.tolist() == [1, 3, 4]
    assert coarse.size.tolist() == [6, 5, 7]
    assert coarse.protected.tolist() == [True, False, False]
    assert coarse.score.tolist() == [3.0, 0.75, 4.0]
    assert coarse.group is None
    assert coarse.lifetime.tolist() == [1, 2, 1]


def test_empty_members_count_for_nothing_in_a_groups_score(kind: str) -> None:
    slots = Slots(
        make(kind, [[0, -1, 2], [-1, -1, 2]]),
        group=make(kind, [0, 0, 1]),
        score=make(kind, [[1.0, 8.0, 2.0], [8.0, 8.0, 2.0]]),
        protected=make(kind, [[False, True, False], [True, False, False]]),
    )
    coarse, _ = slots.coarsened()
    assert coarse.position.tolist() == [[0, 2], [-1, 2]]
    assert coarse.score.tolist() == [[1.0, 2.0], [0.0, 2.0]]
    assert coarse.protected.tolist() == [[False, False], [False, False]]


def test_groups_must_be_neighbours(kind: str) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        Slots(make(kind, [0, 1, 2]), group=make(kind, [0, 1, 0])).coarsened()


def test_no_slots_at_all(kind: str) -> None:
    empty = make(kind, np.zeros(0, dtype=np.int64))
    assert Slots(empty).filled().n == 0


def test_slots_are_frozen(kind: str) -> None:
    with pytest.raises(AttributeError):
        Slots(make(kind, [0])).position = make(kind, [1])  # type: ignore[misc]
