"""Speed of HistoryManager.prepare: per call on a long session, and linear in the length.

    pytest benchmarks/bench_agent.py --benchmark-only --benchmark-timer=time.process_time

Target: at most 20 ms a call (processor time, median) on a session of 990 messages after the first
call, and time linear in the length up to 100,000 messages.
"""

import time

import pytest

from kvevict.agent.manager import HistoryManager

POLICIES = [
    "full",
    "anthropic_clear_tool_uses:clear_at_least=5000",
    "complexity_trap_mask:polling=10",
    "codex_local",
    "opencode_prune",
    "shape",
]


def session(messages):
    """Return a coding session of this many messages, about 500 tokens each."""
    out = [{"role": "user", "content": "Refactor the module and keep its interface."}]
    n = 0
    while len(out) < messages - 1:
        n += 1
        value = {"path": f"src/file{n}.py", "new": "line of code\n" * 60}
        call = {"type": "tool_use", "id": f"c{n}", "name": "edit", "input": value}
        said = {"type": "text", "text": f"Step {n}: I edit the file."}
        out.append({"role": "assistant", "content": [said, call]})
        body = {"type": "tool_result", "tool_use_id": f"c{n}", "content": f"{n} output\n" * 180}
        out.append({"role": "user", "content": [body]})
        if n % 20 == 0:
            out.append({"role": "assistant", "content": "Done with this part."})
            out.append({"role": "user", "content": "Go on."})
    return out


@pytest.mark.parametrize("policy", POLICIES)
def test_prepare_on_a_session_of_990_messages(benchmark, policy):
    messages = session(990)
    manager = HistoryManager(policy)
    start = len(messages) - 80
    manager.prepare(messages[:start])
    ends = iter(range(start + 2, len(messages) + 1, 2))
    seconds = []

    def setup():
        return (messages[: next(ends)],), {}

    def prepare(history):
        started = time.process_time()
        manager.prepare(history)
        seconds.append(time.process_time() - started)

    benchmark.pedantic(prepare, setup=setup, rounds=35)
    assert sorted(seconds)[len(seconds) // 2] < 0.020


@pytest.mark.parametrize("policy", ["full", "codex_local", "complexity_trap_mask:polling=10"])
def test_prepare_is_linear_in_the_length(benchmark, policy):
    seconds = {}
    for length in (1_000, 10_000, 100_000):
        messages = session(length)
        manager = HistoryManager(policy, window=10**9)
        manager.prepare(messages[:-4])
        started = time.process_time()
        manager.prepare(messages[:-2])
        seconds[length] = time.process_time() - started
    benchmark.extra_info["seconds_by_length"] = seconds
    benchmark.pedantic(lambda: None, rounds=1)
    assert seconds[100_000] < 20 * seconds[10_000]
