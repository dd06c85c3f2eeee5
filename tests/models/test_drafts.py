"""Drafts: assisted and prompt-lookup decoding give what plain decoding gives, tokens and cache.

The oracle is the same policy fed token by token. Candidates come from a script that knows the plain
continuation and spoils it at random places, so that every number of accepted tokens occurs.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from kvevict import (
    CacheError,
    EvictionCache,
    PolicyError,
    UnsupportedModelError,
    drafts,
    forward,
    patch,
)
from kvevict.models import attention
from kvevict.models.releases import cache_argument

POLICIES = [
    ("full", "auto", 1),
    ("window:window=9", "auto", 1),
    ("streaming_llm:sinks=2,window=7", "in_cache", 1),
    ("streaming_llm:sinks=2,window=7", "original", 1),
    ("h2o:heavy=4,recent=5", "original", 1),
    ("h2o:heavy=4,recent=5", "in_cache", 1),
    ("h2o:heavy=4,recent=5", "original", 3),
    ("h2o:heavy=3,recent=4,sinks=2,normalize=age", "auto", 1),
    ("tova:budget=9", "auto", 1),
    ("h2o:heavy=4,recent=5,scope=layer", "auto", 1),
    ("snapkv:heavy=8,recent=4,window=3,repeat=true", "auto", 4),
    ("random:budget=9,recent=3", "auto", 1),
]
LENGTH, NEW = 20, 30


@pytest.fixture(params=POLICIES, ids=lambda p: f"{p[0]}-{p[1]}-{p[2]}")
def new_cache(request: pytest.FixtureRequest) -> Callable[[Any], EvictionCache]:
    """Return a maker of a cache under each policy."""
    policy, positions, every = request.param

    def make(model: Any) -> EvictionCache:
        return EvictionCache(model, policy, positions=positions, evict_every=every)

    return make


class Script:
    """A candidate generator that proposes a known continuation, spoiled here and there."""

    requires_model_outputs = False
    num_drafting_tokens = 7  # asked for from release 5.25 on
    truth: Tensor
    forwards = 0
    accepted: set[tuple[int, int]]

    def __init__(self, truth: Tensor, seed: int = 0) -> None:
        self.truth, self.accepted = truth, set()
        self.draw = torch.Generator().manual_seed(seed)

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        start = input_ids.shape[1]
        length = min(int(torch.randint(0, 7, (1,), generator=self.draw)), LENGTH + NEW - start - 1)
        proposed = self.truth[:, start : start + length].clone()
        if length:
            spoiled = int(torch.randint(0, length + 1, (1,), generator=self.draw))
            proposed[:, spoiled:] = (proposed[:, spoiled:] + 1) % 97
        self.proposed = length
        return torch.cat([input_ids, proposed], 1), None

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, matches: int) -> None:
        self.accepted.add((self.proposed, int(matches)))
        self.forwards += 1


def run(model: Any, ids: Tensor, cache: Any, **settings: Any) -> Tensor:
    given = {cache_argument(model): cache, "max_new_tokens": NEW, "do_sample": False, **settings}
    return model.generate(ids, **given)


def scripted(model: Any, script: Script, ids: Tensor, cache: Any, **settings: Any) -> Tensor:
    own = type(model)._get_candidate_generator
    try:
        type(model)._get_candidate_generator = functools.wraps(own)(lambda *a, **k: script)
        with patch(model):
            return run(model, ids, cache, prompt_lookup_num_tokens=1, **settings)
    finally:
        type(model)._get_candidate_generator = own


def assert_alike(one: EvictionCache, other: EvictionCache) -> None:
    assert one.seen == other.seen
    for index in range(len(one.layers)):
        assert torch.equal(one.kept_positions(index), other.kept_positions(index))
        if one.policy.needs_scores:
            torch.testing.assert_close(one.scores(index), other.scores(index), rtol=1e-4, atol=1e-4)


def states(cache: EvictionCache) -> list[Any]:
    return [getattr(x, name) for x in cache.layers for name in x._state_names()]


# -- generate -------------------------------------------------------------------------------------


def test_scripted_drafts_equal_plain_decoding(tiny: Any, draw: Any, new_cache: Any) -> None:
    ids = torch.tensor([draw(LENGTH)])
    with patch(tiny):
        plain = new_cache(tiny)
        wanted = run(tiny, ids, plain)
    script, cache = Script(wanted), new_cache(tiny)
    assert torch.equal(scripted(tiny, script, ids, cache), wanted)
    assert_alike(cache, plain)
    assert script.forwards < NEW - 5
    assert any(0 < took < proposed for proposed, took in script.accepted)
    assert any(took == proposed > 0 for proposed, took in script.accepted)


@pytest.mark.parametrize(
    "policy", ["full", "window:window=9", "streaming_llm:sinks=2,window=7", "h2o:heavy=4,recent=5"]
)
def test_transformers_drafters_equal_plain_decoding(make_tiny: Any, draw: Any, policy: str) -> None:
    for seed in range(3):
        model, draft = make_tiny(seed), make_tiny(seed)
        with torch.no_grad():
            for weight in draft.parameters():
                weight.add_(torch.randn_like(weight) * weight.std() * 0.03)
        ids = torch.tensor([draw(8, seed) * 3])
        with patch(model, policy):
            wanted = run(model, ids, None)
            assert torch.equal(run(model, ids, None, prompt_lookup_num_tokens=4), wanted)
            assert torch.equal(run(model, ids, None, assistant_model=draft), wanted)


def test_a_share_of_the_prompt_is_of_the_prompt_alone(toy: Any, draw: Any) -> None:
    ids = torch.tensor([draw(10) * 2])
    policy = "h2o:heavy=20%,recent=30%"
    with patch(toy, policy):
        wanted = run(toy, ids, None)
        assert torch.equal(run(toy, ids, None, prompt_lookup_num_tokens=4), wanted)


def test_turn_two_drafts_on_a_kept_cache(toy: Any, draw: Any, new_cache: Any) -> None:
    first, more = torch.tensor([draw(LENGTH - 9)]), torch.tensor([draw(9, 1)])
    caches = [new_cache(toy), new_cache(toy)]
    with patch(toy):
        for cache in caches:
            toy(first, **{cache_argument(toy): cache})
        ids = torch.cat([first, more], 1)
        wanted = run(toy, ids, caches[0])
    assert torch.equal(scripted(toy, Script(wanted), ids, caches[1]), wanted)
    assert_alike(caches[1], caches[0])
    with patch(toy):  # and on, without drafts
        assert torch.equal(run(toy, wanted, caches[1]), run(toy, wanted, caches[0]))


def test_sampled_drafts_run_and_leave_no_draft_open(make_tiny: Any, draw: Any) -> None:
    model, draft = make_tiny(0), make_tiny(0)
    ids = torch.tensor([draw(LENGTH)])
    with patch(model, "h2o:heavy=4,recent=5"):
        out = run(
            *(model, ids, None),
            assistant_model=draft,
            do_sample=True,
            return_dict_in_generate=True,
        )
    cache = getattr(out, cache_argument(model))
    assert cache.seen == out.sequences.shape[1] - 1
    assert not cache.is_croppable


def test_an_exception_in_a_draft_takes_it_back(toy: Any, draw: Any, new_cache: Any) -> None:
    ids = torch.tensor([draw(LENGTH)])
    plain = new_cache(toy)
    with patch(toy):
        wanted = run(toy, ids, plain)
    script = Script(wanted)

    def stop(ids: Tensor, scores: Tensor) -> Tensor:
        if script.forwards > 3 and script.proposed > 2:
            raise KeyboardInterrupt
        return scores

    cache = new_cache(toy)
    with pytest.raises(KeyboardInterrupt):
        scripted(toy, script, ids, cache, logits_processor=LogitsProcessorList([stop]))
    assert LENGTH < cache.seen < LENGTH + NEW
    fed = wanted[:, : cache.seen + 1]
    left = {"max_new_tokens": LENGTH + NEW - cache.seen - 1}
    assert torch.equal(scripted(toy, Script(wanted), fed, cache, **left), wanted)
    assert_alike(cache, plain)


def test_without_drafts_nothing_of_them_runs(
    toy: Any, draw: Any, new_cache: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(drafts, "settle", None)
    monkeypatch.setattr(attention, "token_by_token", None)
    monkeypatch.setattr(forward.Plan, "part", None)
    with patch(toy):
        run(toy, torch.tensor([draw(LENGTH)]), new_cache(toy))


# -- the cache alone ------------------------------------------------------------------------------


@pytest.mark.parametrize("pads", [0, 4])
def test_any_part_of_a_draft_stays_as_if_fed_alone(
    toy: Any, draw: Any, feed: Any, new_cache: Any, pads: int, difference: Any
) -> None:
    ids = torch.tensor([draw(20)])
    mask = (torch.arange(20)[None] >= pads).long()
    choice = torch.Generator().manual_seed(5)
    with patch(toy), torch.no_grad():
        plain, cache = new_cache(toy), new_cache(toy)
        cache.activate_past_recording()
        cache.certain_until(17)
        feed(toy, cache, ids, [20], mask)
        cache.crop(-1)
        feed(toy, plain, ids[:, :19], [17, 1, 1], mask)
        assert_alike(cache, plain)
        cache.certain_until(0)
        for turn in range(15):
            length, stay = (int(torch.randint(1, 7, (1,), generator=choice)) for _ in range(2))
            stay = min(stay - 1, length)
            new = draw(length, turn)
            logits = feed(toy, cache, new, [length])
            cache.crop(stay - length)
            if stay:
                assert difference(logits[:, :stay], feed(toy, plain, new[:stay])) < 1e-3
            assert_alike(cache, plain)
        cache.end_drafts()
        new = draw(12, 99)
        assert difference(feed(toy, cache, new), feed(toy, plain, new)) < 1e-3


def test_a_rejected_draft_leaves_no_trace(toy: Any, draw: Any, feed: Any, new_cache: Any) -> None:
    """Bit by bit, against a copy that never saw it."""
    with patch(toy):
        cache = new_cache(toy)
        feed(toy, cache, draw(25), [20, 1, 1, 1, 1, 1])
        for layer in cache.layers:
            getattr(layer, "_restore_head", lambda: None)()  # a turned head is made anew in a step
        untouched = copy.deepcopy(cache)
        cache.activate_past_recording()
        for length in (1, 5, 11):
            feed(toy, cache, draw(length, length), [length])
            cache.crop(-length)
        cache.end_drafts()
        for mine, theirs in zip(states(cache), states(untouched), strict=True):
            assert (mine is None and theirs is None) or torch.equal(mine, theirs)
        more = draw(9, 50)
        assert torch.equal(feed(toy, cache, more), feed(toy, untouched, more))


def test_a_copy_of_an_open_draft_is_settled_on_its_own(
    toy: Any, draw: Any, feed: Any, new_cache: Any
) -> None:
    with patch(toy):
        cache = new_cache(toy)
        feed(toy, cache, draw(15), [15])
        cache.activate_past_recording()
        feed(toy, cache, draw(6, 1), [6])
        twin = copy.deepcopy(cache)
        cache.crop(-2)
        twin.crop(-2)
        for mine, theirs in zip(states(cache), states(twin), strict=True):
            assert (mine is None and theirs is None) or torch.equal(mine, theirs)


def test_a_draft_holds_its_own_tokens_and_no_more(toy: Any, draw: Any, new_cache: Any) -> None:
    """A prompt with a draft behind it is evicted at once, not when the draft is settled."""
    with patch(toy), torch.no_grad():
        cache = new_cache(toy)
        cache.activate_past_recording()
        cache.certain_until(60)
        toy(torch.tensor([draw(63)]), **{cache_argument(toy): cache})
        for layer in cache.layers:
            assert layer.draft[0].shape[2] == 3
            assert layer.draft[0].untyped_storage().nbytes() == layer.draft[0].nbytes
            if cache.capacity is not None:
                assert layer.keys.shape[2] == cache.capacity + cache.evict_every


def test_drafts_cross_a_rebase(
    toy: Any, draw: Any, feed: Any, difference: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(forward, "_REBASE_AT", 40)
    with patch(toy):
        plain, cache = (EvictionCache(toy, "streaming_llm:sinks=2,window=7") for _ in range(2))
        cache.activate_past_recording()
        for turn in range(30):
            new = draw(6, turn)
            logits = feed(toy, cache, new, [6])
            cache.crop(-2)
            assert difference(logits[:, :4], feed(toy, plain, new[:4])) < 2e-3
        assert cache._base > 0
        assert_alike(cache, plain)


@pytest.mark.parametrize("policy", ["streaming_llm:sinks=2,window=7", "h2o:heavy=4,recent=5"])
def test_these_comparisons_see_a_rejected_token_that_stays(
    toy: Any, draw: Any, feed: Any, policy: str, difference: Any, monkeypatch: Any
) -> None:
    with patch(toy):
        plain, cache = EvictionCache(toy, policy), EvictionCache(toy, policy)
        cache.activate_past_recording()
        settle = drafts.settle
        monkeypatch.setattr(
            drafts, "settle", lambda layer, plan, stay: settle(layer, plan, plan.length)
        )
        feed(toy, cache, draw(30), [30])
        cache.crop(-2)
        feed(toy, plain, draw(30)[:28])
        assert cache.seen == plain.seen
        for layer in cache.layers:
            layer.seen = 28
        cache.end_drafts()
        assert difference(feed(toy, cache, [5]), feed(toy, plain, [5])) > 1e-2


# -- refusals -------------------------------------------------------------------------------------


def test_a_crop_takes_back_no_more_than_the_draft(
    toy: Any, draw: Any, feed: Any, new_cache: Any
) -> None:
    with patch(toy):
        cache = new_cache(toy)
        feed(toy, cache, draw(20), [20])
        assert not cache.is_croppable
        cache.crop(0)
        for wrong in (-1, 1):
            with pytest.raises(CacheError, match="crop"):
                cache.crop(wrong)
        cache.activate_past_recording()
        feed(toy, cache, draw(3, 1), [3])
        for wrong in (-4, 1):
            with pytest.raises(CacheError, match="3 tokens"):
                cache.crop(wrong)
        cache.crop(-3)
        assert cache.seen == 20


def test_an_open_draft_is_not_read_nor_moved(
    toy: Any, draw: Any, feed: Any, new_cache: Any, tmp_path: Any
) -> None:
    with patch(toy):
        cache = new_cache(toy)
        cache.activate_past_recording()
        feed(toy, cache, draw(20), [20])
        with pytest.raises(CacheError, match="draft is open"):
            cache.kept_positions(0)
        with pytest.raises(CacheError, match="draft is open"):
            cache.save(tmp_path / "cache")
        with pytest.raises(CacheError, match="draft is open"):
            cache.reorder_cache(torch.tensor([0]))
        feed(toy, cache, draw(2, 1), [2])  # nobody took anything back: the first one stays
        cache.crop(-2)
        assert cache.seen == 20


def test_a_drafting_model_that_evicts_is_refused(make_tiny: Any, draw: Any) -> None:
    model, draft = make_tiny(0), make_tiny(1)
    ids = torch.tensor([draw(LENGTH)])
    forwards = []
    with patch(model, "h2o:heavy=4,recent=5"), patch(draft, "window:window=9"):
        hooks = [
            x.model.register_forward_hook(lambda *a: forwards.append(1)) for x in (model, draft)
        ]
        with pytest.raises(UnsupportedModelError, match="model that drafts"):
            run(model, ids, None, assistant_model=draft)
        with pytest.raises(UnsupportedModelError, match="model that drafts"):
            run(model, ids, None, assistant_early_exit=1)
        for hook in hooks:
            hook.remove()
    assert not forwards


# -- the real model -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["streaming_llm:sinks=4,window=60", "h2o:heavy=32,recent=32"])
def test_the_real_model_drafts_as_it_decodes(
    small_model: Any, small_tokenizer: Any, policy: str
) -> None:
    text = "The cat sat on the mat. The dog sat on the log. The cat sat on the mat. The dog sat on"
    ids = small_tokenizer(text * 4, return_tensors="pt").input_ids
    name = cache_argument(small_model)
    with patch(small_model):
        plain, cache = EvictionCache(small_model, policy), EvictionCache(small_model, policy)
        known = {"max_new_tokens": 64, "do_sample": False}
        wanted = small_model.generate(ids, **{name: plain}, **known)
        forwards: list[int] = []
        hook = small_model.register_forward_hook(lambda *args: forwards.append(1))
        out = small_model.generate(ids, **{name: cache}, **known, prompt_lookup_num_tokens=6)
        hook.remove()
    assert torch.equal(out, wanted)
    assert len(forwards) < 0.7 * (out.shape[1] - ids.shape[1])
    assert_alike(cache, plain)


def test_a_kept_cache_wants_the_whole_sequence(toy: Any, draw: Any) -> None:
    ids = torch.tensor([draw(45)])
    with patch(toy), torch.no_grad():
        cache = EvictionCache(toy, "window:window=60")
        toy(ids[:, :20], **{cache_argument(toy): cache})
        new_alone = {"attention_mask": torch.ones(1, 45, dtype=torch.long)}
        with pytest.raises(CacheError, match="give the whole sequence"):
            run(toy, ids[:, 20:], cache, prompt_lookup_num_tokens=3, **new_alone)
        with pytest.raises(CacheError, match="at least one token more"):
            run(toy, ids[:, :20], cache, prompt_lookup_num_tokens=3)
        assert cache.seen == 20
        wanted = run(toy, ids, EvictionCache(toy, "window:window=60"))
        assert torch.equal(run(toy, ids, cache, prompt_lookup_num_tokens=3), wanted)


def test_chunked_prefill_with_drafts_is_refused(toy: Any, draw: Any) -> None:
    ids = torch.tensor([draw(20)])
    cache = EvictionCache(toy, "h2o:heavy=4,recent=5")
    with patch(toy), pytest.raises(UnsupportedModelError, match="prefill_chunk_size"):
        run(toy, ids, cache, prompt_lookup_num_tokens=3, prefill_chunk_size=8)


def test_a_refused_call_leaves_the_draft_open(toy: Any, draw: Any, feed: Any) -> None:
    ids = torch.tensor([draw(20)])
    with patch(toy), torch.no_grad():
        cache, alone = (EvictionCache(toy, "h2o:heavy=4,recent=5") for _ in range(2))
        cache.activate_past_recording()
        cache.certain_until(12)
        feed(toy, cache, ids[:, :18], [18])
        with pytest.raises(CacheError, match="rows"):
            toy(ids[:, 18:].repeat(2, 1), **{cache_argument(toy): cache})
        for wrong in (-1.0, "x", None):
            with pytest.raises(TypeError):
                cache.crop(wrong)  # type: ignore[arg-type]
        for move in (cache.reorder_cache, cache.batch_select_indices):
            with pytest.raises(CacheError, match="draft is open"):
                move(torch.tensor([0, 0]))
        with pytest.raises(CacheError, match="draft is open"):
            cache.batch_repeat_interleave(2)
        cache.crop(torch.tensor(-4))
        assert cache.seen == 14
        assert type(cache.seen) is int
        cache.end_drafts()
        feed(toy, alone, ids[:, :14], [12, 1, 1])
        assert_alike(cache, alone)


def test_drafts_before_the_shares_are_known_are_refused(toy: Any) -> None:
    with patch(toy), pytest.raises(PolicyError, match="settle_length"):
        EvictionCache(toy, "h2o:heavy=30%,recent=30%").activate_past_recording()
