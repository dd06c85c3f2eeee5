import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevict.agent import edit
from kvevict.agent.formats import from_normal, to_normal
from kvevict.agent.tokens import CharCounter
from kvevict.agent.validate import (
    check_budget,
    check_prefix,
    check_same,
    compare,
    repair,
    validate,
)
from kvevict.errors import HistoryError


def user(*content):
    return {"role": "user", "content": content[0] if isinstance(content[0], str) else [*content]}


def assistant(*content):
    return {"role": "assistant", "content": [*content]}


def call(name):
    return {"type": "tool_use", "id": name, "name": "read", "input": {"path": name}}


def result(name, text="ok"):
    return {"type": "tool_result", "tool_use_id": name, "content": text}


def said(words):
    return {"type": "text", "text": words}


def codes(obj, name="anthropic"):
    return [v.code for v in validate(obj, name)]


GOOD = [user("go"), assistant(call("a"), call("b")), user(result("a"), result("b"))]

BAD = {
    "orphan": ([user("go"), user(result("a"))], ["I1"]),
    "unanswered": ([user("go"), assistant(call("a")), user("next")], ["I2"]),
    "far": ([user("go"), assistant(call("a")), user("x"), user(result("a"))], ["I1"]),
    "split": (
        [user("go"), assistant(call("a"), call("b")), user(result("a")), user(result("b"))],
        ["I2"],
    ),
    "behind text": ([user("go"), assistant(call("a")), user(said("x"), result("a"))], ["I2"]),
    "twice": ([*GOOD, assistant(call("a")), user(result("a"))], ["I2"]),
    "no signature": (
        [user("go"), assistant({"type": "thinking", "thinking": "x"}), user("on")],
        ["I4"],
    ),
    "first": ([assistant(said("hi")), user("go")], ["I5"]),
    "no user": ([assistant(said("hi"))], ["I7", "I5", "I7"]),
    "prefill": ([user("go"), assistant(said("hi"))], ["I7"]),
    "empty": ([user("go"), assistant(said(" ")), user("on")], ["I8"]),
    "surrogate": ([user("go \ud800")], ["I8"]),
    "breakpoints": (
        [user(*({**said("x"), "cache_control": {"type": "ephemeral"}} for _ in range(5)))],
        ["I9"],
    ),
    "breakpoint on thinking": (
        [
            user("go"),
            assistant({"type": "thinking", "thinking": "x", "signature": "s", "cache_control": {}}),
            user("on"),
        ],
        ["I9"],
    ),
}


def test_sound_history_has_no_violation():
    assert codes(GOOD) == []


@pytest.mark.parametrize("name", sorted(BAD))
def test_broken_history_is_reported_with_its_invariant(name):
    obj, expected = BAD[name]
    assert codes(obj) == expected


UNREPAIRABLE = {"I4", "I7"}  # nobody can sign thinking, or speak for the user


@pytest.mark.parametrize("name", sorted(BAD))
def test_repair_mends_what_can_be_mended_and_reports_it(name):
    obj, expected = BAD[name]
    before = copy.deepcopy(obj)
    fixed, done = repair(obj, "anthropic")
    assert obj == before
    assert set(codes(fixed)) <= UNREPAIRABLE & set(expected)
    assert bool(done) == bool(set(expected) - UNREPAIRABLE)
    assert repair(fixed, "anthropic") == (fixed, [])


def test_repair_of_a_sound_history_returns_the_very_object():
    fixed, done = repair(GOOD, "anthropic")
    assert fixed is GOOD
    assert done == []


def test_parallel_results_split_over_two_messages_are_merged_in_order():
    split = [
        user("go"),
        assistant(call("a"), call("b")),
        user(result("b", "B")),
        user(result("a", "A"), said("and now?")),
    ]
    fixed, _ = repair(split, "anthropic")
    assert fixed[2]["content"] == [result("a", "A"), result("b", "B")]
    assert fixed[3:] == [user(said("and now?"))]


def test_repeated_id_is_renamed_together_with_its_result():
    obj = [
        user("go"),
        assistant(call("a")),
        user(result("a", "1")),
        assistant(call("a")),
        user(result("a", "2")),
    ]
    fixed, done = repair(obj, "anthropic")
    second = fixed[3]["content"][0]["id"]
    assert second != "a"
    assert fixed[4]["content"][0]["tool_use_id"] == second
    assert fixed[4]["content"][0]["content"] == "2"
    assert fixed[:3] == obj[:3]
    assert [r.code for r in done] == ["I2"]


def test_unanswered_calls_of_the_real_session_get_stable_results(pi_session):
    found = [v for v in validate(pi_session, "pi") if v.code == "I2"]
    assert len(found) == 6
    fixed, done = repair(pi_session, "pi")
    assert len(done) == 6
    assert json.dumps(repair(pi_session, "pi")[0]) == json.dumps(fixed)
    assert validate(fixed, "pi") == []
    assert repair(fixed, "pi") == (fixed, [])
    history = to_normal(fixed, "pi")
    made = [m for m in history if m.answers and m.answers[0].text == "aborted"]
    assert len(made) == 6
    assert all(m.answers[0].is_error for m in made)


def test_open_end_leaves_the_running_calls_alone():
    obj = [user("go"), assistant(call("a"))]
    assert repair(obj, "anthropic", open_end=True) == (obj, [])
    assert len(repair(obj, "anthropic")[0]) == 3


def test_chat_tool_messages_move_behind_their_calls():
    calls = [{"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    obj = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "user", "content": "wait"},
        {"role": "tool", "tool_call_id": "x", "content": "late"},
    ]
    assert codes(obj, "openai-chat") == ["I1"]
    fixed, _ = repair(obj, "openai-chat")
    assert [m["role"] for m in fixed] == ["user", "assistant", "tool", "user"]


def test_responses_outputs_may_stand_anywhere_behind_their_call():
    obj = [
        {"role": "user", "content": "go"},
        {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"},
        {"role": "user", "content": "wait"},
        {"type": "function_call_output", "call_id": "x", "output": "late"},
    ]
    assert codes(obj, "openai-responses") == []
    reasoning = {"type": "reasoning", "summary": [], "encrypted_content": "zz"}
    assert codes([obj[0], reasoning, obj[2]], "openai-responses") == ["I4"]


def test_history_of_system_messages_only_is_reported_and_left_alone():
    obj = [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}]
    assert codes(obj, "openai-chat") == ["I7", "I7"]
    assert repair(obj, "openai-chat") == (obj, [])


# -- any history at all -----------------------------------------------------------------------

names = st.sampled_from("abcd")
blocks = {
    "user": st.one_of(
        names.map(result), st.sampled_from(["hi", "", "x\udcff"]).map(said), names.map(result)
    ),
    "assistant": st.one_of(
        names.map(call), st.sampled_from(["so", " "]).map(said), names.map(call)
    ),
}
any_message = st.sampled_from(["user", "assistant"]).flatmap(
    lambda role: st.lists(blocks[role], max_size=4).map(lambda c: {"role": role, "content": c})
)
any_history = st.lists(any_message, max_size=8)
FORMATS = ["anthropic", "openai-chat", "openai-responses", "pi", "claude-code", "hf"]


@pytest.mark.parametrize("name", FORMATS)
def test_repair_holds_for_any_history_and_twice_is_once(name):
    @given(any_history)
    def check(messages):
        obj = from_normal(to_normal(messages, "anthropic"), name)
        fixed, done = repair(obj, name)
        left = [v for v in validate(fixed, name) if v.code not in UNREPAIRABLE]
        assert left == []
        assert json.dumps(repair(fixed, name)[0]) == json.dumps(fixed)
        assert repair(fixed, name)[1] == []
        if not done:
            assert fixed is obj
        history = to_normal(fixed, name)
        assert not history.pairs.unanswered
        assert not history.pairs.orphans
        # No word of the user or the model is lost.
        before, after = to_normal(obj, name), history
        words = [b.text for m in before for b in m.blocks if b.kind == "text" and b.text.isalpha()]
        kept = [b.text for m in after for b in m.blocks if b.kind == "text" and b.text.isalpha()]
        assert kept == words

    check()


@given(any_history)
def test_cuts_of_any_repaired_history_never_part_a_call_from_its_result(messages):
    fixed, _ = repair(messages, "anthropic")
    history = to_normal(fixed, "anthropic")
    for cut in history.cuts[:-1]:
        tail = to_normal(fixed[cut:], "anthropic")
        assert not tail.pairs.orphans
        head = to_normal(fixed[:cut], "anthropic")
        assert not head.pairs.unanswered


# -- edits ------------------------------------------------------------------------------------


def test_compare_reports_what_an_edit_broke():
    request = {"system": "s", "messages": [*GOOD, assistant(said("done")), user("again")]}
    before = to_normal(request)
    counter = CharCounter()
    masked = edit.mask(before, dict.fromkeys(before.find("tool_result"), "-"))
    assert compare(before, masked, counter) == []
    grown = edit.mask(before, dict.fromkeys(before.find("tool_result"), "long " * 9))
    assert [v.code for v in compare(before, grown, counter)] == ["I13"]
    other = to_normal({**request, "system": "t"})
    assert [v.code for v in compare(before, other)] == ["I6"]
    torn = to_normal({**request, "messages": request["messages"][:2]})
    assert {v.code for v in compare(before, torn)} >= {"I3", "I2"}
    silent = edit.drop_groups(before, [0, 3])
    assert "I7" in {v.code for v in compare(before, silent)}


def test_compare_reports_touched_thinking_of_the_latest_turn():
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    obj = [user("go"), assistant(thought, call("a")), user(result("a"))]
    before = to_normal(obj, "anthropic")
    after = edit.drop_blocks(before, [(1, 0)])
    assert [v.code for v in compare(before, after)] == ["I4"]
    older = to_normal([*obj, assistant(said("ok")), user("next")], "anthropic")
    assert compare(older, edit.drop_blocks(older, [(1, 0)])) == []


def test_prefix_same_and_budget_checks():
    assert check_prefix(GOOD[:2], GOOD) == []
    assert [v.index for v in check_prefix(GOOD, [GOOD[0], GOOD[2]])] == [1]
    assert check_same(GOOD, copy.deepcopy(GOOD)) == []
    assert [v.code for v in check_same(GOOD, GOOD[:1], "I14")] == ["I14"]
    assert check_budget(10, 10) == []
    assert [v.code for v in check_budget(11, 10)] == ["I12"]


def test_an_edit_that_would_break_an_atom_raises_and_changes_nothing():
    history = to_normal([*GOOD, assistant(said("done")), user("again")], "anthropic")
    with pytest.raises(HistoryError):
        edit.drop_messages(history, [1])
    with pytest.raises(HistoryError):
        edit.replace_span(history, 2, 4, "summary")
    with pytest.raises(HistoryError):
        edit.mask(history, {(2, 0): ""})
    with pytest.raises(HistoryError):
        edit.truncate(history, (1, 0), 5)
    with pytest.raises(HistoryError):
        edit.drop_blocks(history, [(2, 0)])
    assert [m.role for m in edit.drop_groups(history, [1])] == ["user", "assistant", "user"]


def test_breakpoint_of_a_dropped_or_masked_part_moves_to_the_last_kept_block_before():
    mark = {"cache_control": {"type": "ephemeral"}}
    obj = [
        user("go"),
        assistant(call("a")),
        user({**result("a"), **mark}),
        assistant(said("x")),
        user("y"),
    ]
    history = to_normal(obj, "anthropic")
    masked = edit.mask(history, {(2, 0): "gone"})
    assert [masked.block(at).cache_control for at in [(1, 0), (2, 0)]] == [
        mark["cache_control"],
        None,
    ]
    assert from_normal(masked)[1]["content"][0]["cache_control"] == mark["cache_control"]
    dropped = from_normal(edit.drop_groups(history, [1]))
    assert dropped[0]["content"] == [{**said("go"), **mark}]
    assert codes(dropped) == []
