"""Any order of appending, padding, reordering, copying, saving and resetting keeps every row exact.

The slow model is a list: what each row was fed, forward by forward. At any time a row of the cache
must hold what a fresh cache holds that was fed this list alone, and must predict the same.
"""

import copy
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvevict import CacheError, EvictionCache, patch
from kvevict.models.releases import cache_argument

POLICIES = [
    "streaming_llm:sinks=2,window=5",
    "window:window=6",
    "h2o:heavy=3,recent=3",
    "h2o:heavy=3,recent=3,sinks=2,normalize=age",
    "random:budget=7,recent=2",
    "full",
]
_model: Any = None


def model() -> Any:
    """The model of all machines, patched for the whole module."""
    global _model
    if _model is None:
        _model = families.build("llama")
        patch(_model)
    return _model


class Machine(RuleBasedStateMachine):
    """Operations on one cache, with the list of what each row was fed."""

    @initialize(
        policy=st.sampled_from(POLICIES),
        rows=st.integers(1, 3),
        positions=st.sampled_from(["auto", "original"]),
    )
    def start(self, policy: str, rows: int, positions: str) -> None:
        self.policy, self.positions = policy, positions
        self.cache = EvictionCache(model(), policy, positions=positions)
        self.rows: list[list[list[int]]] = [[] for _ in range(rows)]
        self.columns = 0

    @rule(
        length=st.integers(1, 12),
        pads=st.lists(st.integers(0, 4), min_size=6, max_size=6),
        seed=st.integers(0, 2**16),
    )
    def append(self, length: int, pads: list[int], seed: int) -> None:
        self._feed(length, pads, seed)

    @rule(seed=st.integers(0, 2**16))
    def append_one(self, seed: int) -> None:
        self._feed(1, [0] * 6, seed)

    def _feed(self, length: int, pads: list[int], seed: int) -> Any:
        draw = random.Random(seed)
        mask = torch.ones(len(self.rows), length, dtype=torch.long)
        ids = torch.tensor([[draw.randint(3, 90) for _ in range(length)] for _ in self.rows])
        for index, row in enumerate(self.rows):
            gone = min(pads[index], length)
            mask[index, :gone] = 0
            if gone < length:
                row.append(ids[index, gone:].tolist())
        with torch.no_grad():
            model()(ids, attention_mask=mask, **{cache_argument(model()): self.cache})
        self.columns += length
        assert self.cache.seen == self.columns
        return mask

    @rule(data=st.data())
    def reorder(self, data: Any) -> None:
        rows = len(self.rows)
        order = data.draw(st.lists(st.integers(0, rows - 1), min_size=rows, max_size=rows))
        self.cache.reorder_cache(torch.tensor(order))
        self.rows = [copy.deepcopy(self.rows[i]) for i in order]

    @precondition(lambda self: len(self.rows) <= 2)
    @rule()
    def repeat(self) -> None:
        self.cache.batch_repeat_interleave(2)
        self.rows = [copy.deepcopy(row) for row in self.rows for _ in range(2)]

    @precondition(lambda self: len(self.rows) > 1)
    @rule(data=st.data())
    def select(self, data: Any) -> None:
        index = data.draw(st.integers(0, len(self.rows) - 1))
        self.cache.batch_select_indices(torch.tensor([index]))
        self.rows = [self.rows[index]]

    @rule()
    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.cache.save(Path(folder, "cache"))
            self.cache = EvictionCache.load(Path(folder, "cache"), model())

    @rule()
    def go_on_with_a_copy(self) -> None:
        left = self.cache
        self.cache = copy.deepcopy(left)
        left.reset()

    @rule(
        length=st.integers(1, 8),
        stay=st.integers(0, 8),
        pads=st.lists(st.integers(0, 4), min_size=6, max_size=6),
        seed=st.integers(0, 2**16),
    )
    def draft(self, length: int, stay: int, pads: list[int], seed: int) -> None:
        """What stays of a draft is as if it had come one column at a time."""
        before = [list(row) for row in self.rows]
        columns, stay = self.columns, min(stay, length)
        self.cache.activate_past_recording()
        mask = self._feed(length, pads, seed)
        fed = [
            row[-1] if len(row) > len(old) else []
            for row, old in zip(self.rows, before, strict=True)
        ]
        self.cache.crop(stay - length)
        self.cache.end_drafts()
        self.columns = columns + stay
        for row, old, new, real in zip(self.rows, before, fed, mask, strict=True):
            row[:] = old + [[x] for x in new[: int(real[:stay].sum())]]

    @rule()
    def crop(self) -> None:
        self.cache.crop(0)
        if self.columns:
            with pytest.raises(CacheError, match="crop"):
                self.cache.crop(-1)

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        self.rows = [[] for _ in self.rows]
        self.columns = 0

    @precondition(lambda self: self.columns)
    @rule()
    def compare(self) -> None:
        self._compare()

    def teardown(self) -> None:
        if getattr(self, "columns", 0):
            self._compare()

    def _compare(self) -> None:
        name = cache_argument(model())
        kept = self.cache.kept_positions(0)
        if self.cache.capacity is not None:
            assert kept.shape[2] <= self.cache.capacity
        probe = torch.full((len(self.rows), 1), 7)
        with torch.no_grad():
            got = model()(probe, **{name: copy.deepcopy(self.cache)}).logits[:, -1]
            for index, row in enumerate(self.rows):
                alone = EvictionCache(model(), self.policy, positions=self.positions)
                for chunk in row:
                    model()(torch.tensor([chunk]), **{name: alone})
                mine = kept[index]
                if row:
                    theirs = alone.kept_positions(0)[0]
                    for head, wanted in zip(mine, theirs, strict=True):
                        assert head[head >= 0].tolist() == wanted.tolist()
                wanted = model()(probe[:1], **{name: alone}).logits[:, -1]
                assert (got[index] - wanted).abs().max() < 1e-3 * wanted.abs().max()


_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


class TestShort(Machine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(
        max_examples=25, stateful_step_count=12, deadline=None, suppress_health_check=_QUIET
    )


@pytest.mark.slow
class TestLong(Machine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(
        max_examples=int(os.environ.get("KVEVICT_EXAMPLES", "400")),
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=_QUIET,
    )
