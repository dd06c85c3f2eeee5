import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from kvevict.errors import KvevictError
from kvevict.eval.bench import decode_rows, paired


def tiny():
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM(config).eval()


def test_cases_are_interleaved_and_the_first_is_the_base():
    calls = []
    out = paired({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2, warmup=1)
    assert calls == ["a", "b"] * 3
    assert out["a"]["ratio"] == 1


def test_every_policy_gets_a_row_with_its_bytes():
    rows = decode_rows(tiny(), budget=16, context=64, rounds=2, repeat=1)
    assert [row["policy"].split(":")[0] for row in rows] == [
        "full",
        "window",
        "streaming_llm",
        "h2o",
    ]
    bounded = 17 * 2 * 16 * 4  # slots, keys and values, head dim, float32
    assert [row["cache_bytes"] for row in rows[1:]] == [bounded] * 3


def test_a_context_that_does_not_fill_the_budget_is_refused():
    with pytest.raises(KvevictError, match="longer"):
        decode_rows(tiny(), budget=64, context=64)
