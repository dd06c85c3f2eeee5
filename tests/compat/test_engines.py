"""Models split over processes and devices give the tokens of one process; the planner is exact."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvevict import EvictionCache, PolicyError, UnsupportedModelError, patch, stream
from kvevict.models.planner import plan
from kvevict.models.releases import cache_argument

WORKER = Path(__file__).with_name("engine_worker.py")
BY_LAYER = ["h2o:heavy=5,recent=6,scope=layer", "tova:budget=11,scope=layer"]
POLICIES = ["streaming_llm:sinks=2,window=9", "h2o:heavy=5,recent=6", *BY_LAYER]
SETTINGS = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model of four layers."""
    path = tmp_path_factory.mktemp("engine") / "model"
    families.VARIANTS["llama of four layers"] = ("llama", {"num_hidden_layers": 4})
    try:
        families.build("llama of four layers").save_pretrained(path)
    finally:
        del families.VARIANTS["llama of four layers"]
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """What one process finds."""
    return find(folder, "cpu")


def find(folder: Path, device: str) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(folder).eval().to(device)
    ids = torch.arange(3, 33, device=device)[None]
    found: dict[str, Any] = {}
    for policy in POLICIES:
        with patch(model, policy):
            found[policy] = model.generate(ids, **SETTINGS)[0].tolist()
            cache = EvictionCache(model, policy)
            steps = list(stream(model, ids, cache, chunk=7))
            found[policy + " nll"] = torch.cat([x.nll for x in steps])[1:].tolist()
            found[policy + " bytes"] = cache.nbytes()
            found[policy + " kept"] = cache.kept_positions(3).tolist()
    return found


def run(mode: str, folder: Path, out: Path, device: str = "cpu") -> list[dict[str, Any]]:
    """Run the worker on two ranks: gloo, or NCCL with a GPU each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(WORKER), mode, str(folder), str(out), *POLICIES]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["PYTHONPATH"] = os.pathsep.join(x for x in sys.path if x)
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((out / f"{mode}-{rank}.json").read_text()) for rank in (0, 1)]


def check_tensor_parallel(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for policy in POLICIES:
        heads = [head for found in ranks for head in found[policy + " kept"][0]]
        assert [heads] == alone[policy + " kept"]
        for found in ranks:
            assert found[policy] == alone[policy]
            assert found[policy + " drafts"]
            assert found[policy + " nll"] == pytest.approx(alone[policy + " nll"], abs=1e-3)
            assert found[policy + " bytes"] * 2 == alone[policy + " bytes"]  # half of the heads
            off = max(
                abs(a - b)
                for a, b in zip(found[policy + " nll, deaf"], alone[policy + " nll"], strict=True)
            )
            # Ranks that do not add up their scores go apart, where heads are to agree.
            assert (off > 1e-2) == (policy in BY_LAYER), (policy, off)


def test_tensor_parallel_tokens_equal_one_process(
    folder: Path, alone: dict[str, Any], tmp_path: Path
) -> None:
    check_tensor_parallel(run("tp", folder, tmp_path), alone)


def test_pipeline_parallel_tokens_equal_one_process(
    folder: Path, alone: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("transformers.distributed")
    for found in run("pp", folder, tmp_path):
        for policy in POLICIES:
            assert found[policy] == alone[policy]
            assert found[policy + " drafts"]


@pytest.fixture
def two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("fewer than two CUDA devices")


@pytest.mark.gpu
@pytest.mark.usefixtures("two_gpus")
def test_tensor_parallel_on_two_gpus(folder: Path, tmp_path: Path) -> None:
    check_tensor_parallel(run("tp", folder, tmp_path, "cuda"), find(folder, "cuda"))


@pytest.mark.gpu
@pytest.mark.usefixtures("two_gpus")
def test_pipeline_parallel_on_two_gpus(folder: Path, tmp_path: Path) -> None:
    alone = find(folder, "cuda")
    for found in run("pp", folder, tmp_path, "cuda"):
        for policy in POLICIES:
            assert found[policy] == alone[policy]
            assert found[policy + " drafts"]


@pytest.mark.gpu
@pytest.mark.usefixtures("two_gpus")
def test_layers_on_two_gpus_give_the_same_tokens(folder: Path) -> None:
    alone = find(folder, "cuda")
    where: dict[str, int] = {f"model.layers.{i}": i % 2 for i in range(4)}
    where |= {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=where).eval()
    ids = torch.arange(3, 33, device="cuda:0")[None]
    for policy in POLICIES:
        with patch(model, policy):
            assert model.generate(ids, **SETTINGS)[0].tolist() == alone[policy]
        with patch(model):
            cache = EvictionCache(model, policy)
            list(stream(model, ids, cache, chunk=7))
            assert [x.keys.device.index for x in cache.layers] == [0, 1, 0, 1]
            assert cache.kept_positions(3).tolist() == alone[policy + " kept"]


@pytest.mark.parametrize("first", ["cpu", "disk"])
def test_weights_on_disk_give_the_same_tokens(
    folder: Path, alone: dict[str, Any], tmp_path: Path, first: str
) -> None:
    where = {"model.embed_tokens": first, "model.rotary_emb": "cpu", "model.norm": "cpu"}
    where |= {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(4)} | {
        "lm_head": "cpu"
    }
    model = AutoModelForCausalLM.from_pretrained(
        folder, device_map=where, offload_folder=tmp_path
    ).eval()
    for policy in POLICIES:
        with patch(model, policy):
            out = model.generate(torch.arange(3, 33)[None], **SETTINGS)
            assert out[0].tolist() == alone[policy]


# -- the planner ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "qwen3_next", "gpt2", "glm"])
@pytest.mark.parametrize("policy", ["full", *POLICIES, "h2o:heavy=20%,recent=10%"])
def test_planned_bytes_are_those_that_come_to_be(name: str, policy: str) -> None:
    model = families.build(name)
    positions = "original" if name == "gpt2" else "auto"
    with patch(model), torch.no_grad():
        cache = EvictionCache(model, policy, positions=positions, evict_every=3)
        cache.settle_length(40)
        ids = torch.randint(3, 90, (2, 40))
        model(ids, **{cache_argument(model): cache})
    row = plan(families.config_of(name), policy, 40, 2, "float32", 3)
    assert row["cache_bytes"] == cache.nbytes() == sum(row["layers"])
    assert len(row["layers"]) == len(cache.layers)


def test_a_70b_model_is_planned_without_its_weights() -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    )
    row = plan(config, "streaming_llm:sinks=4,window=1020", 131_072, 8)
    assert row["full_bytes"] == 2 * 80 * 8 * 8 * 131_072 * 128 * 2
    assert row["cache_bytes"] == 2 * 80 * 8 * 8 * 1025 * 128 * 2


def test_the_planner_refuses_what_patch_refuses() -> None:
    with pytest.raises(UnsupportedModelError, match="other keys"):
        plan(families.config_of("deepseek_v2"), "full", 100)
    with pytest.raises(UnsupportedModelError, match="no layer has full attention"):
        plan(families.config_of("mistral"), "full", 100)
    for bad in ({"context": 0}, {"batch": 0}, {"dtype": "int4"}, {"evict_every": 0}):
        with pytest.raises(PolicyError):
            plan(families.config_of("llama"), "full", **{"context": 9, **bad})
