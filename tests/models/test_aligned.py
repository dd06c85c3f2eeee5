"""Whole spans leave the cache; what it costs and what it gives, in each realisation."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from kvevict import patch
from kvevict.errors import BudgetError, CacheError, PolicyError
from kvevict.models.aligned import MessageAlignedCache
from kvevict.models.realise import _matched, common_prefix, realise
from kvevict.models.releases import cache_argument

SIZES = [5, 9, 1, 14, 7, 3, 11]


def parts_of(draw: Callable[..., list[int]], sizes: list[int] = SIZES, seed: int = 0) -> list[Any]:
    ids = draw(sum(sizes), seed)
    found, at = [], 0
    for size in sizes:
        found.append(tuple(ids[at : at + size]))
        at += size
    return found


def filled(model: Any, parts: list[Any], capacity: int = 200, chunk: int = 256) -> Any:
    cache = MessageAlignedCache(model, capacity)
    for part in parts:
        cache.append(part, chunk=chunk)
    return cache


def plain(model: Any, ids: list[int], positions: list[int] | None = None) -> torch.Tensor:
    """All logits of one forward with transformers' own cache."""
    given = {} if positions is None else {"position_ids": torch.tensor([positions])}
    with torch.no_grad():
        return model(torch.tensor([ids]), **given).logits[0].float()


NEXT = [3, 1, 4, 1, 5, 9, 2, 6]


def test_gathering_everything_changes_no_bit(toy: Any, draw: Any) -> None:
    with patch(toy):
        cache = filled(toy, parts_of(draw))
        other = copy.deepcopy(cache)
        other.drop([])
        other.keep_tokens([torch.ones(2, other.stored, dtype=torch.bool)] * 3, close_gaps=True)
        a, b = cache.append(NEXT, logits=len(NEXT)), other.append(NEXT, logits=len(NEXT))
        assert torch.equal(a, b)
        own = DynamicCache(config=toy.config)
        with torch.no_grad():
            for part in [*parts_of(draw), tuple(NEXT)]:
                out = toy(torch.tensor([part]), **{cache_argument(toy): own})
    assert torch.allclose(a, out.logits[0].float(), atol=2e-5)


def test_dropped_spans_are_what_a_mask_would_hide(toy: Any, draw: Any) -> None:
    """`kv` against a forward in which the queries behind the drop do not see the spans."""
    parts = parts_of(draw)
    ids = [i for p in parts for i in p]
    with patch(toy):
        cache = filled(toy, parts)
        cache.drop([1, 3])
        ours = cache.append(NEXT, logits=len(NEXT))
        n, m = len(ids), len(NEXT)
    hidden = [5 <= i < 14 or 15 <= i < 29 for i in range(n)]
    mask = torch.ones(n + m, n + m).tril().bool()
    mask[n:, :n] &= ~torch.tensor(hidden)
    bias = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))[None, None]
    with torch.no_grad():
        wanted = toy(torch.tensor([[*ids, *NEXT]]), attention_mask=bias).logits[0, n:]
    assert ours is not None
    assert torch.allclose(ours, wanted, atol=1e-4)


@pytest.mark.parametrize("how", ["kv", "kv_reindex"])
@pytest.mark.parametrize("kept", [1, 3, 6])
def test_a_suffix_leaves_as_if_it_had_never_been_read(
    toy: Any, draw: Any, how: str, kept: int
) -> None:
    """P4: bit-equal at equal chunk borders, once positions go on at the kept length."""
    parts = parts_of(draw)
    with patch(toy):
        ours, text = filled(toy, parts), filled(toy, parts)
        realise(ours, parts[:kept], how)
        ours.rewind(ours.stored)
        realise(text, parts[:kept], "text")
        never = filled(toy, parts[:kept])
        found = [c.append(NEXT, logits=len(NEXT)) for c in (ours, text, never)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_middle_gap_is_not_exact(toy: Any, draw: Any) -> None:
    parts = parts_of(draw)
    with patch(toy):
        ours, text = filled(toy, parts), filled(toy, parts)
        realise(ours, parts[:2] + parts[4:], "kv")
        realise(text, parts[:2] + parts[4:], "text")
        a, b = ours.append(NEXT, logits=len(NEXT)), text.append(NEXT, logits=len(NEXT))
    assert float((a - b).abs().max()) > 1e-2


@settings(max_examples=30)
@given(
    stays=st.lists(st.booleans(), min_size=7, max_size=7),
    changed=st.sets(st.integers(0, 6)),
    more=st.integers(0, 6),
)
def test_recomputed_is_total_less_the_common_prefix(
    stays: list[bool], changed: set[int], more: int
) -> None:
    """P5, for any edit: `text` recomputes total - LCP, `kv` only what is new text."""
    model = _toy()
    rng = torch.Generator().manual_seed(1)
    parts = [tuple(torch.randint(1, 97, (s,), generator=rng).tolist()) for s in SIZES]
    edited = [
        (96, *p[: len(p) // 2]) if i in changed else p
        for i, p in enumerate(parts)
        if stays[i] or i in changed
    ]
    edited += [tuple([2] * more)] if more else []
    new = 1 if more else 0
    flat = [i for p in parts for i in p]
    goal = [i for p in edited for i in p]
    with patch(model):
        for how in ("text", "kv", "kv_reindex"):
            cache = filled(model, parts)
            done = realise(cache, edited, how, new=new)
            assert cache.ids == tuple(goal)  # order-preserving, never more than the text itself
            if how == "text":
                assert done.fed == len(goal) - common_prefix(flat, goal)
                assert cache.contiguous
            else:
                old = set(parts)
                assert done.fed <= sum(len(p) for p in edited if p not in old or p[0] == 96)
            again = realise(cache, edited, how)
            assert (again.fed, again.dropped) == (0, 0)  # P6
            if how != "kv":
                assert cache.contiguous


def _toy() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    if "model" not in _MADE:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.3,
            max_position_embeddings=512,
        )
        _MADE["model"] = LlamaForCausalLM(config).eval()
    return _MADE["model"]


_MADE: dict[str, Any] = {}


def test_reindexed_keys_are_those_of_the_new_positions(toy: Any, draw: Any) -> None:
    """Dropping the first span and closing the gap: as if the rest, read behind it, stood at 0."""
    parts = parts_of(draw)
    with patch(toy):
        kv, closed = filled(toy, parts), filled(toy, parts)
        realise(kv, parts[1:], "kv")
        realise(closed, parts[1:], "kv_reindex")
        a, b = kv.append(NEXT, logits=len(NEXT)), closed.append(NEXT, logits=len(NEXT))
    # rotary positions are relative, so a gap at the very front is no gap
    assert torch.allclose(a, b, atol=1e-4)
    assert closed.contiguous
    assert not kv.contiguous


def test_a_replaced_span_is_the_only_one_computed(toy: Any, draw: Any) -> None:
    parts = parts_of(draw)
    edited = [*parts[:3], (7, 8), *parts[4:]]
    with patch(toy):
        cache = filled(toy, parts)
        before = [p.start for p in cache.pieces]
        done = realise(cache, edited, "kv")
        after = [p.start for p in cache.pieces]
        assert (done.fed, done.recomputed, done.dropped) == (2, 2, len(parts[3]))
        assert after == before  # positions stay
        longer = [*parts[:3], tuple(range(1, 31)), *parts[4:]]
        realise(cache, longer, "kv")
        assert cache.ids == tuple(i for p in longer for i in p)
        assert cache.pieces[4].start == cache.pieces[3].stop  # what follows was turned


def test_mass_is_the_attention_received(toy: Any, draw: Any) -> None:
    parts = parts_of(draw)
    ids = [i for p in parts for i in p]
    with patch(toy):
        mass, exposure = filled(toy, parts).mass(), filled(toy, parts, chunk=4).exposure()
    toy.set_attn_implementation("eager")
    with torch.no_grad():
        weights = toy(torch.tensor([ids]), output_attentions=True).attentions
    wanted = sum(w[0].sum((0, 1)).double() for w in weights)
    assert torch.allclose(mass, wanted, atol=1e-3)
    assert exposure.tolist() == [len(ids) - i for i in range(len(ids))]
    assert float(mass.sum()) == pytest.approx(len(ids) * 4 * 3, rel=1e-5)


def test_too_much_is_refused_before_anything_happens(toy: Any, draw: Any) -> None:
    parts = parts_of(draw)
    with patch(toy):
        cache = filled(toy, parts[:3], capacity=20)
        with pytest.raises(BudgetError) as caught:
            cache.append(parts[3])
        assert caught.value.floor_tokens == 29
        assert cache.stored == 15
        with pytest.raises(PolicyError, match="realisation"):
            realise(cache, parts[:1], "magic")


def test_a_rewound_cache_goes_on_as_a_fresh_one(toy: Any, draw: Any) -> None:
    parts = parts_of(draw)
    with patch(toy):
        cache = filled(toy, parts)
        cache.rewind(10)
        assert cache.next_position == 10
        assert [len(p.ids) for p in cache.pieces] == [5, 5]
        fresh = filled(toy, [parts[0], parts[1][:5]])
        a, b = cache.append(NEXT, logits=len(NEXT)), fresh.append(NEXT, logits=len(NEXT))
    assert torch.allclose(a, b, atol=2e-5)  # other chunk borders


@pytest.mark.parametrize("how", ["kv", "kv_reindex"])
def test_positions_go_on_where_the_end_of_the_history_left(toy: Any, draw: Any, how: str) -> None:
    parts = parts_of(draw)
    with patch(toy):
        ours, never = filled(toy, parts), filled(toy, parts[:4])
        done = realise(ours, [*parts[:4], tuple(NEXT)], how, new=1)
        logits = never.append(NEXT)
    assert ours.contiguous
    assert done.logits is not None
    assert torch.equal(done.logits, logits)


@settings(max_examples=200)
@given(st.lists(st.integers(0, 2), max_size=14), st.data())
def test_what_only_leaves_is_never_computed_again(names: list[int], data: Any) -> None:
    """Also among equal messages, such as results that say nothing."""
    old = [(n,) * (n + 1) for n in names]
    stays = data.draw(st.lists(st.booleans(), min_size=len(old), max_size=len(old)))
    parts = [p for p, stay in zip(old, stays, strict=True) if stay]
    found = _matched(old, parts)
    assert sorted(found.values()) == list(range(len(parts)))
    assert all(old[i] == parts[j] for i, j in found.items())
    assert [found[i] for i in sorted(found)] == sorted(found.values())


def test_turned_are_the_keys_that_moved(toy: Any, draw: Any) -> None:
    parts = parts_of(draw)
    longer = [*parts[:3], tuple(range(1, 31)), *parts[4:]]
    with patch(toy):
        for how, wanted in (("kv", sum(SIZES[4:])), ("kv_reindex", sum(SIZES[4:]))):
            assert realise(filled(toy, parts), longer, how).turned == wanted
        assert realise(filled(toy, parts), parts[1:], "kv_reindex").turned == sum(SIZES[1:])


@pytest.mark.parametrize("how", ["text", "kv", "kv_reindex"])
def test_dropped_counts_the_same_in_every_realisation(toy: Any, draw: Any, how: str) -> None:
    parts = parts_of(draw)
    with patch(toy):
        done = realise(filled(toy, parts), [parts[0], (7, 8), *parts[3:]], how)
    assert done.dropped == SIZES[1] + SIZES[2]


def test_text_leaves_a_piece_a_part(toy: Any, draw: Any) -> None:
    ids = tuple(draw(12))
    with patch(toy):
        cache = filled(toy, [ids[:9]])
        realise(cache, [ids[:4], ids[4:7], ids[7:]], "text")
    assert [p.ids for p in cache.pieces] == [ids[:4], ids[4:7], ids[7:]]


@pytest.mark.parametrize("layer", [0, 1])
def test_a_forward_that_fails_leaves_the_cache_as_it_was(toy: Any, draw: Any, layer: int) -> None:
    """In the second chunk, before or half-way through the layers: the first is stored already."""
    parts, calls = parts_of(draw), []

    def fails(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("no memory")

    with patch(toy):
        cache, never = filled(toy, parts), filled(toy, parts)
        hook = toy.model.layers[layer].register_forward_pre_hook(fails)
        with pytest.raises(RuntimeError, match="no memory"):
            cache.append(NEXT, chunk=4)
        hook.remove()
        assert cache.ids == never.ids
        assert cache.next_position == never.next_position
        assert cache.close_gaps() == 0
        a, b = cache.append(NEXT, logits=8), never.append(NEXT, logits=8)
    assert torch.equal(a, b)


def test_what_would_lose_track_of_the_pieces_is_refused(toy: Any, draw: Any, tmp_path: Any) -> None:
    with patch(toy):
        cache = filled(toy, parts_of(draw), capacity=51)
        assert cache.capacity == 51
        with pytest.raises(CacheError, match="append"):
            toy(torch.tensor([NEXT]), **{cache_argument(toy): cache})
        with pytest.raises(CacheError, match="append"):
            cache.save(tmp_path / "cache")
        for wrong in ({"chunk": 0}, {"logits": 0}):
            with pytest.raises(ValueError, match="at least 1"):
                cache.append([5], **wrong)
        cache.append([5])
        with pytest.raises(BudgetError):
            cache.append([6])
    assert cache.stored == 51


def test_what_is_inserted_does_not_read_what_stands_behind_it(toy: Any, draw: Any) -> None:
    parts = parts_of(draw)
    with patch(toy):
        cache = filled(toy, parts)
        before = cache.exposure()
        cache.insert(2, NEXT)
        after = cache.exposure()
    assert (after[:14] == before[:14] + len(NEXT)).all()
    assert (after[14 + len(NEXT) :] == before[14:]).all()
