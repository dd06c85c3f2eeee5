"""What transformers asks of a cache, and what a user sees: turns, pipelines, resets, refusals."""

import copy
import gc
import json
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

import kvevict
from kvevict import (
    CacheError,
    EvictionCache,
    KvevictError,
    NotPatchedError,
    PolicyError,
    UnsupportedModelError,
    patch,
)
from kvevict.models.releases import cache_argument
from kvevict.policies import H2O, Full, Random, StreamingLLM, Window

SMALL = [StreamingLLM(3, 9), Window(12), H2O(6, 6), Random(budget=12, recent=2)]
LARGE = [StreamingLLM(4, 200), Window(200), H2O(100, 100), Random(budget=200), Full()]
CLOSE = 2e-3


def generate(model: Any, ids: Any, **settings: Any) -> list[int]:
    ids = torch.tensor([ids]) if isinstance(ids, list) else ids
    known = {"max_new_tokens": 15, "do_sample": False}
    return model.generate(ids, **{**known, **settings})[0].tolist()


# -- budget >= length -----------------------------------------------------------------------------


@pytest.mark.parametrize("positions", ["original", "in_cache"])
@pytest.mark.parametrize("policy", LARGE, ids=lambda p: p.name)
def test_a_budget_above_the_length_changes_nothing(
    tiny: Any, draw: Any, feed: Any, difference: Any, policy: Any, positions: Any
) -> None:
    ids = draw(90)
    for forwards in (None, [90], [40, 1, 1, 48]):
        plain = feed(tiny, DynamicCache(), ids, forwards)
        with patch(tiny):
            cache = EvictionCache(tiny, policy, positions=positions)
            assert difference(feed(tiny, cache, ids, forwards), plain) < CLOSE


@pytest.mark.parametrize("policy", LARGE, ids=lambda p: p.name)
def test_greedy_tokens_are_identical_under_a_large_budget(
    tiny: Any, draw: Any, policy: Any
) -> None:
    prompt = draw(30)
    plain = generate(tiny, prompt, max_new_tokens=40)
    with patch(tiny, policy):
        assert generate(tiny, prompt, max_new_tokens=40) == plain
        assert generate(tiny, prompt, max_new_tokens=40, prefill_chunk_size=7) == plain


@pytest.mark.parametrize("length", [1, 2, 3, 11, 12, 13])
@pytest.mark.parametrize("policy", SMALL, ids=lambda p: p.name)
def test_prompts_shorter_than_the_budget_pass_through(
    toy: Any, draw: Any, feed: Any, difference: Any, policy: Any, length: int
) -> None:
    ids = draw(length)
    plain = feed(toy, DynamicCache(), ids, [length])
    with patch(toy):
        cache = EvictionCache(toy, policy)
        assert difference(feed(toy, cache, ids, [length]), plain) < CLOSE
        assert cache.kept_positions(0).shape[2] == min(length, 12)


# -- what transformers asks -----------------------------------------------------------------------


@pytest.mark.parametrize("policy", SMALL, ids=lambda p: p.name)
def test_sequence_length_is_tokens_seen_and_not_what_is_stored(
    toy: Any, draw: Any, feed: Any, policy: Any
) -> None:
    with patch(toy):
        cache = EvictionCache(toy, policy)
        feed(toy, cache, draw(40), [30] + [1] * 10)
    assert cache.seen == cache.get_seq_length() == cache.get_seq_length(2) == 40
    for layer in cache.layers:
        total, offset = layer.get_mask_sizes(4)
        assert layer.get_seq_length() == 40
        assert offset + total == 44
        assert total <= 13 + 4
        assert layer.get_max_length() == -1


def test_a_forward_of_no_layer_type_registers_nothing_globally() -> None:
    from kvevict.ranked import RankedLayer
    from kvevict.ring import RingLayer

    assert RankedLayer._layer_type is None
    assert RingLayer._layer_type is None
    assert all("kvevict" not in type(x).__module__ for x in DynamicCache().layers)


def test_an_empty_cache_is_still_the_one_that_is_used(toy: Any, draw: Any) -> None:
    # bool() of a cache without layers is False: `cache or DynamicCache()` would lose it.
    with patch(toy, "full"):
        shares = EvictionCache(toy, H2O("20%", "20%"))
        assert len(shares.layers) == 0
        generate(toy, draw(40), cache=shares)
        assert shares.seen == 54


@pytest.mark.parametrize("policy", SMALL, ids=lambda p: p.name)
def test_turn_two_on_a_kept_cache_is_one_stream(
    tiny: Any, draw: Any, feed: Any, kept: Any, policy: Any
) -> None:
    with patch(tiny):
        cache = EvictionCache(tiny, policy)
        turn1 = generate(tiny, draw(25, seed=1), cache=cache)
        assert cache.seen == 39  # the last token was not fed
        turn2 = generate(tiny, turn1 + draw(20, seed=2), cache=cache)
        assert cache.seen == 74
        one = EvictionCache(tiny, policy)
        logits = feed(tiny, one, turn2[:-1], [25] + [1] * 14 + [21] + [1] * 14)
        assert kept(one) == kept(cache)
        greedy = logits[0].argmax(-1).tolist()
    assert greedy[24:39] == turn1[25:]
    assert greedy[59:] == turn2[60:]


def test_turn_two_feeds_the_new_tokens_only(toy: Any, draw: Any) -> None:
    fed = []
    toy.model.embed_tokens.register_forward_hook(lambda m, args, out: fed.append(args[0].shape[1]))
    with patch(toy):
        cache = EvictionCache(toy, H2O(6, 6))
        turn1 = generate(toy, draw(30), cache=cache, max_new_tokens=3)
        del fed[:]
        generate(toy, turn1 + draw(7), cache=cache, max_new_tokens=3)
    assert fed == [8, 1, 1]


def test_turn_two_of_a_padded_batch_equals_the_rows_alone(toy: Any, draw: Any) -> None:
    rows = [draw(20, seed=1), draw(8, seed=2)]
    more = [draw(6, seed=3), draw(6, seed=4)]
    for policy in SMALL[:3]:
        with patch(toy):
            cache = EvictionCache(toy, policy)
            ids = torch.tensor([rows[0], [0] * 12 + rows[1]])
            mask = (ids != 0).long()
            out = toy.generate(
                ids, attention_mask=mask, cache=cache, max_new_tokens=6, do_sample=False
            )
            ids = torch.cat([out, torch.tensor(more)], 1)
            mask = torch.cat([mask, torch.ones(2, 12, dtype=torch.long)], 1)
            out = toy.generate(
                ids, attention_mask=mask, cache=cache, max_new_tokens=6, do_sample=False
            )
            for i, row in enumerate(rows):
                own = EvictionCache(toy, policy)
                first = generate(toy, row, cache=own, max_new_tokens=6)
                second = generate(toy, first + more[i], cache=own, max_new_tokens=6)
                assert out[i, -18:].tolist() == second[-18:]


@pytest.mark.parametrize("policy", SMALL, ids=lambda p: p.name)
def test_every_generate_call_of_a_patched_model_gets_a_fresh_cache(
    toy: Any, draw: Any, policy: Any
) -> None:
    first, second = draw(30, seed=1), draw(17, seed=2)
    with patch(toy, policy):
        alone = generate(toy, second)
    with patch(toy, policy):
        generate(toy, first)
        assert generate(toy, second) == alone
        with_cache = generate(toy, second, cache=EvictionCache(toy, policy))
        assert with_cache == alone


def test_generate_of_a_patched_model_returns_its_bounded_cache(toy: Any, draw: Any) -> None:
    with patch(toy, "h2o:heavy=6,recent=6"):
        out = toy.generate(torch.tensor([draw(40)]), max_new_tokens=5, return_dict_in_generate=True)
        cache = out.cache if hasattr(out, "cache") else out.past_key_values
        assert isinstance(cache, EvictionCache)
        assert cache.seen == 44
        assert cache.kept_positions(0).shape[2] == 12


def test_inputs_embeds_and_keywords_serve_too(toy: Any, draw: Any, feed: Any) -> None:
    ids = torch.tensor([draw(40)])
    with patch(toy), torch.no_grad():
        exact = feed(toy, EvictionCache(toy, H2O(6, 6)), ids, [40])
        embeds = toy.model.embed_tokens(ids)
        cache = EvictionCache(toy, H2O(6, 6))
        assert torch.equal(toy(inputs_embeds=embeds, cache=cache).logits, exact)
        cache = EvictionCache(toy, H2O(6, 6))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            old = toy(ids, past_key_values=cache).logits  # the name until transformers 5.24
        assert torch.equal(old, exact)
        assert cache.seen == 40


def test_a_users_position_ids_do_not_move_the_cache(toy: Any, draw: Any, feed: Any) -> None:
    # Positions are the cache's business: generate's own are wrong for padded or rebased rows.
    ids = torch.tensor([draw(40)])
    with patch(toy), torch.no_grad():
        exact = feed(toy, EvictionCache(toy, StreamingLLM(3, 9)), ids, [40])
        moved = toy(
            ids, position_ids=torch.arange(40)[None] + 500, cache=EvictionCache(toy, SMALL[0])
        ).logits
    assert torch.equal(exact, moved)


def test_pipeline_and_generate_agree(
    make_tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, pipeline

    words = ["<pad>", "<s>", *(f"w{i}" for i in range(95))]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<s>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<s>")
    tokenizer.padding_side = "left"
    model = make_tiny(0)
    texts = [" ".join(f"w{(7 * i + j) % 95}" for i in range(n)) for j, n in ((0, 30), (3, 14))]
    settings = {"max_new_tokens": 15, "do_sample": False}
    with patch(model, "h2o:heavy=6,recent=6"):
        alone = [
            model.generate(
                **tokenizer(t, return_tensors="pt", return_token_type_ids=False), **settings
            )
            for t in texts
        ]
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
        for batch_size in (1, 2):
            out = pipe(texts, batch_size=batch_size, return_full_text=False, **settings)
            got = [tokenizer(o[0]["generated_text"])["input_ids"] for o in out]
            for a, b, t in zip(alone, got, texts, strict=True):
                new = a[0, len(t.split()) :].tolist()
                assert [x for x in new if x > 1] == [
                    x for x in b if x > 1
                ]  # special ones are skipped


# -- reset, deepcopy, lifetimes -------------------------------------------------------------------


@pytest.mark.parametrize("policy", SMALL, ids=lambda p: p.name)
def test_a_reset_cache_is_a_new_one(toy: Any, draw: Any, feed: Any, kept: Any, policy: Any) -> None:
    ids = draw(40)
    with patch(toy):
        cache = EvictionCache(toy, policy)
        first = feed(toy, cache, ids, [30] + [1] * 10)
        held = kept(cache)
        feed(toy, cache, draw(30, seed=5), [30])
        cache.reset()
        assert cache.seen == cache.nbytes() == 0
        with pytest.raises(CacheError, match="nothing"):
            cache.kept_positions(0)
        batch = feed(toy, cache, [ids, ids], [30] + [1] * 10)  # another batch size is fine now
        assert kept(cache) == held
    torch.testing.assert_close(batch[0], first[0], atol=CLOSE, rtol=0)


@pytest.mark.parametrize("positions", ["original", "in_cache"])
@pytest.mark.parametrize("policy", SMALL, ids=lambda p: p.name)
def test_a_deep_copy_is_independent(
    toy: Any, draw: Any, feed: Any, kept: Any, policy: Any, positions: Any
) -> None:
    with patch(toy):
        cache = EvictionCache(toy, policy, positions=positions)
        feed(toy, cache, draw(25), [15] + [1] * 10)
        twin, held = copy.deepcopy(cache), kept(cache)
        left, right = draw(30, seed=2), draw(30, seed=3)
        a = feed(toy, twin, left)
        assert kept(cache) == held
        assert cache.seen == 25
        b = feed(toy, cache, right)
        again = EvictionCache(toy, policy, positions=positions)
        feed(toy, again, draw(25), [15] + [1] * 10)
        third = copy.deepcopy(again)
        assert torch.equal(feed(toy, again, left), a)
        assert torch.equal(feed(toy, third, right), b)
        assert kept(again) == kept(twin)


def test_a_cache_does_not_keep_its_model_alive(make_tiny: Any, draw: Any, feed: Any) -> None:
    model = make_tiny(0)
    cache = EvictionCache(model, H2O(6, 6))
    with patch(model):
        feed(model, cache, draw(20))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_same_inputs_give_the_same_bytes(toy: Any, draw: Any, feed: Any) -> None:
    ids = draw(50)
    for policy in SMALL:
        with patch(toy):
            runs = [feed(toy, EvictionCache(toy, policy), ids, [20] + [1] * 30) for _ in range(2)]
        assert torch.equal(*runs)


# -- two caches at once ---------------------------------------------------------------------------


def test_two_caches_take_turns_on_one_model(toy: Any, draw: Any, feed: Any) -> None:
    ids = [draw(40, seed=1), draw(40, seed=2)]
    with patch(toy):
        exact = [feed(toy, EvictionCache(toy, SMALL[2 * i]), ids[i]) for i in range(2)]
        caches = [EvictionCache(toy, SMALL[2 * i]) for i in range(2)]
        parts: list[list[Any]] = [[], []]
        for at in range(40):
            for i in range(2):
                parts[i].append(feed(toy, caches[i], [ids[i][at]]))
        for i in range(2):
            assert torch.equal(torch.cat(parts[i], 1), exact[i])


def test_two_threads_with_two_caches_do_not_meet(toy: Any, draw: Any, feed: Any) -> None:
    ids = [draw(60, seed=i) for i in range(4)]
    with patch(toy):
        exact = [feed(toy, EvictionCache(toy, SMALL[i % 4]), ids[i]) for i in range(4)]
        got: dict[int, Any] = {}

        def work(i: int) -> None:
            try:
                got[i] = feed(toy, EvictionCache(toy, SMALL[i % 4]), ids[i])
            except Exception as error:  # reported below, in the test's own thread
                got[i] = error

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for i in range(4):
        assert isinstance(got[i], torch.Tensor), got[i]
        assert torch.equal(got[i], exact[i])


# -- gradients, inference mode, training ----------------------------------------------------------


@pytest.mark.parametrize("policy", SMALL, ids=lambda p: p.name)
def test_what_a_cache_holds_is_detached(toy: Any, draw: Any, policy: Any) -> None:
    ids = torch.tensor([draw(40)])
    with patch(toy):
        cache = EvictionCache(toy, policy)
        toy(ids[:, :20], cache=cache)
        for i in range(20, 40):
            toy(ids[:, i : i + 1], cache=cache)
        assert not cache.layers[0].keys.requires_grad
        assert not cache.layers[0].values.requires_grad
        if policy.needs_scores:
            assert not cache.scores(0).requires_grad
            assert cache.layers[0].score.grad_fn is None


@pytest.mark.parametrize("positions", ["original", "in_cache"])
@pytest.mark.parametrize("policy", [*SMALL, Full()], ids=lambda p: p.name)
@pytest.mark.parametrize("first", [20, 30], ids=["filling", "full"])
def test_a_cache_filled_in_inference_mode_goes_on_without_it(
    toy: Any, draw: Any, feed: Any, policy: Any, positions: Any, first: int
) -> None:
    ids = torch.tensor([draw(60)])
    with patch(toy):
        exact = feed(toy, EvictionCache(toy, policy, positions=positions), ids, [8] + [1] * 52)
        cache = EvictionCache(toy, policy, positions=positions)
        with torch.inference_mode():
            toy(ids[:, :8], cache=cache)
            for i in range(8, first):
                toy(ids[:, i : i + 1], cache=cache)
        after = feed(toy, cache, ids[:, first:])
    torch.testing.assert_close(after, exact[:, first:], atol=CLOSE, rtol=0)


def test_a_padded_cache_filled_in_inference_mode_goes_on_without_it(
    toy: Any, draw: Any, feed: Any
) -> None:
    ids = torch.tensor([draw(40, seed=1), [0] * 9 + draw(31, seed=2)])
    mask = (ids != 0).long()
    for policy in SMALL:
        with patch(toy):
            exact = feed(toy, EvictionCache(toy, policy), ids, [20] + [1] * 20, mask)
            cache = EvictionCache(toy, policy)
            with torch.inference_mode():
                toy(ids[:, :20], attention_mask=mask[:, :20], cache=cache)
                toy(ids[:, 20:21], attention_mask=mask[:, :21], cache=cache)
            after = feed(toy, cache, ids[:, 21:], None, mask)
        torch.testing.assert_close(after, exact[:, 21:], atol=CLOSE, rtol=0)


def test_attention_dropout_in_training_is_refused(make_tiny: Any, draw: Any) -> None:
    model = make_tiny(0, attention_dropout=0.1)
    ids = torch.tensor([draw(10)])
    with patch(model):
        model.train()
        with pytest.raises(UnsupportedModelError, match="dropout"):
            model(ids, cache=EvictionCache(model, H2O(4, 4)))
        model.eval()
        model(ids, cache=EvictionCache(model, H2O(4, 4)))


# -- refusals -------------------------------------------------------------------------------------


def test_an_unpatched_model_is_refused_before_it_is_wrong(toy: Any, draw: Any) -> None:
    ids = torch.tensor([draw(10)])
    name = cache_argument(toy)  # an unpatched model of an older release drops the newer name
    for policy in SMALL:
        with pytest.raises(NotPatchedError, match="patch"):
            toy(ids, **{name: EvictionCache(toy, policy)})
    cache = EvictionCache(toy, SMALL[2])
    with patch(toy):
        toy(ids, **{name: cache})
    with pytest.raises(NotPatchedError, match="patch"):
        toy(ids, **{name: cache})


def test_a_cache_of_another_model_is_refused(make_tiny: Any, draw: Any) -> None:
    one, two = make_tiny(0), make_tiny(1)
    with patch(one), patch(two):
        cache = EvictionCache(one, H2O(4, 4))
        with pytest.raises(CacheError, match="another model"):
            two(torch.tensor([draw(10)]), cache=cache)
        one(torch.tensor([draw(10)]), cache=cache)


def test_another_batch_size_is_refused_and_does_no_harm(toy: Any, draw: Any, feed: Any) -> None:
    with patch(toy):
        for policy in SMALL:
            cache = EvictionCache(toy, policy)
            feed(toy, cache, [draw(20), draw(20)], [20])
            with pytest.raises(CacheError, match="rows"):
                toy(torch.tensor([draw(5)]), cache=cache)
            feed(toy, cache, [draw(20), draw(20)], [20])
            assert cache.seen == 40


@pytest.mark.parametrize("policy", SMALL, ids=lambda p: p.name)
@pytest.mark.parametrize("where", ["first layer", "last layer", "after attention"])
def test_a_forward_that_failed_half_way_poisons_until_reset(
    toy: Any, draw: Any, feed: Any, policy: Any, where: str, tmp_path: Path
) -> None:
    ids = torch.tensor([draw(30)])
    layer = toy.model.layers[0 if where == "first layer" else 2]
    part = layer.mlp if where == "after attention" else layer.self_attn.o_proj

    def fail(*args: Any) -> None:
        raise MemoryError("out of memory")

    with patch(toy):
        cache = EvictionCache(toy, policy)
        feed(toy, cache, ids, [20] + [1] * 10)
        hook = part.register_forward_hook(fail)
        with pytest.raises(MemoryError):
            toy(ids[:, :1], cache=cache)
        hook.remove()
        for use in (
            lambda: cache.kept_positions(0),  # at once, before another forward finds out
            lambda: cache.save(tmp_path / "poisoned"),
            lambda: toy(ids[:, :1], cache=cache),
            lambda: toy(ids[:, :4], cache=cache),
        ):
            with pytest.raises(CacheError, match="reset"):
                use()
        assert not (tmp_path / "poisoned").exists()
        cache.reset()
        exact = feed(toy, EvictionCache(toy, policy), ids, [20] + [1] * 10)
        assert torch.equal(feed(toy, cache, ids, [20] + [1] * 10), exact)


def test_a_forward_that_failed_before_any_layer_does_no_harm(
    toy: Any, draw: Any, feed: Any
) -> None:
    ids = torch.tensor([draw(30)])
    with patch(toy):
        cache = EvictionCache(toy, SMALL[2])
        feed(toy, cache, ids, [30])
        with pytest.raises(IndexError):
            toy(torch.tensor([[10**6]]), cache=cache)
        exact = EvictionCache(toy, SMALL[2])
        feed(toy, exact, ids, [30])
        assert torch.equal(feed(toy, cache, ids), feed(toy, exact, ids))


def test_a_bare_call_after_a_failed_forward_is_untouched(toy: Any, draw: Any) -> None:
    ids = torch.tensor([draw(12)])
    plain = toy(ids).logits
    with patch(toy):
        cache = EvictionCache(toy, SMALL[2])
        hook = toy.model.layers[1].register_forward_hook(lambda *a: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            toy(ids, cache=cache)
        hook.remove()
        assert torch.equal(toy(ids).logits, plain)


@pytest.mark.parametrize(
    "settings",
    [
        {"cache_implementation": "static"},
        {"cache_implementation": "quantized"},
        {"cache_implementation": "offloaded"},
    ],
    ids=lambda s: str(next(iter(s.items()))),
)
def test_what_cannot_be_exact_is_refused(toy: Any, draw: Any, settings: dict[str, Any]) -> None:
    for options in ({}, {"cache": EvictionCache(toy, SMALL[2])}):
        with patch(toy, SMALL[2]), pytest.raises((KvevictError, ValueError)):
            toy.generate(torch.tensor([draw(20)]), max_new_tokens=8, **settings, **options)


def test_cropping_and_offloading_are_refused(toy: Any, draw: Any, feed: Any) -> None:
    with patch(toy):
        cache = EvictionCache(toy, SMALL[0])
        feed(toy, cache, draw(30))
        assert not cache.is_croppable
        with pytest.raises(CacheError, match="crop"):
            cache.layers[0].crop(-1)
        for refused in (cache.layers[0].offload, cache.layers[0].prefetch):
            with pytest.raises(CacheError, match="offload"):
                refused()
        assert not cache.is_compileable


def test_weights_of_attention_are_refused_with_the_way_out(toy: Any, draw: Any) -> None:
    ids = torch.tensor([draw(10)])
    with patch(toy), pytest.raises(UnsupportedModelError, match="scores"):
        toy(ids, cache=EvictionCache(toy, SMALL[2]), output_attentions=True)


def test_a_prepared_mask_is_refused(toy: Any, draw: Any) -> None:
    ids, mask = torch.tensor([draw(10)]), torch.zeros(1, 1, 10, 10)
    with patch(toy), pytest.raises(UnsupportedModelError, match="4D"):
        toy(ids, attention_mask=mask, cache=EvictionCache(toy, SMALL[2]))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"positions": "rolled"}, "in_cache"),
        ({"backend": "cuda"}, "triton"),
        ({"evict_every": 0}, "at least 1"),
    ],
    ids=str,
)
def test_unknown_settings_name_the_known_ones(toy: Any, settings: Any, named: str) -> None:
    with pytest.raises(PolicyError, match=named):
        EvictionCache(toy, SMALL[2], **settings)
    with pytest.raises(PolicyError, match=named):
        patch(toy, SMALL[2], **settings)
    assert not hasattr(toy, "_kvevict")


def test_triton_without_a_gpu_is_refused_and_auto_says_what_ran(toy: Any, draw: Any) -> None:
    with patch(toy):
        cache = EvictionCache(toy, SMALL[2])
        assert cache.backend == "torch"
        if not torch.cuda.is_available():
            with pytest.raises(UnsupportedModelError, match="torch"):
                EvictionCache(toy, SMALL[2], backend="triton")


def test_layers_that_do_not_exist_are_named(toy: Any, draw: Any, feed: Any) -> None:
    with patch(toy):
        cache = EvictionCache(toy, SMALL[2])
        feed(toy, cache, draw(5))
        for bad in (3, -1):
            with pytest.raises(CacheError, match="3 layers"):
                cache.kept_positions(bad)


def test_every_error_is_a_kvevict_error() -> None:
    names = [n for n in kvevict.__all__ if n.endswith("Error")]
    assert len(names) == 7
    assert all(issubclass(getattr(kvevict, n), KvevictError) for n in names)
    assert issubclass(PolicyError, ValueError)


def test_generation_settings_of_the_user_survive(toy: Any, draw: Any) -> None:
    settings = GenerationConfig(max_new_tokens=7, do_sample=False, use_cache=False)
    ids = torch.tensor([draw(30)])
    plain = toy.generate(ids, generation_config=settings)
    with patch(toy, SMALL[0]):
        assert torch.equal(toy.generate(ids, generation_config=settings), plain)
    assert json.loads(settings.to_json_string(use_diff=False))["use_cache"] is False


def test_a_failed_forward_leaves_the_next_patch_of_another_model_alone(
    make_tiny: Any, draw: Any, feed: Any
) -> None:
    one, two, ids = make_tiny(0), make_tiny(1, num_key_value_heads=1), draw(30)
    with patch(two):
        exact = feed(two, EvictionCache(two, SMALL[0]), ids)
    with patch(one):
        hook = one.model.layers[1].register_forward_hook(lambda *a: 1 / 0)
        cache = EvictionCache(one, SMALL[2])
        with pytest.raises(ZeroDivisionError):
            one(torch.tensor([ids]), cache=cache)
        hook.remove()
    with patch(two):
        assert torch.equal(feed(two, EvictionCache(two, SMALL[0]), ids), exact)
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None
