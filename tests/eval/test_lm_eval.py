import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason='needs lm-eval: pip install "kvevict[eval]"')

from kvevict import console
from kvevict.eval import perplexity
from kvevict.eval.lm_eval_cli import app
from kvevict.eval.lm_eval_model import KVEvictLM

POLICY = "streaming_llm:sinks=2,window=14"
TASK = """task: kv_roll
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: byte_perplexity}}]
"""


class Request:
    def __init__(self, *args: Any) -> None:
        self.args = args


@pytest.fixture
def adapter(model: Any, tokenizer: Any) -> KVEvictLM:
    return KVEvictLM(model, POLICY, chunk=8, tokenizer=tokenizer, max_length=64, device="cpu")


def test_a_document_is_one_stream_beyond_the_longest_request(
    adapter: KVEvictLM, model: Any, tokenizer: Any
) -> None:
    text = "the cat sat on a mat and saw that dogs run far. " * 4  # 3 times max_length
    found = adapter.loglikelihood_rolling([Request(text)], disable_tqdm=True)
    ids = torch.tensor([adapter.prefix_token_id, *tokenizer(text).input_ids])
    nll = perplexity.nll_of(model, ids, POLICY, chunk=8)
    assert found[0] == pytest.approx(-float(nll[1:].double().sum()), abs=1e-3)


def test_likelihoods_stream_through_the_cache(
    adapter: KVEvictLM, model: Any, tokenizer: Any
) -> None:
    question, answer = "the cat sat on a mat and saw that dogs run", " far"
    found = adapter.loglikelihood([Request(question, answer), Request("a", " b")])
    ids = torch.tensor(tokenizer(question + answer).input_ids)
    nll = perplexity.nll_of(model, ids, POLICY, chunk=8)
    assert found[0][0] == pytest.approx(-float(nll[-4:].double().sum()), abs=1e-3)
    full = perplexity.nll_of(model, ids, "full", chunk=8)
    assert abs(found[0][0] + float(full[-4:].double().sum())) > 1e-2  # eviction has an effect


def test_generation_gets_a_fresh_cache_each_time(adapter: KVEvictLM) -> None:
    options = {"until": ["\n"], "max_gen_toks": 6}
    asked = [Request("the cat sat on a mat and", dict(options)) for _ in range(2)]
    first, second = adapter.generate_until(asked, disable_tqdm=True)
    assert first == second


def test_a_local_task_runs_offline(
    model_folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "the cat sat on a mat. " * 6}) + "\n")
    (tmp_path / "task.yaml").write_text(TASK.format(file=rows))
    words = f"{model_folder} --policy {POLICY} --chunk 8 --tasks kv_roll --include_path {tmp_path}"
    app([*words.split(), "--json"], standalone_mode=False)
    whole = json.loads(capsys.readouterr().out)
    (row,) = whole["rows"]
    assert row["policy"] == POLICY
    assert row["task"] == "kv_roll"
    assert row["byte_perplexity"] > 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("{m} --policy full", "name the tasks"),
        ("{m} --policy nope --tasks x", "unknown policy"),
        ("{m} --tasks x --model hf", "first argument"),
    ],
)
def test_bad_input_has_code_2(words: str, message: str, model_folder: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        console.run(lambda: app(words.format(m=model_folder).split()))
    assert caught.value.code == console.BAD_INPUT
    assert message in capsys.readouterr().err
