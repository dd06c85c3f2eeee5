"""Long streams, threads, interrupts, folders that cannot be written, scores that are not finite."""

import gc
import os
import subprocess
import sys
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvevict import CacheError, EvictionCache, patch, stream
from kvevict.models import attention
from kvevict.models.releases import cache_argument


@pytest.fixture(scope="module")
def model() -> Any:
    return families.build("llama")


@pytest.fixture(autouse=True)
def _unpatched(model: Any) -> Any:
    yield
    if hasattr(model, "_kvevict"):
        model._kvevict.unpatch()


def resident() -> int:
    """Return this process's resident bytes now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("policy", ["streaming_llm:sinks=4,window=60", "h2o:heavy=32,recent=32"])
def test_a_million_tokens_in_flat_memory(policy: str) -> None:
    total, chunk = int(os.environ.get("KVEVICT_STREAM_TOKENS", "1000000")), 500
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 64, (total,), generator=generator, dtype=torch.int32)
    with patch(model):
        cache = EvictionCache(model, policy)
        early, size = 0, 0
        for number, step in enumerate(stream(model, tokens, cache, chunk=chunk)):
            assert torch.isfinite(step.nll[1:]).all()
            if number == 20:
                early, size = resident(), cache.nbytes()
        assert cache.seen == total
        assert cache.nbytes() == size
        assert resident() - early < 8 * 2**20
        assert cache.kept_positions(0).shape[2] == 64
        assert int(cache.kept_positions(0).max()) == total - 1


def test_two_threads_generate_on_one_patched_model(model: Any) -> None:
    prompts = [torch.arange(3, 20)[None], torch.arange(40, 52)[None]]
    settings = {"max_new_tokens": 25, "do_sample": False, "eos_token_id": None}
    with patch(model, "h2o:heavy=4,recent=5"):
        wanted = [model.generate(x, **settings) for x in prompts]
        got: dict[int, list[bool]] = {0: [], 1: []}

        def work(index: int) -> None:
            for _ in range(4):
                out = model.generate(prompts[index], **settings)
                got[index].append(torch.equal(out, wanted[index]))

        threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert got == {0: [True] * 4, 1: [True] * 4}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("length", [1, 5])
def test_scores_that_are_no_numbers_raise_and_poison(model: Any, value: float, length: int) -> None:
    name = cache_argument(model)
    weight = model.model.layers[0].self_attn.k_proj.weight
    good = weight.detach().clone()
    ids = torch.arange(3, 20)[None]
    with patch(model), torch.no_grad():
        cache = EvictionCache(model, "h2o:heavy=4,recent=5")
        model(ids, **{name: cache})
        try:
            weight.mul_(value)
            with pytest.raises(CacheError, match="not finite"):
                model(ids[:, :length], **{name: cache})
        finally:
            weight.copy_(good)
        with pytest.raises(CacheError, match="reset"):
            model(ids[:, :1], **{name: cache})
        cache.reset()
        model(ids, **{name: cache})
        assert torch.isfinite(cache.scores(0)).all()


def test_scores_that_went_bad_unseen_are_found_when_read_or_saved(
    model: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """As on a GPU, where only every 64th token is looked at."""
    name = cache_argument(model)
    weight = model.model.layers[0].self_attn.k_proj.weight
    good = weight.detach().clone()
    ids = torch.arange(3, 20)[None]
    for use in (lambda c: c.scores(0), lambda c: c.save(tmp_path / "cache")):
        with patch(model), torch.no_grad():
            cache = EvictionCache(model, "h2o:heavy=4,recent=5")
            model(ids, **{name: cache})
            try:
                weight.mul_(float("nan"))
                with monkeypatch.context() as unseen:
                    unseen.setattr("kvevict.forward.check_scores", lambda *_: None)
                    model(ids[:, :1], **{name: cache})
            finally:
                weight.copy_(good)
            with pytest.raises(CacheError, match="not finite"):
                use(cache)
            with pytest.raises(CacheError, match="reset"):
                model(ids[:, :1], **{name: cache})
    assert not (tmp_path / "cache").exists()


def test_a_forward_that_raised_holds_no_cache_alive(model: Any) -> None:
    name = cache_argument(model)
    ids = torch.arange(3, 20)[None]

    def fail(*_: Any) -> None:
        raise MemoryError("out of memory")

    with patch(model), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of a hook that raises while it cleans up
        cache = EvictionCache(model, "h2o:heavy=4,recent=5")
        model(ids, **{name: cache})
        hook = model.model.layers[-1].register_forward_pre_hook(fail)
        with pytest.raises(MemoryError):
            model(ids[:, :2], **{name: cache})
        hook.remove()
        assert attention.forward_cache.get() is None
        assert cache.seen == ids.shape[1]  # the failed forward was not counted
        alive = weakref.ref(cache)
        del cache
        gc.collect()
        assert alive() is None


def test_an_interrupt_in_a_forward_leaves_the_model_usable(model: Any) -> None:
    name = cache_argument(model)
    ids = torch.arange(3, 20)[None]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with patch(model), torch.no_grad():
        wanted = model(ids, **{name: EvictionCache(model, "window:window=6")}).logits
        cache = EvictionCache(model, "window:window=6")
        model(ids, **{name: cache})
        hook = model.model.layers[-1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, :2], **{name: cache})
        hook.remove()
        with pytest.raises(CacheError, match="half-way"):
            model(ids[:, :2], **{name: cache})
        fresh = EvictionCache(model, "window:window=6")
        assert torch.equal(model(ids, **{name: fresh}).logits, wanted)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_and_the_old_cache_stays(
    model: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    name = cache_argument(model)
    with patch(model), torch.no_grad():
        cache = EvictionCache(model, "h2o:heavy=4,recent=5")
        model(torch.arange(3, 20)[None], **{name: cache})
        cache.save(tmp_path / "cache")
        seen = cache.seen
        model(torch.arange(3, 6)[None], **{name: cache})

        def full(tensors: Any, path: Any) -> None:
            with Path("/dev/full").open("wb", buffering=0) as file:
                file.write(b"x" * 4096)

        monkeypatch.setattr("kvevict.saved.save_file", full)
        with pytest.raises(CacheError, match="cannot write"):
            cache.save(tmp_path / "cache")
        assert [x.name for x in tmp_path.iterdir()] == ["cache"]
        assert EvictionCache.load(tmp_path / "cache", model).seen == seen


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs users")
def test_a_read_only_folder_is_an_error(model: Any, tmp_path: Path) -> None:
    name = cache_argument(model)
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0o555)
    with patch(model), torch.no_grad():
        cache = EvictionCache(model, "window:window=6")
        model(torch.arange(3, 20)[None], **{name: cache})
        try:
            target = locked / "cache" if os.geteuid() else Path("/proc/kvevict/cache")
            with pytest.raises(CacheError, match="cannot write"):
                cache.save(target)
        finally:
            locked.chmod(0o755)


def test_no_source_file_unpickles_evaluates_or_trusts_remote_code() -> None:
    import ast

    root = Path(__file__).parents[2]
    banned = {"eval", "exec", "compile", "__import__"}
    files = [
        x for room in ("kvevict", "models", "kernels", "eval") for x in root.glob(f"{room}/**/*.py")
    ]
    assert len(files) > 30
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in banned, where
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [x.name for x in node.names] + [getattr(node, "module", "") or ""]
                assert not {"pickle", "dill", "cloudpickle", "marshal"} & set(names), where
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert isinstance(node.value, ast.Constant), where
                assert node.value.value is False, where


def test_importing_has_no_side_effect(tmp_path: Path) -> None:
    code = (
        "import os, sys; before = set(os.listdir('.')), dict(os.environ); import kvevict, "
        "kvevict.agent; assert 'torch' not in sys.modules; "
        "assert before == (set(os.listdir('.')), dict(os.environ))"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
