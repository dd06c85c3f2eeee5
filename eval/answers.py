"""answers: how well a known answer is predicted, teacher-forced.

A small model is near chance on exact match alone, so the loss and the rank of the answer's tokens
stand beside it. That every token is the most likely one, given those before, is just what greedy
decoding needs to write the answer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvevict.cache import EvictionCache
from kvevict.eval.caches import CacheSettings, cross_entropy
from kvevict.models.stream import stream


def score_answer(
    model: Any, answer: Tensor, cache: EvictionCache, settings: CacheSettings, last: Tensor
) -> tuple[dict[str, Any], Tensor]:
    """Feed an answer and say how well it was predicted.

    Args:
        model: a patched model.
        answer: int64 `[n]`, n >= 1.
        cache: as it stands after the question.
        settings: their chunk.
        last: float32 `[V]`, logits after the question.

    Returns:
        `answer_nll` (mean nats a token), `answer_tokens`, `exact_match` (0 or 1), `answer_rank`
        (mean rank of the answer's tokens, 1 is best) and `first_rank`; and the logits `[V]` after
        the answer.
    """
    parts = [last[None]]
    for step in stream(model, answer, cache, settings.chunk or len(answer), logits=True):
        assert step.logits is not None
        parts.append(step.logits)
    logits = torch.cat(parts)
    before, target = logits[:-1], answer.to(logits.device)
    own = before.gather(1, target[:, None])
    rank = 1 + (before > own).sum(-1)
    nll = cross_entropy(before, answer)
    return {
        "answer_nll": float(nll.double().mean()),
        "answer_tokens": len(answer),
        "exact_match": int((before.argmax(-1) == target).all()),
        "answer_rank": float(rank.double().mean()),
        "first_rank": int(rank[0]),
    }, logits[-1].clone()
