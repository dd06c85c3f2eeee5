"""What generate() can do, on families that differ in what could go wrong: honoured or refused.

Llama itself is in tests/models; here are a hybrid with sliding layers (Gemma 3), one whose update
gets no keywords (GPT-NeoX), one with learned sinks (GPT-OSS), one with recurrent layers
(Qwen3-Next).
"""

import copy
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from transformers import TextIteratorStreamer
from transformers.cache_utils import DynamicCache

from kvevict import CacheError, EvictionCache, UnsupportedModelError, patch
from kvevict.layers import EvictionLayer
from kvevict.models.releases import cache_argument

ROOT = Path(__file__).parents[2]
KINDS = ["gemma3_text", "gpt_neox", "gpt_oss", "qwen3_next"]
LARGE = "h2o:heavy=60,recent=60"
SMALL = "h2o:heavy=4,recent=5"
STREAMING = "streaming_llm:sinks=2,window=7"


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    made = {name: families.build(name) for name in ["llama", *KINDS]}
    with torch.no_grad():  # tied to the head and scaled up, it makes every choice a certainty
        made["gemma3_text"].get_input_embeddings().weight.mul_(0.1)
    return made


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, models: dict[str, Any]) -> Any:
    yield models[request.param]
    handle = getattr(models[request.param], "_kvevict", None)
    if handle is not None:
        handle.unpatch()


@pytest.fixture
def llama(models: dict[str, Any]) -> Any:
    yield models["llama"]
    handle = getattr(models["llama"], "_kvevict", None)
    if handle is not None:
        handle.unpatch()


def prompt(rows: int = 1, length: int = 17) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, 90, (rows, length), generator=generator)


def generate(model: Any, ids: torch.Tensor, **settings: Any) -> Any:
    known = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, **{**known, **settings})


class Words:
    """A tokenizer of numbers, for streamers and stop strings."""

    def decode(self, ids: Any, **kwargs: Any) -> str:
        return "".join(f"<{int(x)}>" for x in torch.as_tensor(ids).reshape(-1))


# -- without eviction everything is as before -----------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"do_sample": True, "temperature": 1.5, "top_k": 20},
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 2, "num_beam_groups": 1, "do_sample": True},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    ],
    ids=["greedy", "sampled", "beams", "beams returned", "samples", "beam sample", "penalties"],
)
def test_a_large_budget_gives_the_same_tokens(model: Any, settings: dict[str, Any]) -> None:
    ids = prompt()
    torch.manual_seed(0)
    plain = generate(model, ids, **settings)
    with patch(model, LARGE):
        torch.manual_seed(0)
        assert torch.equal(generate(model, ids, **settings), plain)


def test_prefill_in_chunks_gives_the_same_tokens(model: Any) -> None:
    ids = prompt()
    with patch(model, STREAMING):
        whole = generate(model, ids)
        assert torch.equal(generate(model, ids, prefill_chunk_size=5), whole)


def test_left_padded_rows_generate_as_alone(model: Any) -> None:
    short, long = prompt(length=11), prompt(length=17)
    rows = torch.cat([torch.cat([torch.zeros(1, 6).long(), short], 1), long])
    mask = (torch.arange(17)[None] >= torch.tensor([[6], [0]])).long()
    for policy in (SMALL, STREAMING):
        with patch(model, policy):
            both = generate(model, rows, attention_mask=mask)
            assert torch.equal(both[0, 17:], generate(model, short)[0, 11:])
            assert torch.equal(both[1:], generate(model, long))


# -- beams ----------------------------------------------------------------------------------------


def score_alone(model: Any, policy: str, ids: torch.Tensor, prompt_length: int) -> float:
    """Return the mean log-probability of a sequence fed alone, as beam search would count it."""
    cache = EvictionCache(model, policy)
    name = cache_argument(model)
    with torch.no_grad():
        out = model(ids[:, :prompt_length], use_cache=True, **{name: cache})
        total, logits = 0.0, out.logits[:, -1]
        for at in range(prompt_length, ids.shape[1]):
            total += float(logits.log_softmax(-1)[0, ids[0, at]])
            logits = model(ids[:, at : at + 1], use_cache=True, **{name: cache}).logits[:, -1]
    return total / (ids.shape[1] - prompt_length)


@pytest.mark.parametrize("policy", [SMALL, STREAMING])
def test_a_beams_score_is_that_of_its_sequence_fed_alone(model: Any, policy: str) -> None:
    ids = prompt()
    with patch(model, policy):
        settings = {"num_beams": 4, "return_dict_in_generate": True, "output_scores": True}
        out = generate(model, ids, **settings)
        alone = score_alone(model, policy, out.sequences, ids.shape[1])
    assert float(out.sequences_scores[0]) == pytest.approx(alone, abs=2e-3)


@pytest.mark.parametrize("policy", [SMALL, STREAMING])
def test_that_comparison_sees_a_broken_reorder(model: Any, policy: str, monkeypatch: Any) -> None:
    ids = prompt()
    with patch(model, policy):
        settings = {"num_beams": 4, "return_dict_in_generate": True, "output_scores": True}
        with monkeypatch.context() as broken:
            broken.setattr(EvictionCache, "reorder_cache", lambda self, index: None)
            out = generate(model, ids, **settings)
        alone = score_alone(model, policy, out.sequences, ids.shape[1])
    assert abs(float(out.sequences_scores[0]) - alone) > 2e-3


# -- drafts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [SMALL, STREAMING])
@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_neox", "gpt_oss", "llama"])
def test_drafts_give_the_tokens_of_plain_decoding(
    models: dict[str, Any], kind: str, policy: str
) -> None:
    """Sliding layers, no keywords in update, learned sinks; most of the draft is accepted."""
    model = models[kind]
    ids = torch.cat([prompt(length=9)] * 2, 1)
    with patch(model, policy) as patched:
        cache = patched.new_cache()
        plain = generate(model, ids, cache=cache, max_new_tokens=20)
        drafted = patched.new_cache()
        given = torch.cat([plain, ids], 1)  # what comes next was there before: a lookup finds it
        out = generate(model, given, cache=drafted, prompt_lookup_num_tokens=4, max_new_tokens=20)
        assert torch.equal(out, generate(model, given, max_new_tokens=20))
        assert drafted.seen == out.shape[1] - 1
        again = patched.new_cache()
        both = generate(model, ids, cache=again, prompt_lookup_num_tokens=4, max_new_tokens=20)
        assert torch.equal(both, plain)
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, EvictionLayer):
                assert torch.equal(cache.kept_positions(index), again.kept_positions(index))


# -- turns, copies, streams -----------------------------------------------------------------------


def test_turn_two_continues_a_kept_cache(model: Any) -> None:
    ids = prompt(length=30)
    name = cache_argument(model)
    with patch(model), torch.no_grad():
        cache = EvictionCache(model, STREAMING)
        first = generate(model, ids[:, :12], max_new_tokens=6, cache=cache)
        fed = torch.cat([first, ids[:, 12:]], 1)
        second = generate(model, fed, cache=cache)
        whole = EvictionCache(model, STREAMING)
        model(fed[:, :-1], use_cache=True, **{name: whole})
        assert torch.equal(generate(model, fed, cache=whole), second)


def test_a_copied_cache_goes_its_own_way(model: Any) -> None:
    ids = prompt()
    with patch(model):
        cache = EvictionCache(model, SMALL)
        generate(model, ids, cache=cache, max_new_tokens=3)
        twin = copy.deepcopy(cache)
        seen = cache.seen
        model(ids[:, :4], use_cache=True, **{cache_argument(model): twin})
        assert (cache.seen, twin.seen) == (seen, seen + 4)


def test_a_streamer_gets_every_token(llama: Any) -> None:
    ids = prompt()
    with patch(llama, SMALL):
        streamer = TextIteratorStreamer(Words(), skip_prompt=True)  # type: ignore[arg-type]
        out = generate(llama, ids, streamer=streamer)
    assert "".join(streamer) == Words().decode(out[0, ids.shape[1] :])


def test_a_stopping_rule_stops_and_the_cache_is_good(llama: Any) -> None:
    from transformers import StoppingCriteria, StoppingCriteriaList

    class After(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            return torch.full((len(input_ids),), input_ids.shape[1] >= 20)

    ids = prompt()
    with patch(llama):
        cache = EvictionCache(llama, SMALL)
        out = generate(llama, ids, cache=cache, stopping_criteria=StoppingCriteriaList([After()]))
        assert out.shape[1] == 20
        assert cache.seen == 19
        assert generate(llama, out, cache=cache, max_new_tokens=3).shape[1] == 23


def test_a_stop_string_stops_and_the_cache_is_good(llama: Any) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: llama.config.vocab_size]
    raw = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    words = PreTrainedTokenizerFast(tokenizer_object=raw)
    ids = prompt()
    with patch(llama, SMALL):
        free = generate(llama, ids)[0, ids.shape[1] :].tolist()
        stop = letters[free[4]]
        at = free.index(free[4])  # where it comes first
        out = generate(llama, ids, stop_strings=[stop], tokenizer=words)
    assert out[0, ids.shape[1] :].tolist() == free[: at + 1]


def test_the_template_for_the_hub_runs(llama: Any) -> None:
    ids = prompt()
    with patch(llama, SMALL):
        wanted = generate(llama, ids)
    got = generate(
        llama,
        ids,
        custom_generate=str(ROOT / "docs" / "custom_generate"),
        trust_remote_code=True,
        policy=SMALL,
    )
    assert torch.equal(got, wanted)
    assert not hasattr(llama, "_kvevict")


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["quantized", "offloaded", "static", "offloaded_static"])
def test_another_cache_implementation_is_refused(model: Any, kind: str) -> None:
    with patch(model, SMALL), pytest.raises(UnsupportedModelError, match="cache_implementation"):
        generate(model, prompt(), cache_implementation=kind)


def test_an_exception_before_the_first_crop_leaves_sliding_layers_usable(
    models: dict[str, Any],
) -> None:
    model, ids = models["gemma3_text"], torch.arange(3, 23)[None]  # no repeats: no candidates

    def stop(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    with patch(model), torch.no_grad():
        cache, plain = EvictionCache(model, SMALL), EvictionCache(model, SMALL)
        name = cache_argument(model)
        stopped = {"logits_processor": [stop], name: cache, "prompt_lookup_num_tokens": 3}
        with pytest.raises(KeyboardInterrupt):
            generate(model, ids, **stopped)
        model(ids, **{name: plain})
        assert cache.seen == plain.seen == 20
        for more in (torch.tensor([[5]]), prompt(length=6)):
            got, wanted = (model(more, **{name: c}).logits for c in (cache, plain))
            torch.testing.assert_close(got, wanted)


GOES_BACK = hasattr(DynamicCache, "get_recurrent_states_to_keep")  # from release 5.25 on


@pytest.mark.skipif(GOES_BACK, reason="this release's recurrent layers go back")
def test_drafts_are_refused_where_a_recurrent_layer_cannot_go_back(models: dict[str, Any]) -> None:
    model = models["qwen3_next"]
    forwards: list[int] = []
    with patch(model, SMALL):
        hook = model.register_forward_hook(lambda *args: forwards.append(1))
        with pytest.raises(ValueError, match="stateful"):  # transformers' own
            generate(model, prompt(), prompt_lookup_num_tokens=3)
        hook.remove()
        with pytest.raises(UnsupportedModelError, match="LinearAttention"):
            EvictionCache(model, SMALL).activate_past_recording()
    assert not forwards


@pytest.mark.skipif(not GOES_BACK, reason="this release's recurrent layers cannot go back")
def test_a_recurrent_layer_goes_back_by_the_states_that_it_keeps(models: dict[str, Any]) -> None:
    model = models["qwen3_next"]
    ids = prompt()
    ids = torch.cat([ids, ids, ids], 1)  # repeats itself, so that drafts are found
    with patch(model, SMALL):
        wanted = generate(model, ids)
        for longest in (1, 3, 6):  # all of a draft is rejected now and then, at any length
            drafted = generate(model, ids, prompt_lookup_num_tokens=longest)
            assert torch.equal(drafted, wanted)


def test_continuous_batching_is_refused(model: Any) -> None:
    with patch(model, SMALL), pytest.raises(UnsupportedModelError, match="continuous batching"):
        model.generate_batch(inputs=[[3, 4, 5], [6, 7]])


def test_attention_weights_are_refused(model: Any) -> None:
    with patch(model, SMALL), pytest.raises(UnsupportedModelError, match="output_attentions"):
        generate(model, prompt(), output_attentions=True, return_dict_in_generate=True)


def test_a_hybrid_cache_is_not_saved(models: dict[str, Any], tmp_path: Path) -> None:
    model = models["gemma3_text"]
    with patch(model):
        cache = EvictionCache(model, SMALL)
        generate(model, prompt(), cache=cache)
        with pytest.raises(CacheError, match="sliding"):
            cache.save(tmp_path / "cache")


def test_a_hybrid_wants_the_whole_mask(models: dict[str, Any]) -> None:
    model = models["gemma3_text"]
    rows = prompt(2)
    mask = torch.ones_like(rows)
    mask[0, :3] = 0
    with patch(model), torch.no_grad():
        cache = {cache_argument(model): EvictionCache(model, SMALL)}
        model(rows, attention_mask=mask, **cache)
        with pytest.raises(UnsupportedModelError, match="whole attention_mask"):
            model(rows[:, :1], **cache)


def test_a_model_that_drops_its_cache_is_stopped() -> None:
    """Phi-3 starts over where its long factors begin; that would leave the policy behind."""
    model = families.build("phi3 + longrope")
    ids = prompt(length=60)
    with patch(model, SMALL), pytest.raises(UnsupportedModelError, match="drops its cache"):
        generate(model, ids)


def test_bounded_positions_are_never_passed() -> None:
    """In-cache positions of a rope that changes at 64 stay below, whatever is fed at once."""
    model = families.build("phi3 + longrope")
    ids = prompt(length=120)
    name = cache_argument(model)
    with patch(model), torch.no_grad():
        for policy in (STREAMING, SMALL):
            cache = EvictionCache(model, policy, positions="in_cache")
            with pytest.raises(UnsupportedModelError, match="chunks of at most"):
                model(ids, **{name: cache})
            cache = EvictionCache(model, policy, positions="in_cache")
            for first in range(0, 120, 20):
                model(ids[:, first : first + 20], **{name: cache})
            assert cache.seen == 120


def test_a_plain_cache_on_a_patched_model_is_as_before(model: Any) -> None:
    ids = prompt()
    plain = generate(model, ids)
    stock = DynamicCache(config=model.config.get_text_config(decoder=True))
    with patch(model, SMALL):
        assert torch.equal(generate(model, ids, cache=stock), plain)
