"""Plan: what all layers of one forward share, made once before the first of them runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvevict.shared import Ledger


@dataclass
class Plan:
    """One forward's new tokens, seen from the cache.

    Attributes:
        length: Q, new columns, pads included.
        seen: columns that the cache had seen before.
        padded: whether any row has, or had, pads; if not, all rows are alike.
        position: int64 `[B, Q]` (`[1, Q]` without pads), index of each new token among its row's
            real tokens, -1 for a pad.
        row_seen: int64 `[B, 1]` real tokens seen before (`[1, 1]` without pads).
        start: the same as an int; meaningless when padded.
        base: what is subtracted from an index to give the position that the model was fed.
        memo: results that layers share within this forward (masks, cosines), by key.
        ledgers: where one token's positions and victims are kept for all layers at once.
        slot: int64 `[1]`, the ring slot that every layer writes, in a step with static addresses;
            None elsewhere.
        static: whether this is such a step: tensors are updated in place and no layer keeps count.
        draft: last columns that a crop may take back; see `kvevict.drafts`.
        one: whether this is one token to be stored, the plain step of decoding.
    """

    length: int
    seen: int
    padded: bool
    position: Tensor
    row_seen: Tensor
    start: int
    base: int
    ledgers: list[Ledger] = field(default_factory=list)
    slot: Tensor | None = None
    static: bool = False
    draft: int = 0
    memo: dict[Any, Any] = field(default_factory=dict)
    one: bool = field(init=False)

    def __post_init__(self) -> None:
        self.one = self.length == 1 and not self.draft

    def shared(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return a result that the first layer that asks computes for all."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return position and row_seen on a layer's device."""
        return self.shared(  # type: ignore[no-any-return]
            ("on", device), lambda: (self.position.to(device), self.row_seen.to(device))
        )

    def after(self, device: torch.device) -> Tensor:
        """Return real tokens seen after this forward, int64 `[B, 1]`."""

        def count() -> Tensor:
            position, row_seen = self.on(device)
            return row_seen + (position >= 0).sum(-1, keepdim=True)

        return self.shared(("after", device), count)  # type: ignore[no-any-return]

    def part(self, first: int, stop: int) -> Plan:
        """Return the plan of some of the new columns, as if they were fed alone and to stay."""

        def cut() -> Plan:
            before: Any = first
            if self.padded:
                before = (self.position[:, :first] >= 0).sum(-1, keepdim=True)
            return Plan(
                length=stop - first,
                seen=self.seen + first,
                padded=self.padded,
                position=self.position[:, first:stop],
                row_seen=self.row_seen + before,
                start=self.start + first,
                base=self.base,
            )

        return self.shared(("part", first, stop), cut)  # type: ignore[no-any-return]
