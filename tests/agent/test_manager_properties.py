"""Random histories under every policy hold I1 to I14; see benchmarks/agent_product.py."""

import copy
import importlib.util
import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvevict.agent.examples import random_history
from kvevict.agent.formats import from_normal, to_normal
from kvevict.agent.manager import HistoryManager
from kvevict.agent.message_policy import message_policies
from kvevict.agent.validate import common_prefix, validate
from kvevict.errors import BudgetError

PATH = Path(__file__).parents[2] / "benchmarks" / "agent_product.py"
SPEC = importlib.util.spec_from_file_location("agent_product", PATH)
product = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(product)

POLICIES = sorted(message_policies())
PAIRS = int(os.environ.get("KVEVICT_PAIRS", "48"))  # histories per policy in the default run


def broken(policy, seeds):
    for seed in seeds:
        format = product.FORMATS[seed % len(product.FORMATS)]
        history = random_history(seed, format, 24)
        string = product.EAGER.get(policy, policy) if seed % 3 else policy
        window = (1_000, 2_000, 4_000)[seed // 4 % 3]
        for found in product.check_pair(history, string, format, window, seed):
            yield f"seed {seed} {format} {string} window {window}: {found}"


@pytest.mark.parametrize("policy", POLICIES)
def test_sound_histories_hold_every_invariant(policy):
    assert list(broken(policy, range(PAIRS))) == []


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_ten_thousand_pairs_hold_every_invariant(policy):
    assert list(broken(policy, range(10_000, 10_000 + 323))) == []  # 323 x 31 policies


# hostile: what real logs and careless clients hand over ------------------------------------------

WORDS = st.sampled_from(
    ["", " ", "a", "déjà vu", "日本語", "👩‍👩‍👧", "\ud800", "x" * 400, "\r\n", "[cleared]"]
)
IDS = st.sampled_from(["a", "b", "c", "d", "e"])  # repeated on purpose


@st.composite
def hostile(draw):
    messages = []
    for _ in range(draw(st.integers(0, 14))):
        role = draw(st.sampled_from(["user", "assistant"]))
        if draw(st.integers(0, 4)) == 0:
            messages.append({"role": role, "content": draw(WORDS)})
            continue
        blocks = []
        for _ in range(draw(st.integers(0, 4))):
            kind = draw(st.integers(0, 5))
            if role == "assistant" and kind in (0, 1, 2):
                value = {"path": draw(WORDS)}
                blocks.append({"type": "tool_use", "id": draw(IDS), "name": "Read", "input": value})
            elif role == "assistant" and kind == 3 and not blocks:
                blocks.append({"type": "thinking", "thinking": "hm", "signature": "s"})
            elif role == "user" and kind in (0, 1, 2):
                body = {"type": "tool_result", "tool_use_id": draw(IDS), "content": draw(WORDS)}
                blocks.append(body)
            else:
                text = {"type": "text", "text": draw(WORDS)}
                if draw(st.integers(0, 6)) == 0:
                    text["cache_control"] = {"type": "ephemeral"}
                blocks.append(text)
        messages.append({"role": role, "content": blocks})
    return messages


@settings(
    max_examples=400, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(hostile(), st.sampled_from(POLICIES), st.sampled_from([60, 200, 800, 3_000]))
def test_hostile_histories_are_repaired_edited_or_refused(messages, policy, window):
    original = copy.deepcopy(messages)
    manager = HistoryManager(
        product.EAGER.get(policy, policy), window=window, max_output=window // 8
    )
    previous = None
    for end in range(1, len(messages) + 1, 3):
        try:
            prepared = manager.prepare(messages[:end])
        except BudgetError:
            continue
        # What repair cannot mend (an open end, no user at all) is reported, nothing else is left.
        assert {v.code for v in prepared.report.violations} <= {"I2", "I4", "I7"}
        assert {v.code for v in validate(prepared.messages, "anthropic")} <= {"I2", "I4", "I7"}
        again = manager.prepare(messages[:end]).messages
        assert json.dumps(again) == json.dumps(prepared.messages)
        acted = any(a.done for a in prepared.report.actions)
        if previous is not None and not acted and not prepared.report.repairs:
            assert common_prefix(previous, prepared.messages) == len(previous)
        previous = prepared.messages
    assert messages == original


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.sampled_from(POLICIES), st.sampled_from(product.FORMATS))
def test_applying_a_policy_to_its_own_result_does_no_more(seed, policy, format):
    """I11 for a manager that knows nothing of the first: the texts alone tell what was edited.

    MemGPT's warning is left out: in a window this small its own tokens reach the flush.
    """
    if policy == "memgpt":
        return
    history = random_history(seed, format, 24)
    kwargs = {"format": format, "window": 6_000, "max_output": 300}
    try:
        once = HistoryManager(policy, **kwargs).prepare(history)
        twice = HistoryManager(policy, **kwargs).prepare(once.messages)
    except BudgetError:
        return
    assert json.dumps(twice.messages) == json.dumps(once.messages)


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.sampled_from(POLICIES))
def test_nothing_to_evict_is_byte_identical(seed, policy):
    history = random_history(seed, "anthropic", 12)
    if "[" in policy or policy in ("claude_code", "swe_agent_last_n", "anthropic_clear_thinking"):
        return  # these act on every request
    if policy in ("acon", "complexity_trap_mask", "complexity_trap_hybrid"):
        return
    prepared = HistoryManager(policy).prepare(history)
    assert json.dumps(prepared.messages) == json.dumps(history)


@pytest.mark.parametrize("policy", ["codex_local", "shape", "anthropic_clear_tool_uses"])
@pytest.mark.parametrize(
    "format", ["openai-chat", "openai-responses", "hf", "pi", "cline", "openhands"]
)
def test_every_format_is_edited_and_stays_readable(policy, format):
    history = from_normal(to_normal(random_history(11, "anthropic", 40), "anthropic"), format)
    string = product.EAGER.get(policy, policy)
    prepared = HistoryManager(string, format=format, window=2_500, max_output=200).prepare(history)
    assert prepared.report.stages
    assert to_normal(prepared.messages, format)
    assert not [v for v in validate(prepared.messages, format) if v.code != "I7"]
