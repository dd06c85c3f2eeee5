"""What a family must do to count as served, each against an oracle that shares no code with ours.

The oracles are brute force inside the model's own forward: an attention function that sees the
whole sequence and keeps, for every query, exactly what the policy would have kept. The rotation of
the sinks is the model's own as well: the sinks alone are run at every position they could stand at.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import sdpa_mask

from kvevict import EvictionCache, UnsupportedModelError, patch
from kvevict.models.releases import cache_argument

_NAME = "kvevict_oracle"
LENGTH = 26
TOLERANCE = 3e-4  # of the largest logit
_SINKS, _WINDOW, _HEAVY, _RECENT = 2, 7, 4, 5
_CHUNKINGS = ([6, 1, 1, LENGTH - 11, 1, 1, 1], [LENGTH - 4, 1, 1, 1, 1])


def tokens(rows: int = 1, length: int = LENGTH) -> Tensor:
    """Return fixed ids without special ones."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(3, 90, (rows, length), generator=generator)


def feed(
    model: Any, ids: Tensor, cache: Any, sizes: list[int], mask: Tensor | None = None
) -> Tensor:
    """Return the logits of ids fed in forwards of these sizes; stock caches get positions too."""
    outs, end = [], 0
    with torch.no_grad():
        for size in sizes:
            start, end = end, end + size
            given = {} if mask is None else {"attention_mask": mask[:, :end]}
            if not isinstance(cache, EvictionCache):  # which some hybrids miscount on their own
                given["position_ids"] = torch.arange(start, end)[None]
            given[cache_argument(model)] = cache
            outs.append(model(input_ids=ids[:, start:end], use_cache=True, **given).logits)
    return torch.cat(outs, 1)


def off(got: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, as a share of the largest logit."""
    return float((got - wanted).abs().max() / wanted.abs().max())


def stock(model: Any) -> DynamicCache:
    """Return transformers' own cache for a model."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


# -- the promises ---------------------------------------------------------------------------------


def large_budget_changes_nothing(model: Any) -> None:
    """Every policy with budget to spare gives a DynamicCache's logits, whatever the chunks."""
    ids = tokens()
    for sizes in ([LENGTH - 2, 1, 1], [5, 1, 9, LENGTH - 15]):
        wanted = feed(model, ids, stock(model), sizes)
        with patch(model) as handle:
            for policy in ("full", "window:window=40", "h2o:heavy=20,recent=20"):
                got = feed(model, ids, EvictionCache(model, policy), sizes)
                assert off(got, wanted) < TOLERANCE, (policy, sizes, off(got, wanted))
            assert handle.pads_problem is None or "row" in handle.pads_problem
            plain = feed(model, ids, stock(model), sizes)
            assert off(plain, wanted) < TOLERANCE, "a DynamicCache on the patched model"


def budget_is_hard(model: Any) -> None:
    """After every forward no evicting layer holds more than its capacity."""
    ids = tokens()
    with patch(model):
        for policy in ("h2o:heavy=4,recent=5", "window:window=9"):
            cache = EvictionCache(model, policy)
            for first in range(0, LENGTH, 3):
                feed_on(model, ids[:, first : first + 3], cache)
                for index in evicting(cache):
                    assert cache.kept_positions(index).shape[2] <= 9


def padded_row_is_the_row_alone(model: Any) -> None:
    """A left-padded row gives the logits of the same row alone, under eviction."""
    ids, pads = tokens(), 4
    rows = torch.cat([ids, torch.cat([ids[:, :pads] * 0 + 3, ids[:, :-pads]], 1)])
    mask = torch.ones_like(rows)
    mask[1, :pads] = 0
    sizes = [LENGTH - 4, 1, 1, 1, 1]
    with patch(model):
        for policy in ("h2o:heavy=4,recent=5", "window:window=9"):
            both = feed(model, rows, EvictionCache(model, policy), sizes, mask)
            alone = feed(
                model,
                ids[:, :-pads],
                EvictionCache(model, policy),
                [sizes[0] - pads, 1, 1, 1, 1],
            )
            assert off(both[1:, pads:], alone) < TOLERANCE, (policy, off(both[1:, pads:], alone))


def chunks_change_nothing(model: Any) -> None:
    """StreamingLLM gives the same for any chunking (hybrids: as much as a DynamicCache does)."""
    ids = tokens()
    policy = f"streaming_llm:sinks={_SINKS},window={_WINDOW}"
    chunkings = ([1] * LENGTH, [4, 1, 9, LENGTH - 14])
    own = max(off(feed(model, ids, stock(model), x), plain(model, ids)) for x in chunkings)
    with patch(model):
        whole = feed(model, ids, in_cache(model, policy), [LENGTH])
        for sizes in chunkings:
            got = feed(model, ids, in_cache(model, policy), sizes)
            assert off(got, whole) < TOLERANCE + 3 * own, (sizes, off(got, whole))


def scores_are_eagers_sums(model: Any) -> None:
    """H2O's scores with budget to spare equal eager attention's column sums."""
    ids, sizes = tokens(), [11, 1, LENGTH - 12]
    model.set_attn_implementation("eager")
    wanted, end = {}, 0
    cache = stock(model)
    for size in sizes:
        start, end = end, end + size
        with torch.no_grad():
            out = model(
                input_ids=ids[:, start:end],
                position_ids=torch.arange(start, end)[None],
                output_attentions=True,
                use_cache=True,
                **{cache_argument(model): cache},
            )
        weights = [w for w in out.attentions if w is not None and w.ndim == 4]
        layers = range(len(cache.layers))
        if len(weights) != len(cache.layers):  # hybrids return those of attention layers alone
            layers = [i for i in layers if isinstance(getattr(cache.layers[i], "keys", 0), Tensor)]
        for index, weight in zip(layers, weights, strict=True):
            sums = wanted.setdefault(index, torch.zeros(weight.shape[1], LENGTH))
            sums[:, : weight.shape[3]] += weight[0].sum(1)[:, :LENGTH]
    with patch(model):
        cache = EvictionCache(model, "h2o:heavy=20,recent=20")
        feed(model, ids, cache, sizes)
        for index in evicting(cache):
            got = cache.scores(index)[0]
            if _eager_leaves_the_sink_out(model, index, wanted[index]):
                continue  # its weights are not what multiplies the values; see h2o_is_exact
            sums = wanted[index].unflatten(0, (len(got), -1)).sum(1)
            assert (got - sums).abs().max() < 2e-3, (index, (got - sums).abs().max())


def _eager_leaves_the_sink_out(model: Any, index: int, sums: Tensor) -> bool:
    """Whether eager attention scales its output for a learned sink instead (Granite SWA)."""
    sink = any(f".{index}." in n and "sink" in n for n, _ in model.named_parameters())
    return sink and bool((sums.sum(-1) - LENGTH).abs().max() < 1e-3)


def streaming_is_exact(model: Any) -> bool:
    """StreamingLLM equals the oracle; True with in-cache positions, False with original ones."""
    ids = tokens()
    policy = f"streaming_llm:sinks={_SINKS},window={_WINDOW}"
    # Some recurrent layers lose their state between chunks, under a DynamicCache as well.
    own, sizes = min(
        (off(feed(model, ids, stock(model), x), plain(model, ids)), x) for x in _CHUNKINGS
    )
    with patch(model):
        try:
            cache = EvictionCache(model, policy, positions="in_cache")
            turned = True
        except UnsupportedModelError:
            cache = EvictionCache(model, policy, positions="original")
            turned = False
        got = feed(model, ids, cache, sizes)
    sinks = _sinks_everywhere(model, ids[:, :_SINKS]) if turned else {}
    wanted = _under(model, ids, _streaming(sinks))
    assert off(got, wanted) < TOLERANCE + 3 * own, off(got, wanted)
    full = plain(model, ids)
    assert off(wanted, full) > 20 * TOLERANCE, "the case does not tell eviction from none"
    return turned


def h2o_is_exact(model: Any) -> None:
    """H2O fed token by token equals the oracle that evicts inside one forward."""
    ids = tokens()
    with patch(model):
        cache = EvictionCache(model, f"h2o:heavy={_HEAVY},recent={_RECENT}")
        got = feed(model, ids, cache, [1] * LENGTH)
    own = off(feed(model, ids, stock(model), [1] * LENGTH), plain(model, ids))
    wanted = _under(model, ids, _h2o)
    assert off(got, wanted) < TOLERANCE + 3 * own, off(got, wanted)


def drafts_leave_no_trace(model: Any) -> bool:
    """What stays of drafts is as if fed token by token; False where they cannot be taken back."""
    ids, prompt = tokens(), 8
    own = off(feed(model, ids, stock(model), [prompt, 9, 9]), plain(model, ids))
    with patch(model):
        for policy in (f"h2o:heavy={_HEAVY},recent={_RECENT}", f"window:window={_WINDOW}"):
            cache, alone = EvictionCache(model, policy), EvictionCache(model, policy)
            try:
                cache.activate_past_recording()
            except UnsupportedModelError:
                return False
            cache.certain_until(prompt)
            at = prompt
            feed_on(model, ids[:, :at], alone)
            feed_on(model, ids[:, : at + 2], cache)  # the prompt, and two tokens that go again
            cache.crop(-2)
            for length, stay in ((5, 2), (4, 4), (1, 1), (6, 1), (4, 3)):
                got = feed_on(model, ids[:, at : at + length], cache)[:, :stay]
                cache.crop(stay - length)
                new = ids[:, at : at + stay].split(1, 1)
                wanted = torch.cat([feed_on(model, token, alone) for token in new], 1)
                assert off(got, wanted) < TOLERANCE + 3 * own, (policy, at, off(got, wanted))
                at += stay
            for index in evicting(cache):
                assert torch.equal(cache.kept_positions(index), alone.kept_positions(index))
    return True


# -- helpers --------------------------------------------------------------------------------------


def plain(model: Any, ids: Tensor) -> Tensor:
    """Return the logits of one forward without a cache."""
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def feed_on(model: Any, ids: Tensor, cache: EvictionCache) -> Tensor:
    """Feed more tokens to a cache in use; their logits."""
    with torch.no_grad():
        out = model(input_ids=ids, use_cache=True, **{cache_argument(model): cache})
    return out.logits  # type: ignore[no-any-return]


def in_cache(model: Any, policy: str) -> EvictionCache:
    """Return a cache with in-cache positions where the model has them."""
    try:
        return EvictionCache(model, policy, positions="in_cache")
    except UnsupportedModelError:
        return EvictionCache(model, policy, positions="original")


def evicting(cache: EvictionCache) -> list[int]:
    """Return the indices of evicting layers."""
    return [i for i, x in enumerate(cache.layers) if type(x).__name__ in _OURS]


_OURS = ("RingLayer", "RankedLayer")


# -- the oracles ----------------------------------------------------------------------------------


def _under(model: Any, ids: Tensor, attend: Callable[..., Tensor]) -> Tensor:
    """Return the logits of one forward whose full-attention layers run `attend`."""
    full = {i for i, x in enumerate(stock(model).layers) if type(x).__name__ == "DynamicLayer"}

    def oracle(
        module: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        G = q.shape[1] // k.shape[1]
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        wide = v.repeat_interleave(G, 1)

        def logits(keys: Tensor) -> Tensor:
            found = q @ keys.repeat_interleave(G, 1).mT * scale
            return found if softcap is None else torch.tanh(found / softcap) * softcap

        if module.layer_idx in full:
            out = attend(module.layer_idx, logits, k, wide, s_aux, G)
            return out.transpose(1, 2).contiguous(), None
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        if attention_mask is not None:
            boolean = attention_mask.dtype == torch.bool
            hidden = ~attention_mask if boolean else attention_mask < -1e4
        out = _softmax(logits(k).masked_fill(hidden, -torch.inf), s_aux) @ wide
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(_NAME, oracle)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    before = model.config.get_text_config(decoder=True)._attn_implementation
    model.set_attn_implementation(_NAME)
    try:
        return plain(model, ids)
    finally:
        model.set_attn_implementation(before)


def _softmax(logits: Tensor, s_aux: Tensor | None) -> Tensor:
    """Return probabilities; a learned sink takes its share and leaves no column."""
    if s_aux is None:
        return logits.softmax(-1)
    sink = s_aux.reshape(1, -1, 1, 1).expand(logits.shape[0], -1, logits.shape[2], 1)
    return torch.cat([logits, sink], -1).softmax(-1)[..., :-1]


def _sinks_everywhere(model: Any, sinks: Tensor) -> dict[int, Tensor]:
    """Return each layer's sink keys `[LENGTH, H, S, D]`, run at every shift by the model itself."""
    at = torch.arange(sinks.shape[1])[None] + torch.arange(LENGTH)[:, None]
    cache = stock(model)
    with torch.no_grad():
        model(
            input_ids=sinks.expand(LENGTH, -1),
            position_ids=at,
            use_cache=True,
            **{cache_argument(model): cache},
        )
    return {i: x.keys for i, x in enumerate(cache.layers) if type(x).__name__ == "DynamicLayer"}


def _streaming(sinks: dict[int, Tensor]) -> Callable[..., Tensor]:
    def attend(
        layer: int, logits: Callable[..., Tensor], k: Tensor, v: Tensor, s_aux: Any, G: int
    ) -> Tensor:
        scores = logits(k)  # [1, Hq, N, N]
        n = k.shape[2]
        if layer in sinks:
            by_shift = torch.stack([logits(x[None]) for x in sinks[layer]])  # [shift, 1, Hq, N, S]
            for t in range(n):
                shift = max(0, t - _SINKS - _WINDOW)
                scores[:, :, t, :_SINKS] = by_shift[shift, :, :, t]
        t, j = torch.arange(n)[:, None], torch.arange(n)[None]
        seen = (j <= t) & ((j < _SINKS) | (t - j <= _WINDOW))
        return _softmax(scores.masked_fill(~seen, -torch.inf), s_aux) @ v

    return attend


def _h2o(
    layer: int, logits: Callable[..., Tensor], k: Tensor, v: Tensor, s_aux: Any, G: int
) -> Tensor:
    scores, (_, H, n, _) = logits(k), k.shape
    alive = torch.zeros(H, n, dtype=torch.bool)
    mass = torch.zeros(H, n, dtype=torch.float64)
    rows = []
    for t in range(n):
        alive[:, t] = True
        hidden = ~alive.repeat_interleave(G, 0)[None, :, None]
        share = _softmax(scores[:, :, t : t + 1].masked_fill(hidden, -torch.inf), s_aux)
        rows.append(share @ v)
        mass += share[0, :, 0].double().view(H, G, n).sum(1)
        for head in range(H):
            if int(alive[head].sum()) > _HEAVY + _RECENT:
                old = [j for j in range(t + 1 - _RECENT) if alive[head, j]]
                alive[head, min(old, key=lambda j: (float(mass[head, j]), j))] = False
    return torch.cat(rows, 2)
