import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvevict.eval.texts import Tokens

WORDS = "the cat sat on a mat and saw that dogs run far from every quiet harbor in winter. "


def make_model() -> Any:
    """Return a random Llama of two layers, grouped heads, one token a byte."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=256,
        eos_token_id=257,
    )
    return LlamaForCausalLM(config).eval()


def make_tokenizer() -> Any:
    """Return a tokenizer with one token a byte and no BOS of its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)} | {"<s>": 256, "</s>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.fixture
def model() -> Any:
    return make_model()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """Return a saved tiny model with its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    make_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "story.txt"
    path.write_text(WORDS * 12)
    return path


@pytest.fixture
def tokens() -> Callable[[int], Tokens]:
    def draw(length: int) -> Tokens:
        ids = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(3))
        return Tokens(ids, False, {"name": "drawn"})

    return draw
