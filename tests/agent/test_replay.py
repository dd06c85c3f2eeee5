import json

import pytest

from kvevict.agent.examples import login_bug, random_history
from kvevict.agent.formats import to_normal
from kvevict.agent.prices import TABLE, Prices, PricesError, get_prices
from kvevict.agent.replay import calls_of, marks_of, parse_text, read_session, replay
from kvevict.agent.tokens import CharCounter, sizes
from kvevict.errors import HistoryError, PolicyError

HARD = [
    "full",
    "complexity_trap_mask",
    "complexity_trap_mask:polling=10",
    "anthropic_clear_tool_uses",
    "anthropic_clear_tool_uses:clear_at_least=5000",
    "codex_local",
    "complexity_trap_hybrid:polling=10",
]


@pytest.fixture(scope="module")
def ranking(pi_session):
    history = to_normal(pi_session, "pi")
    results = {policy: replay(history, policy) for policy in HARD}
    for policy, r in results.items():
        print(
            f"{policy:48} cached {r.cost_cached:6.2f} uncached {r.cost_uncached:4.0f} "
            f"mean {r.mean_context / 1e3:4.0f}k peak {r.peak_context / 1e3:4.0f}k "
            f"breaks {r.prefix_breaks:3} overflows {r.overflows}"
        )
    return results


def test_masking_every_turn_is_dearer_than_in_batches_with_a_cache_and_cheaper_without(ranking):
    each, batch = ranking["complexity_trap_mask"], ranking["complexity_trap_mask:polling=10"]
    assert each.cost_cached > 1.2 * batch.cost_cached
    assert each.cost_uncached < batch.cost_uncached
    assert each.prefix_breaks > 5 * batch.prefix_breaks


def test_two_levels_are_cheapest_and_nothing_is_dearest(ranking):
    cached = {policy: r.cost_cached for policy, r in ranking.items()}
    assert min(cached, key=cached.get) == "complexity_trap_hybrid:polling=10"
    assert max(cached, key=cached.get) == "full"
    assert ranking["codex_local"].overflows == 0
    assert ranking["codex_local"].prefix_breaks == 2


def test_clearing_at_least_5k_beats_clearing_at_every_chance(ranking):
    often = ranking["anthropic_clear_tool_uses"]
    seldom = ranking["anthropic_clear_tool_uses:clear_at_least=5000"]
    assert seldom.cost_cached < often.cost_cached
    assert seldom.prefix_breaks < often.prefix_breaks / 5


def test_untouched_session_has_no_break_and_the_bill_of_its_parts(ranking):
    full = ranking["full"]
    assert (full.calls, full.prefix_breaks) == (484, 0)
    assert full.overflows > 250
    assert full.cost_cached < full.cost_uncached / 5
    assert full.recorded_cost == pytest.approx(25.6, abs=0.5)  # with its own compactions


def test_bill_is_the_sum_over_calls_of_read_and_written_tokens():
    history = to_normal(login_bug(), "openai-chat")
    size = sizes(history, CharCounter())
    prices = Prices("flat", input=1e6, cache_write=1e6, cache_read=0.0, output=0.0)
    result = replay(history, "full", prices=prices)
    starts = [i for i, m in enumerate(history.messages) if m.role == "assistant"]
    assert result.calls == len(starts)
    assert result.peak_context == size[: starts[-1]].sum()
    assert result.cost_cached == pytest.approx(size[: starts[-1]].sum())  # each token written once
    assert result.cost_uncached == pytest.approx(sum(size[:i].sum() for i in starts))


def test_summary_calls_are_billed():
    history = to_normal(random_history(1, "openai-chat", 60), "openai-chat")
    said = []

    def summarise(messages, budget):
        said.append(messages)
        return "short"

    free = Prices("output only", 0.0, 0.0, 0.0, 1e6)
    full = replay(history, "full", prices=free)
    result = replay(history, "complexity_trap_summary:n=3,m=2", prices=free, summarizer=summarise)
    assert result.summary_calls == len(said) > 0
    assert result.cost_cached > full.cost_cached


def test_calls_of_a_split_response_count_once():
    log = [
        {"type": "user", "sessionId": "s", "message": {"role": "user", "content": "go"}},
        {"type": "assistant", "message": {"role": "assistant", "id": "m", "content": "a"}},
        {"type": "assistant", "message": {"role": "assistant", "id": "m", "content": "b"}},
    ]
    assert [(c.start, c.stop) for c in calls_of(to_normal(log, "claude-code"))] == [(1, 3)]
    items = [
        {"role": "user", "content": "go"},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
    ]
    assert [(c.start, c.stop) for c in calls_of(to_normal(items))] == [(1, 3)]


def test_recorded_sessions_can_be_walked(trajectory):
    obj, name = trajectory
    history = to_normal(obj, name)
    calls = list(calls_of(history))
    assert calls
    if name in ("pi", "cline", "openhands", "claude-code"):
        assert any(call.usage for call in calls)
    if name != "pi":
        result = replay(obj, "swe_agent_last_n:n=2", window=100_000)
        assert result.calls == len(calls)
        assert result.peak_context <= replay(obj, "full").peak_context


def test_marks_tell_what_became_of_every_message():
    history = to_normal(login_bug(), "openai-chat")
    result = replay(history, "complexity_trap_mask:m=1")
    last = result.steps[-1]
    assert sum(n for _, n in last.marks) == last.messages
    assert {state for state, _ in last.marks} == {"kept", "masked"}
    assert marks_of(history.messages[:3], 5) == (("kept", 3), ("hidden", 2))


def test_same_inputs_give_the_same_bytes():
    history = to_normal(random_history(3), "openai-chat")
    rows = [
        json.dumps(replay(history, "pi", window=9_000, max_output=0).to_dict()) for _ in range(2)
    ]
    assert rows[0] == rows[1]


def test_bad_sessions_policies_and_prices_raise(tmp_path):
    file = tmp_path / "x.json"
    file.write_text('{"a": 1}\n{"b": ')
    with pytest.raises(HistoryError, match="line 2"):
        read_session(file)
    with pytest.raises(HistoryError, match="cannot be read"):
        read_session(tmp_path / "none")
    with pytest.raises(HistoryError, match="no model call"):
        replay([{"role": "user", "content": "x"}], "full", format="anthropic")
    with pytest.raises(PolicyError, match="known"):
        replay(login_bug(), "nothing")
    with pytest.raises(PricesError, match="sonnet"):
        replay(login_bug(), "full", prices="gold")
    with pytest.raises(HistoryError, match="empty"):
        parse_text("\n")
    with pytest.raises(HistoryError, match="nested"):
        parse_text("[" * 200_000)


def test_prices_come_with_their_source_and_from_files(tmp_path):
    assert all(p.source and p.date for p in TABLE.values())
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"input": 1, "cache_write": 1, "cache_read": 0, "output": 2}))
    assert get_prices(str(file)).cost(1_000_000, 0, 5, 0) == 1.0
    with pytest.raises(PricesError):
        get_prices({"input": -1, "cache_write": 1, "cache_read": 0, "output": 2})
    with pytest.raises(PricesError):
        get_prices({"tea": 1})
