"""State that layers share, so that one operation serves all of them at a decode step.

A step of a small model is hundreds of tiny operations; what each layer would do alone for its
positions, its victim or its head is done here once for all layers that lie alike (same shape,
dtype and device).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvevict.plan import Plan
    from kvevict.ranked import RankedLayer
    from kvevict.ring import RingLayer


class Ledger:
    """Positions, scores and free slots of ranked layers; the layers hold views of them.

    Attributes:
        position: int64 `[L, B, H, C]`.
        score: float32 `[L, B, H, C]`.
        free: int64 `[L, B, H]`, the slot that each head's next token takes.
    """

    def __init__(self, layers: list[RankedLayer]) -> None:
        self.layers = layers
        self.policy = layers[0].policy
        with torch.inference_mode(False):  # inference tensors refuse later in-place writes
            self._gather()

    def _gather(self) -> None:
        layers = self.layers
        self.position = torch.stack([x.position for x in layers])
        self.score = torch.stack([x.score for x in layers])
        self.free = torch.stack([x.free for x in layers])
        for index, layer in enumerate(layers):
            layer.position, layer.score = self.position[index], self.score[index]
            layer.free = self.free[index]
        L, B, H, C = self.position.shape
        self._first = torch.arange(B * H, device=self.position.device) * C
        self._all = torch.arange(L * B * H, device=self.position.device) * C
        self._rows = self._all.view(L, -1).clone()  # written in place: addresses stay
        for layer, row in zip(layers, self._rows.unbind(0), strict=True):
            layer.row = row

    def take_in(self, start: int) -> None:
        """Enter the token of index `start` into every head's free slot; layers write the states."""
        flat = self.free.view(-1)
        at = self._all + flat
        self.position.view(-1).index_fill_(0, at, start)
        if self.policy.needs_scores:
            self.score.view(-1).index_fill_(0, at, 0.0)
        torch.add(self.free.view(len(self.layers), -1), self._first, out=self._rows)

    def evict(self, seen: int) -> None:
        """Choose every head's victim, the next free slot, now that all scores are known."""
        self.free.copy_(self.policy.victim(self.score, self.position, seen))


def take_in(books: list[Ledger], start: int) -> None:
    """Enter the token of index `start` into every ledger."""
    for ledger in books:
        ledger.take_in(start)


def ledgers(layers: list[RankedLayer]) -> list[Ledger]:
    """Return one ledger for each set of layers that lie alike."""
    groups: dict[Any, list[RankedLayer]] = {}
    for layer in layers:
        groups.setdefault((layer.position.shape, layer.position.device), []).append(layer)
    return [Ledger(group) for group in groups.values()]


class Heads:
    """The heads of ring layers as they arrived, turned together once a step.

    A head never changes once it is complete, so the stack is made at the first turn and kept.
    """

    def __init__(self, layers: list[RingLayer]) -> None:
        self.layers = layers
        self._stacks: list[tuple[list[RingLayer], Tensor]] = []

    def drop(self) -> None:
        """Forget the stack: rows were reordered or the cache was reset."""
        self._stacks = []

    def turn(self, plan: Plan, shift: int) -> None:
        """Write every layer's head turned by `shift` positions, from the untouched copies."""
        if not self._stacks:
            self._gather()
        for layers, stack in self._stacks:
            rope = layers[0].rope
            turned = rope.rotate(stack, rope.turn(shift, stack.device))
            for layer, head in zip(layers, turned.unbind(0), strict=True):
                layer.keys[:, :, : layer.head] = head
                layer.turned = True

    def restore(self, layer: RingLayer) -> None:
        """Write one layer's head back as it arrived."""
        for layers, stack in self._stacks:
            if layer in layers:
                layer.keys[:, :, : layer.head] = stack[layers.index(layer)]

    def _gather(self) -> None:
        groups: dict[Any, list[RingLayer]] = {}
        for layer in self.layers:
            if layer.rope is not None and layer.rope.style != "none" and layer.is_initialized:
                kind = (layer.rope.key, layer.keys.shape, layer.keys.dtype, layer.keys.device)
                groups.setdefault(kind, []).append(layer)
        self._stacks = [
            (group, torch.stack([x.keys[:, :, : x.head] for x in group]))
            for group in groups.values()
        ]
