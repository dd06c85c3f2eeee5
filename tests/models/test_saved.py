"""A saved cache continues bit by bit; a folder not whole, or not this model's, is refused."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvevict import CacheError, EvictionCache, patch
from kvevict.models.releases import cache_argument
from kvevict.policies import H2O, Full, Random, StreamingLLM, Window

POLICIES = {
    "streaming_llm": (StreamingLLM(3, 9), "auto"),
    "streaming_llm, original": (StreamingLLM(3, 9), "original"),
    "window": (Window(12), "auto"),
    "h2o": (H2O(6, 6), "auto"),
    "h2o, in_cache": (H2O(6, 6), "in_cache"),
    "h2o, departures": (H2O(5, 5, sinks=1, normalize="age", decay=0.95), "auto"),
    "random": (Random(budget=12, recent=2), "auto"),
    "full": (Full(), "auto"),
}


@pytest.fixture
def saved(toy: Any, draw: Any, feed: Any, tmp_path: Path) -> Path:
    with patch(toy):
        cache = EvictionCache(toy, H2O(6, 6))
        feed(toy, cache, draw(30))
        cache.save(tmp_path / "cache")
    return tmp_path / "cache"


@pytest.mark.parametrize("fed", [5, 12, 40])
@pytest.mark.parametrize("name", POLICIES)
def test_a_loaded_cache_continues_bit_by_bit(
    toy: Any, draw: Any, feed: Any, kept: Any, tmp_path: Path, name: str, fed: int
) -> None:
    policy, positions = POLICIES[name]
    rest = draw(30, seed=7)
    with patch(toy):
        cache = EvictionCache(toy, policy, positions=positions)
        feed(toy, cache, draw(fed), [fed - 2, 1, 1])
        cache.save(tmp_path / "cache")
        twin = EvictionCache.load(tmp_path / "cache", toy)
        assert (twin.seen, twin.capacity, twin.positions) == (fed, policy.capacity, cache.positions)
        assert twin.policy == policy
        assert kept(twin) == kept(cache)
        assert twin.nbytes() == cache.nbytes()
        forwards = [1] * 10 + [9] + [1] * 11
        assert torch.equal(feed(toy, twin, rest, forwards), feed(toy, cache, rest, forwards))
        assert kept(twin) == kept(cache)
        if policy.needs_scores:
            assert torch.equal(twin.scores(1), cache.scores(1))


def test_saving_changes_nothing_in_the_cache(
    toy: Any, draw: Any, feed: Any, tmp_path: Path
) -> None:
    for i, (policy, positions) in enumerate(POLICIES.values()):
        with patch(toy):
            runs = []
            for save in (False, True):
                cache = EvictionCache(toy, policy, positions=positions)
                feed(toy, cache, draw(30))
                if save:
                    cache.save(tmp_path / str(i))
                runs.append(feed(toy, cache, draw(20, seed=2)))
        assert torch.equal(*runs)


def test_a_padded_batch_is_saved_with_its_rows(
    toy: Any, draw: Any, feed: Any, kept: Any, tmp_path: Path
) -> None:
    ids = torch.tensor([draw(40, seed=1), [0] * 15 + draw(25, seed=2)])
    mask = (ids != 0).long()
    for i, (policy, positions) in enumerate(POLICIES.values()):
        with patch(toy):
            cache = EvictionCache(toy, policy, positions=positions)
            feed(toy, cache, ids[:, :20], [20], mask)
            cache.save(tmp_path / str(i))
            twin = EvictionCache.load(tmp_path / str(i), toy)
            a = feed(toy, cache, ids[:, 20:], None, mask)
            b = feed(toy, twin, ids[:, 20:], None, mask)
        assert torch.equal(a, b)
        assert kept(cache, 1) == kept(twin, 1)


def test_evict_every_shares_and_stream_offsets_are_saved(
    toy: Any, draw: Any, feed: Any, kept: Any, tmp_path: Path
) -> None:
    import kvevict

    with patch(toy, "full"):
        cache = EvictionCache(toy, H2O("20%", "20%"), evict_every=3)
        toy.generate(torch.tensor([draw(40)]), cache=cache, max_new_tokens=4, do_sample=False)
        cache.save(tmp_path / "shares")
        twin = EvictionCache.load(tmp_path / "shares", toy)
        assert twin.capacity == 16
        assert twin.evict_every == 3
        assert torch.equal(feed(toy, twin, draw(20)), feed(toy, cache, draw(20)))
        twin.reset()
        toy.generate(torch.tensor([draw(20)]), cache=twin, max_new_tokens=4, do_sample=False)
        assert twin.capacity == 8
        cache = EvictionCache(toy, H2O(6, 6))
        list(kvevict.stream(toy, draw(20), cache, start=100))
        cache.save(tmp_path / "stream")
        twin = EvictionCache.load(tmp_path / "stream", toy)
        for one in (cache, twin):
            list(kvevict.stream(toy, draw(20, seed=4), one, start=100))
        assert kept(cache) == kept(twin)
        assert min(kept(cache)[0][0]) >= 100


def test_a_rebased_cache_continues_bit_by_bit(
    toy: Any, draw: Any, feed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvevict.forward._REBASE_AT", 30)
    with patch(toy):
        cache = EvictionCache(toy, StreamingLLM(3, 9))
        feed(toy, cache, draw(100))
        cache.save(tmp_path / "cache")
        twin = EvictionCache.load(tmp_path / "cache", toy)
        rest = draw(60, seed=2)
        assert torch.equal(feed(toy, twin, rest), feed(toy, cache, rest))


def test_a_fresh_cache_can_be_saved(toy: Any, draw: Any, feed: Any, tmp_path: Path) -> None:
    with patch(toy):
        cache = EvictionCache(toy, StreamingLLM(3, 9))
        cache.save(tmp_path / "cache")
        twin = EvictionCache.load(tmp_path / "cache", toy)
        assert torch.equal(feed(toy, twin, draw(30)), feed(toy, cache, draw(30)))


def test_a_loaded_cache_that_was_never_patched_is_refused_by_the_model(
    toy: Any, saved: Path, draw: Any
) -> None:
    from kvevict import NotPatchedError

    cache = EvictionCache.load(saved, toy)
    with pytest.raises(NotPatchedError):
        toy(torch.tensor([draw(3)]), **{cache_argument(toy): cache})


def test_nothing_is_pickled(saved: Path) -> None:
    assert sorted(p.name for p in saved.iterdir()) == ["cache.json", "cache.safetensors"]
    assert json.loads((saved / "cache.json").read_text())["seen"] == 30
    assert load_file(saved / "cache.safetensors")


def test_saving_again_replaces_in_one_step(
    toy: Any, saved: Path, draw: Any, feed: Any, kept: Any
) -> None:
    with patch(toy):
        cache = EvictionCache.load(saved, toy)
        feed(toy, cache, draw(10, seed=3))
        cache.save(saved)
        assert EvictionCache.load(saved, toy).seen == 40
    assert [p.name for p in saved.parent.iterdir()] == ["cache"]


def test_a_folder_of_something_else_is_never_overwritten(
    toy: Any, draw: Any, feed: Any, tmp_path: Path
) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "dear.txt").write_text("dear")
    with patch(toy):
        cache = EvictionCache(toy, H2O(6, 6))
        feed(toy, cache, draw(5))
        with pytest.raises(CacheError, match="letters"):
            cache.save(tmp_path / "letters")
        (tmp_path / "file").write_text("")
        for bad in (tmp_path / "file", tmp_path / "file" / "below"):
            with pytest.raises(CacheError):
                cache.save(bad)
    assert (tmp_path / "letters" / "dear.txt").read_text() == "dear"


def cut(folder: Path) -> None:
    path = folder / "cache.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def flip(folder: Path) -> None:
    path = folder / "cache.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def drop_tensors(folder: Path) -> None:
    (folder / "cache.safetensors").unlink()


def drop_facts(folder: Path) -> None:
    (folder / "cache.json").unlink()


def cut_facts(folder: Path) -> None:
    path = folder / "cache.json"
    path.write_text(path.read_text()[:100])


def edit(name: str, value: Any) -> Any:
    def change(folder: Path) -> None:
        path = folder / "cache.json"
        facts = json.loads(path.read_text())
        if value is None:
            del facts[name]
        else:
            facts[name] = value
        path.write_text(json.dumps(facts))

    return change


def foreign(folder: Path) -> None:
    (folder / "cache.json").write_text('["something else"]')


def other_tensors(folder: Path) -> None:
    save_file({"weight": torch.zeros(3)}, folder / "cache.safetensors")


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        flip,
        drop_tensors,
        drop_facts,
        cut_facts,
        foreign,
        other_tensors,
        shutil.rmtree,
        edit("format", 99),
        edit("given", {"name": "no such policy", "settings": {}}),
        edit("given", {"name": "h2o", "settings": {"heavy": -3}}),
        edit("layers", []),
        edit("offsets", None),
        edit("evict_every", None),
        edit("asked", ["sideways", "auto"]),
        edit("sha256", "0" * 64),
        edit("model", {}),
    ],
)
def test_a_truncated_or_foreign_folder_is_refused(toy: Any, saved: Path, damage: Any) -> None:
    damage(saved)
    with patch(toy), pytest.raises(CacheError, match="cache"):
        EvictionCache.load(saved, toy)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_hidden_layers": 2},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"hidden_size": 32},
        {"vocab_size": 50},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    ],
    ids=lambda s: next(iter(s)),
)
def test_a_cache_saved_for_another_shape_of_model_is_refused(
    make_tiny: Any, saved: Path, settings: dict[str, Any]
) -> None:
    other = make_tiny(0, **settings)
    with patch(other), pytest.raises(CacheError, match="another model"):
        EvictionCache.load(saved, other)


def test_a_cache_saved_for_other_weights_is_refused(make_tiny: Any, saved: Path) -> None:
    other = make_tiny(1)  # the same shapes: only the weights tell them apart
    with patch(other), pytest.raises(CacheError, match="another model"):
        EvictionCache.load(saved, other)


def test_a_cache_saved_in_another_dtype_is_refused(toy: Any, saved: Path) -> None:
    other = copy.deepcopy(toy).to(torch.bfloat16)
    with patch(other), pytest.raises(CacheError, match=r"float32 and the model runs in .*bfloat16"):
        EvictionCache.load(saved, other)


def test_the_same_weights_loaded_again_are_the_same_model(
    make_tiny: Any, saved: Path, draw: Any, feed: Any, toy: Any
) -> None:
    again = make_tiny(0)
    with patch(again), patch(toy):
        ours = EvictionCache.load(saved, again)
        assert torch.equal(
            feed(again, ours, draw(10)), feed(toy, EvictionCache.load(saved, toy), draw(10))
        )
