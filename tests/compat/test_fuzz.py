"""Foreign input of any shape gives a KvevictError or a result, and nothing else."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvevict.agent.formats import from_normal, to_normal
from kvevict.agent.validate import validate
from kvevict.errors import HistoryError

SECONDS = 20
# Found by the fuzzer: what should be a string is an object or a list.
FOUND: list[Any] = [
    [{"role": "tool", "tool_call_id": {"a": 1}, "content": "x"}],
    [{"role": "function", "name": ["a"], "content": "x"}],
    [{"role": "ipython", "name": ["a"], "content": "x"}],
    [{"role": "user", "content": [{"type": ["input_text"], "text": "x"}]}],
    [{"role": "user", "content": [{"type": {"text": 1}, "text": "x"}]}],
    [{"role": "assistant", "content": [{"type": "x_tool_result", "tool_use_id": {"a": 1}}]}],
]


@pytest.mark.parametrize("messages", FOUND)
def test_what_the_fuzzer_found_is_refused_with_its_place(messages: list[Any]) -> None:
    refused = []
    for format in ("auto", "anthropic", "openai-chat", "openai-responses", "hf"):
        try:
            history = to_normal(messages, format)
        except HistoryError as error:
            refused.append(str(error))
            continue
        assert from_normal(history, history.format) == messages
        validate(messages, history.format)
    assert any("[0]" in said for said in refused)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["policies", "histories", "results"])
def test_fuzzed_input_never_gives_another_error(target: str) -> None:
    pytest.importorskip("atheris", reason="atheris has no wheel for this machine")
    script = Path(__file__).with_name("fuzz.py")
    command = [sys.executable, str(script), target, str(SECONDS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS * 8)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    runs = re.search(r"Done (\d+) runs", done.stderr)
    assert runs is not None
    assert int(runs[1]) > 300
