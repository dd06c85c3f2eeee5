"""Fuzz what reads foreign input: `python tests/compat/fuzz.py TARGET SECONDS`.

Whatever comes in, only a KvevictError may come out. Coverage of our own code guides atheris; its
bytes are read either as text or as a plan for a JSON value made of words that the readers know.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["kvevict"]):
    from kvevict.agent.formats import format_names, from_normal, to_normal
    from kvevict.agent.message_policy import message_policies, parse_message_policy
    from kvevict.agent.replay import parse_text
    from kvevict.agent.validate import repair, validate
    from kvevict.errors import KvevictError
    from kvevict.eval.compare_page import load_view
    from kvevict.eval.results import load_result
    from kvevict.policy import parse

    MESSAGE_POLICIES = sorted(message_policies())  # loads them, and the formats, instrumented
    FORMATS = ["auto", *format_names()]
    parse("full")

ROLES = ["system", "user", "assistant", "tool", "developer", "function", "ipython", "x"]
TYPES = ["text", "tool_use", "tool_result", "thinking", "image", "message", "function_call"]
TYPES += ["function_call_output", "reasoning", "function", "redacted_thinking", "summary"]
KEYS = ["role", "content", "type", "text", "id", "name", "input", "arguments", "tool_calls"]
KEYS += ["tool_call_id", "tool_use_id", "call_id", "function", "messages", "system", "tools"]
KEYS += ["output", "history", "trajectory", "action", "observation", "uuid", "parentUuid"]
KEYS += ["message", "source", "is_error", "signature", "extra", "ts", "model", "usage"]
RESULT = ["schema", "command", "config", "versions", "rows", "hardware", "policy", "tokens"]
RESULT += ["spans", "messages", "layers", "heads", "steps", "token_rows", "message_rows", "maps"]
NAMES = ["full", "window", "streaming_llm", "h2o", "random", "snapkv", "tova"]
NAMES += MESSAGE_POLICIES
SETTINGS = ["window", "sinks", "heavy", "recent", "budget", "keep", "trigger", "n", "m", "decay"]
VALUES = ["0", "-1", "4", "20%", "101%", "1e9", "nan", "inf", "none", "age", "True", "0.5", "%"]


def value(data: Any, keys: list[str], depth: int = 0) -> Any:
    """Return a JSON value."""
    kind = data.ConsumeIntInRange(0, 9)
    if depth < 5 and kind < 4:
        words = [data.PickValueInList(keys) for _ in range(data.ConsumeIntInRange(0, 6))]
        return {w: field(data, w, keys, depth) for w in words}
    if depth < 5 and kind < 6:
        return [value(data, keys, depth + 1) for _ in range(data.ConsumeIntInRange(0, 4))]
    plain: list[Callable[[], Any]] = [
        lambda: None,
        data.ConsumeBool,
        lambda: data.ConsumeInt(4),
        lambda: data.ConsumeFloat(),
    ]
    return plain[kind]() if kind < 4 else data.ConsumeUnicode(12)


def field(data: Any, key: str, keys: list[str], depth: int) -> Any:
    """Return a value for a key, often one that it could have."""
    if key == "role" and data.ConsumeProbability() < 0.9:
        return data.PickValueInList(ROLES)
    if key == "type" and data.ConsumeProbability() < 0.9:
        return data.PickValueInList(TYPES)
    if key in ("id", "tool_call_id", "tool_use_id", "call_id") and data.ConsumeBool():
        return data.PickValueInList(["a", "b", ""])
    return value(data, keys, depth + 1)


def policies(raw: bytes) -> None:
    """Read a policy string, of tokens and of messages."""
    data = atheris.FuzzedDataProvider(raw)
    if data.ConsumeBool():
        text = data.ConsumeUnicode(60)
    else:
        pairs = [
            f"{data.PickValueInList(SETTINGS)}={data.PickValueInList(VALUES)}"
            for _ in range(data.ConsumeIntInRange(0, 4))
        ]
        text = data.PickValueInList(NAMES) + ":" + ",".join(pairs)
    for read in (parse, parse_message_policy):
        try:
            made = read(text)
        except KvevictError:
            continue
        assert str(read(str(made))) == str(made), text


def histories(raw: bytes) -> None:
    """Read a history, write it back, validate and repair it."""
    data = atheris.FuzzedDataProvider(raw)
    try:
        if data.ConsumeBool():
            obj = parse_text(data.ConsumeUnicode(400))
        else:
            obj = [value(data, KEYS) for _ in range(data.ConsumeIntInRange(0, 5))]
            obj = obj if data.ConsumeBool() else {"messages": obj}
        before = json.dumps(obj)
        history = to_normal(obj, data.PickValueInList(FORMATS))
    except KvevictError:
        return
    assert json.dumps(from_normal(history, history.format)) == before
    validate(obj, history.format)
    try:
        fixed, _ = repair(obj, history.format)
        repair(fixed, history.format)
    except KvevictError:
        pass
    assert json.dumps(obj) == before


def results(raw: bytes) -> None:
    """Read a result and a view."""
    data = atheris.FuzzedDataProvider(raw)
    whole = data.ConsumeBool()
    made = value(data, RESULT)
    if isinstance(made, dict):
        made["schema"] = 1
    text = json.dumps(made) if whole else data.ConsumeUnicode(300)
    for name, read in (("result.json", load_result), ("view.json", lambda p: load_view(p.parent))):
        (FOLDER / name).write_text(text, encoding="utf-8", errors="surrogatepass")
        try:
            read(FOLDER / name)
        except KvevictError:
            continue


TARGETS = {"policies": policies, "histories": histories, "results": results}

if __name__ == "__main__":
    target, seconds = TARGETS[sys.argv[1]], int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        FOLDER = Path(folder)
        limits = [f"-max_total_time={seconds}", "-timeout=10", "-rss_limit_mb=4096", "-max_len=600"]
        atheris.Setup([sys.argv[0], *limits, "-seed=7", f"-artifact_prefix={folder}/"], target)
        atheris.Fuzz()
