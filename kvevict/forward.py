"""What a cache does in one forward: announce it, bound its positions, take note of its end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvevict.errors import CacheError, UnsupportedModelError
from kvevict.layers import EvictionLayer
from kvevict.plan import Plan
from kvevict.policy import Policy
from kvevict.ranked import RankedLayer
from kvevict.ring import RingLayer
from kvevict.scores import check_scores
from kvevict.shared import Ledger, ledgers

_REBASE_AT = 4096  # positions fed before the window is turned back: exact in float32 up to here


class Forward:
    """The part of an EvictionCache that announces forwards and counts what was seen.

    Attributes:
        layers: of the cache, evicting ones and transformers' own.
        policy: the policy in force.
        positions: "in_cache" or "original" once settled.
        evict_every: tokens by which a ranked policy may exceed its budget before it evicts.
    """

    layers: Any  # a list of layers, as transformers' Cache has it
    policy: Policy
    positions: str
    evict_every: int
    _model: Any
    _config: Any
    _seen: int
    _row_seen: Tensor | int  # an int until a row has a pad
    _base: int
    _offset: int
    _broken: bool
    _open: bool
    _ready: bool
    _limit: int | None
    _ledgers: list[Ledger]
    _drafting: bool  # whether forwards are drafts
    _draft: Plan | None  # the forward whose draft is open

    def crop(self, tokens_to_remove: int) -> None:  # noqa: D102  see kvevict.drafts
        raise NotImplementedError

    def _unsure(self, length: int) -> int:
        raise NotImplementedError

    def _keep_states(self, draft: int) -> None:
        raise NotImplementedError

    def _settle(self, handle: Any) -> None:
        raise NotImplementedError

    @property
    def capacity(self) -> int | None:
        """Most tokens kept per layer, row and KV head, None for a policy that keeps everything."""
        return self.policy.capacity

    @property
    def rows(self) -> int:
        """Rows held, -1 before the first forward."""
        return next((x.batch_size for x in self.layers if isinstance(x, EvictionLayer)), -1)

    def begin(self, handle: Any, rows: int, length: int, mask: Tensor | None, device: Any) -> Plan:
        """Announce a forward: called by the patched model before its first layer.

        Args:
            handle: the patch of the model, which knows its rotations.
            rows: B of the new tokens.
            length: Q, new columns.
            mask: 2D attention mask `[B, seen + Q]` or of the new columns alone, or None.
            device: of the new tokens.

        Returns:
            The plan; its `fed()` are the positions that the model must be run at.

        Raises:
            CacheError: another model, another batch, or a forward that failed half-way before.
            PolicyError: shares of a prompt whose length nobody gave.
        """
        if self._model() is not handle.model:
            raise CacheError("this cache was made for another model; make one for this model")
        if self.policy.has_shares:
            _ = self.policy.capacity  # raises with the remedy
        if self._draft is None or self._broken:
            self._check_usable()
        self._check_rows(rows)
        new = self._new_columns(mask, rows, length)
        if self._draft is not None:
            self.crop(0)  # nobody took anything back, and this forward is not refused
            self._check_usable()
        if not self._ready:
            self._settle(handle)
        padded = isinstance(self._row_seen, Tensor) or (new is not None and not bool(new.all()))
        start = 0 if isinstance(self._row_seen, Tensor) else self._row_seen
        row_seen = self._rows_seen(device)
        if padded:
            row_seen = row_seen.expand(rows, 1)
            if new is None:
                new = torch.ones(rows, length, dtype=torch.bool, device=device)
            new = new.to(device)
            position = torch.where(new, row_seen + new.long().cumsum(-1) - 1, -1)
        else:
            position = torch.arange(start, start + length, device=device)[None]
        draft = self._unsure(length)
        apart = max(1, length - draft) if self._raw_keys else length  # ranks of a draft's tokens
        self._rebase(self._seen if padded else start, apart)  # columns bound a padded row's tokens
        plan = Plan(length, self._seen, padded, position, row_seen, start, self._base, draft=draft)
        if plan.one and not padded:
            plan.ledgers = self._open_ledgers()
        elif draft:
            self._ledgers = []  # layers find their victims on their own
        if self._drafting:
            self._keep_states(draft)
        for layer in self.layers:
            if isinstance(layer, EvictionLayer):
                layer.plan = plan
        self._open = True
        return plan

    def fed(self, plan: Plan) -> Tensor:
        """Return the positions that the model must be run at, int64 `[B, Q]`."""
        if self._raw_keys:  # rotated when read, by rank: position 0 leaves them as they are
            return torch.zeros_like(plan.position)
        real = plan.position.clamp(min=0)
        if self.positions == "in_cache":
            return real - self._base
        return real + self._offset

    def finish(self) -> None:
        """Take note that a forward ran to its end.

        Raises:
            CacheError: scores that are no numbers; the cache is poisoned.
        """
        plan = next(x.plan for x in self.layers if isinstance(x, EvictionLayer))
        assert plan is not None
        self._seen += plan.length
        for ledger in plan.ledgers:
            ledger.evict(plan.start + 1)
        if plan.static:
            for layer in self.layers:
                layer.seen = self._seen  # type: ignore[union-attr]
        if plan.padded:
            self._row_seen = plan.after(plan.position.device)
        else:
            self._row_seen = plan.start + plan.length
        self._open = False
        self._draft = plan if plan.draft else None
        self._check_scores(plan)

    def static_plan(self, handle: Any, rows: int, device: Any) -> Plan:
        """Return a plan for steps with static addresses; the cache must be full.

        Raises:
            CacheError: a cache that is not full yet, has pads, or frees several slots at once.
            UnsupportedModelError: layers of transformers' own, or H2O with positions in the cache.
        """
        if self._drafting:
            raise CacheError("a compiled step writes at once: call end_drafts() first")
        plan = self.begin(handle, rows, 1, None, device)
        self._open = False
        rings = [x for x in self.layers if isinstance(x, RingLayer)]
        if len(rings) not in (0, len(self.layers)) or (not rings and self._raw_keys):
            raise UnsupportedModelError(
                "a compiled step needs full attention in every layer, and original positions "
                "under a ranked policy"
            )
        split = any(isinstance(x, EvictionLayer) and x.over_ranks for x in self.layers)
        if split and self.policy.scope == "layer":
            raise UnsupportedModelError(
                f"a compiled step of {self.policy} with heads split over ranks: scores are summed "
                'between them; use scope="head", or no compiled step'
            )
        capacity = self.policy.capacity
        full = capacity is not None and not plan.padded and self._seen > capacity
        if not full or (not rings and not plan.ledgers):
            raise CacheError(
                "a compiled step needs a full cache without pads and evict_every=1: feed more "
                f"than {capacity} tokens first, then one more on its own"
            )
        plan.static = True
        plan.slot = torch.zeros(1, dtype=torch.int64, device=device)
        return plan

    def advance(self, plan: Plan) -> None:
        """Move a static plan to the next token, in place, before its forward runs."""
        assert isinstance(self._row_seen, int)
        self._check_usable()
        start = self._row_seen
        self._rebase(start, 1)
        plan.seen, plan.start, plan.base = self._seen, start, self._base
        plan.memo.clear()
        plan.position.fill_(start)
        plan.row_seen.fill_(start)
        ring = next((x for x in self.layers if isinstance(x, RingLayer)), None)
        if ring is not None:
            assert plan.slot is not None
            plan.slot.fill_(ring.slot(start))
            ring._turn_head(plan)
        for ledger in plan.ledgers:
            ledger.take_in(start)
        self._open = True

    def _open_ledgers(self) -> list[Ledger]:
        """Return the ledgers once every ranked layer is full and frees one slot a token."""
        ranked = [x for x in self.layers if isinstance(x, RankedLayer)]
        if self.evict_every != 1 or not ranked or any(x.free is None for x in ranked):
            self._ledgers = []
        elif not self._ledgers:
            self._ledgers = ledgers(ranked)
        return self._ledgers

    @property
    def _raw_keys(self) -> bool:
        return self.positions == "in_cache" and self._ranked

    @property
    def _ranked(self) -> bool:
        extents = self.policy.extents
        return extents is not None and self.policy.band is None

    def _check_usable(self) -> None:
        if self._open and any(getattr(x, "seen", self._seen) != self._seen for x in self.layers):
            self._broken = True
        if self._broken:
            raise CacheError(
                "a forward failed half-way, so layers hold different tokens; call reset() and feed "
                "the sequence again"
            )
        if self._draft is not None:
            raise CacheError("a draft is open: crop() says how much of it stays")

    def _check_scores(self, plan: Plan | None = None) -> None:
        """Poison a cache whose scores are no numbers; without a plan, whatever the device."""
        try:
            check_scores(self.layers, plan)
        except CacheError:
            self._broken = True
            raise

    def _check_rows(self, rows: int) -> None:
        held = self.rows
        if held not in (-1, rows):
            raise CacheError(
                f"the cache holds {held} rows and got {rows}; use a fresh cache or reset() it"
            )

    def _new_columns(self, mask: Tensor | None, rows: int, length: int) -> Tensor | None:
        if mask is None:
            return None
        if mask.ndim != 2 or mask.shape[0] != rows:
            raise CacheError(
                f"attention_mask of shape {tuple(mask.shape)}: give a 2D mask [{rows}, tokens]; "
                "eviction makes its own causal masks"
            )
        if mask.shape[1] not in (length, self._seen + length):
            raise CacheError(
                f"attention_mask covers {mask.shape[1]} tokens; the cache has seen {self._seen}, "
                f"{length} are new: give {self._seen + length} columns or the {length} new ones"
            )
        return mask[:, -length:].to(torch.bool)

    def _rows_seen(self, device: Any) -> Tensor:
        if isinstance(self._row_seen, Tensor):
            return self._row_seen.to(device)
        return torch.full((1, 1), self._row_seen, dtype=torch.int64, device=device)

    def _rebase(self, start: int, length: int) -> None:
        """Keep the positions fed bounded: turn the stored window back once in a long while.

        A key lives through at most a few of these, each one rounding, so half precision does not
        drift as it does when keys are turned at every step.

        Raises:
            UnsupportedModelError: a forward that reaches beyond where the rope type changes.
        """
        band = self.policy.band
        if self.positions != "in_cache":
            return
        if self._raw_keys:
            self._check_limit(min(start, self.capacity or 0) + length, self.capacity or 0)
            return
        if band is None or not all(isinstance(x, RingLayer) for x in self.layers):
            self._check_limit(start + length, 0)  # sliding layers keep their own positions
            return
        extents = self.policy.extents
        assert extents is not None
        reach = extents[0] + band
        if start - self._base + length <= (self._limit or max(_REBASE_AT, reach + length)):
            return
        by = start - self._base - reach
        fewest = self._row_seen if isinstance(self._row_seen, int) else int(self._row_seen.min())
        if by > 0 and fewest >= extents[0]:  # a head lies at 0..S-1: none may arrive after a rebase
            for layer in self.layers:
                assert isinstance(layer, RingLayer)
                layer.rebase(by)
            self._base += by
        self._check_limit(start - self._base + length, reach)

    def _check_limit(self, end: int, reach: int) -> None:
        """Refuse positions from `end` on where the rope type changes; `reach` are held."""
        if self._limit is not None and end > self._limit:
            raise UnsupportedModelError(
                f"{self._config.model_type}: its positions change beyond {self._limit}; feed "
                f"chunks of at most {max(self._limit - reach, 1)} tokens (prefill_chunk_size= of "
                "generate, chunk= of stream)"
                + ("" if reach else f", and no more than {self._limit} in all")
            )
