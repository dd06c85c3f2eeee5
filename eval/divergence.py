"""divergence: how far a policy's predictions are from the full cache's, token by token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvevict.cache import EvictionCache
from kvevict.errors import KvevictError
from kvevict.eval import statistics
from kvevict.eval.caches import CacheSettings, check_longer, cross_entropy, patched, policies_at
from kvevict.eval.grid import Cell, Outcome, cells, run_cells
from kvevict.eval.results import RunFolder
from kvevict.eval.texts import Tokens
from kvevict.layers import EvictionLayer
from kvevict.models.releases import cache_argument
from kvevict.models.stream import stream
from kvevict.policies import Full
from kvevict.policy import Policy


def run(
    model: Any,
    text: Tokens,
    policies: Sequence[str | Policy],
    *,
    budgets: Sequence[str | int] = (),
    settings: CacheSettings | None = None,
    bucket: int = 256,
    mass_at: int = 4,
    folder: RunFolder | None = None,
    seed: int = 0,
) -> list[Outcome]:
    """Compare every policy with the full cache on one text.

    Args:
        model: a decoder-only model; patched for the call if it is not.
        text: fed to both.
        policies: policies or their strings.
        budgets: tokens or shares to bring the policies to.
        settings: chunk, positions, backend, evict_every.
        bucket: positions a bucket.
        mass_at: places where the retained attention mass is measured; 0 for none.
        folder: an opened folder that keeps finished cells.
        seed: of the bootstrap.

    Returns:
        A row a policy: `kl` (nats, full to policy) with its 95% interval, `top1_agreement`,
        `nll_delta`, and `attention_mass`: the share of the full cache's attention, mean over
        layers, heads and places, that lies on what the policy still holds; `attention_mass_layers`
        has it by layer.

    Raises:
        PolicyError: a bad policy or budget.
        KvevictError: a text not longer than the largest budget.
    """
    settings = settings or CacheSettings()
    chosen = policies_at(policies, budgets, len(text.ids))
    check_longer(chosen, len(text.ids), "the text")
    todo = cells([{"policy": p} for p in chosen], lambda k: str(k["policy"]))
    with patched(model):
        done = run_cells(
            todo,
            lambda cell: _compare(model, text, cell, settings, bucket, mass_at),
            folder,
            "divergence",
        )
    for outcome in done:
        row = outcome.row
        row["kl"] = statistics.mean(row["buckets"])
        row["kl_low"], row["kl_high"] = statistics.interval(row["buckets"], seed)
    return done


def _compare(
    model: Any, text: Tokens, cell: Cell, settings: CacheSettings, bucket: int, mass_at: int
) -> Outcome:
    """Run both caches in step, one chunk of logits each in memory."""
    ids, policy = text.ids, cell.key["policy"]
    chunk = settings.chunk or len(ids)
    cache, full = settings.cache(model, policy), settings.cache(model, Full())
    total = torch.zeros(len(ids))  # one buffer: see `feed`
    agree = 0
    delta = torch.zeros((), dtype=torch.float64)
    masses: list[Tensor] = []
    due = [len(ids) * (i + 1) // (mass_at + 1) for i in range(mass_at)]
    began = time.perf_counter()
    for ours, theirs in zip(
        stream(model, ids, cache, chunk, True), stream(model, ids, full, chunk, True), strict=True
    ):
        assert ours.logits is not None
        assert theirs.logits is not None
        seen = theirs.start + len(theirs.nll)
        total[theirs.start : seen] = divergence(theirs.logits, ours.logits)
        agree += int((ours.logits.argmax(-1) == theirs.logits.argmax(-1)).sum())
        target = ids[theirs.start + 1 : theirs.start + len(theirs.nll) + 1]
        count = len(target)
        loss = cross_entropy(ours.logits[:count], target) if count else torch.zeros(0)
        control = cross_entropy(theirs.logits[:count], target) if count else torch.zeros(0)
        delta += (loss.double() - control.double()).sum()
        if due and seen >= due[0] and seen < len(ids):
            due = [d for d in due if d > seen]
            masses.append(attention_mass(model, ids[: seen + 1], cache, chunk))
    row = settings.facts(cache) | {
        "tokens_fed": len(ids),
        "tokens_scored": len(total),
        "scored_from": 1,
        "scored_to": len(ids) + 1,
        "bos": text.bos,
        "buckets": statistics.buckets(total, bucket, 0, 1),
        "top1_agreement": agree / len(ids),
        "nll_delta": float(delta) / (len(ids) - 1),
    }
    if masses:
        by_layer = torch.stack(masses).mean(0)
        row["attention_mass"] = float(by_layer.mean())
        row["attention_mass_layers"] = [round(float(x), 4) for x in by_layer]
    timing = {"tokens_per_second": len(ids) / (time.perf_counter() - began)}
    return Outcome(row, timing, {"kl": total.numpy()})


def divergence(full: Tensor, ours: Tensor) -> Tensor:
    """Return KL(full || ours) of each token's prediction, float32 `[n]` nats, from `[n, V]`."""
    p, q = full.float().log_softmax(-1), ours.float().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).clamp(min=0).cpu()


def attention_mass(model: Any, ids: Tensor, cache: EvictionCache, chunk: int) -> Tensor:
    """Return how much of full attention lies on what a cache holds, float32 `[layers]`.

    The last token attends over the whole past with a cache of transformers, in eager attention,
    which gives the weights; its own weight counts as held.

    Args:
        model: a patched model; left as it was.
        ids: int64 `[N]`, all tokens that the cache has seen and the one after.
        cache: what is held.
        chunk: tokens a forward.

    Raises:
        KvevictError: the model gives no attention weights.
    """
    name = cache_argument(model)
    device = model.get_input_embeddings().weight.device
    past = DynamicCache(config=model.config)
    before = model.config.get_text_config(decoder=True)._attn_implementation
    with torch.no_grad():
        for part in ids[:-1].split(chunk):
            model(input_ids=part.to(device)[None], use_cache=True, **{name: past})
        model.set_attn_implementation("eager")
        try:
            out = model(
                input_ids=ids[-1:].to(device)[None],
                use_cache=True,
                output_attentions=True,
                **{name: past},
            )
        finally:
            model.set_attn_implementation(before)
    if not out.attentions:
        raise KvevictError(f"{model.config.model_type} gives no attention weights: use mass_at=0")
    found = []
    for index, weights in enumerate(out.attentions):
        if isinstance(cache.layers[index], EvictionLayer):
            found.append(_held(weights[0, :, 0].float().cpu(), cache.kept_positions(index)[0]))
    return torch.stack(found)


def _held(weights: Tensor, kept: Tensor) -> Tensor:
    """Return the mean mass on kept positions: weights `[H*G, N]`, kept `[H, S]`, -1 empty."""
    H = kept.shape[0]
    grouped = weights.view(H, -1, weights.shape[-1]).mean(1)  # [H, N]
    kept = kept.cpu()
    mass = grouped.gather(1, kept.clamp(min=0)) * (kept >= 0)
    return (mass.sum(-1) + grouped[:, -1]).mean()
