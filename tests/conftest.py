"""What all rooms' tests share: quiet threads, seeds, skips with reasons, and the tiny models."""

import os

# Before torch is imported anywhere: with a busy neighbour, spinning threads take 20 times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"

settings.register_profile("kvevict", deadline=None, derandomize=True)
settings.load_profile("kvevict")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any("gpu" in item.keywords for item in items):
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  libraries under test may draw from the global state
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


def _shared(name: str) -> Path:
    folder = SHARED / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent: shared {name} is not part of the checkout")
    return folder


@pytest.fixture(scope="session")
def data_folder() -> Path:
    return _shared("data")


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Any]:
    """Return a reader of the authors' traces: `golden("full_nll")`."""
    folder = _shared("golden")
    return lambda name: json.loads((folder / f"{name}.json").read_text())


@pytest.fixture(scope="session")
def golden_ids(golden: Callable[[str], Any]) -> list[int]:
    facts = golden("token_ids")
    return facts["ids"] if isinstance(facts, dict) else facts


@pytest.fixture(scope="session")
def _small() -> tuple[Any, Any]:
    import kvevict

    return kvevict.load()


@pytest.fixture
def small_model(_small: tuple[Any, Any]) -> Iterator[Any]:
    """The embedded real model, left unpatched behind every test; fetched if need be (slow)."""
    yield _small[0]
    handle = getattr(_small[0], "_kvevict", None)
    if handle is not None:
        handle.unpatch()


@pytest.fixture
def small_tokenizer(_small: tuple[Any, Any]) -> Any:
    return _small[1]


@pytest.fixture
def converted_model(request: pytest.FixtureRequest) -> Any:
    """The real model for the default run: skipped rather than fetched where it is not there yet."""
    from kvevict.models.small import SMALL, cache_folder

    if not (cache_folder() / f"{SMALL}-f32" / "config.json").is_file():
        pytest.skip(f"{SMALL} is not converted yet: `kvevict demo` or the slow tests do it, once")
    return request.getfixturevalue("small_model")


@pytest.fixture(scope="session")
def make_tiny() -> Callable[..., Any]:
    """Return a maker of random Llamas whose attention is peaked, so that a wrong variant shows.

    With the usual initializer_range of 0.02 attention is near uniform and even a broken cache
    passes; at 0.3 distant tokens matter.
    """

    def make(seed: int = 0, **settings: Any) -> Any:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(seed)
        known = {
            "vocab_size": 97,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "initializer_range": 0.3,
            "bos_token_id": 0,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        return LlamaForCausalLM(LlamaConfig(**{**known, **settings})).eval()

    return make


@pytest.fixture(params=[0, 1, 2], ids=lambda seed: f"seed{seed}")
def tiny(request: pytest.FixtureRequest, make_tiny: Callable[..., Any]) -> Any:
    """A random Llama of three layers with grouped heads; several seeds."""
    return make_tiny(request.param)


@pytest.fixture
def toy(make_tiny: Callable[..., Any]) -> Any:
    """The same for tests that one seed is enough for."""
    return make_tiny(0)
