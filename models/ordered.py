"""ordered: what is done to slots that lie in order: keep some, cut the rest off, turn keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvevict.models.rope import Rope
from kvevict.ranked import RankedLayer


def take(layers: Sequence[RankedLayer], slots: Tensor) -> None:
    """Keep these slots `[n]`, ascending, in every layer and head."""
    n = len(slots)
    with torch.inference_mode(False):
        for layer in (x for x in layers if x.is_initialized):
            index = slots.to(layer.keys.device)
            for state in (layer.keys, layer.values, layer.position, layer.score):
                state[:, :, :n] = state.index_select(2, index)
    cut(layers, n)


def cut(layers: Sequence[RankedLayer], length: int) -> None:
    """Keep the first slots alone, in every layer and head."""
    with torch.inference_mode(False):
        for layer in (x for x in layers if x.is_initialized):
            layer.position[:, :, length:] = -1
            layer.score[:, :, length:] = 0.0
            layer.length, layer.free = length, None


def pick(layer: RankedLayer, order: Tensor) -> None:
    """Keep a layer's slots `[H, n]` in this order, others in every head."""
    n = order.shape[1]
    with torch.inference_mode(False):
        for buffer in (layer.keys, layer.values):
            index = order[None, :, :, None].expand(1, -1, -1, buffer.shape[3])
            buffer[:, :, :n] = buffer.gather(2, index)
        for state in (layer.position, layer.score):
            state[:, :, :n] = state.gather(2, order[None])
    cut([layer], n)


def turn(layers: Sequence[tuple[RankedLayer, Rope]], target: Tensor) -> None:
    """Turn the stored keys to these positions `[stored]`, in one rounding each.

    Layers that turn alike share cos and sin.
    """
    known: dict[Any, Any] = {}
    for layer, rope in layers:
        old = layer.position[0, :, : layer.length]  # [H, n]
        goal = target.to(old.device)
        delta = goal - old
        if bool((delta == delta[:1]).all()):
            delta = delta[:1]
        key = (rope.key, old.device)
        if key not in known or not torch.equal(known[key][0], delta):
            known[key] = (delta, rope.turn(delta, old.device))
        keys = layer.keys[0, :, : layer.length]
        moved = rope.rotate(keys, known[key][1])
        layer.keys[0, :, : layer.length] = torch.where((delta == 0)[..., None], keys, moved)
        layer.position[0, :, : layer.length] = goal
