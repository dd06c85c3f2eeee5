import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevict.agent import edit
from kvevict.agent.advise import advise, totals
from kvevict.agent.examples import login_bug, random_history
from kvevict.agent.formats import from_normal, to_normal
from kvevict.agent.graphemes import cut_after, cut_before, is_boundary, shorten
from kvevict.agent.tokens import CharCounter, sizes
from kvevict.agent.validate import validate
from kvevict.errors import HistoryError
from kvevict.policies import Window

seeds = st.integers(0, 2**32)


def test_agent_side_loads_no_torch():
    code = (
        "import sys, kvevict.agent, kvevict.agent.cli, kvevict.agent.formats as f;"
        "f.format_names();"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]


@given(seeds)
def test_groups_cover_every_message_once_and_hold_every_pair(seed):
    history = to_normal(random_history(seed), "openai-chat")
    covered = [i for g in history.groups for i in range(g.start, g.stop)]
    assert covered == list(range(len(history)))
    for call, result in history.pairs.results.items():
        assert history.group_index[call[0]] == history.group_index[result[0]]
    assert history.cuts[-1] == len(history)
    assert [t.start for t in history.turns][1:] == [t.stop for t in history.turns][:-1]


@given(seeds, st.data())
def test_dropping_any_groups_leaves_a_sound_history(seed, data):
    history = to_normal(random_history(seed), "openai-chat")
    loose = [g for g, group in enumerate(history.groups) if group.start not in history.roots]
    gone = data.draw(st.sets(st.sampled_from(loose))) if loose else set()
    roots = {history.messages[i].raw["role"] for i in history.roots}
    left = edit.drop_groups(history, gone)
    assert roots <= {m.role for m in left}
    found = [v for v in validate(from_normal(left), "openai-chat") if v.code not in ("I5", "I7")]
    assert found == []
    kept = [g for g in range(len(history.groups)) if g not in gone]
    assert len(left) == sum(history.groups[g].stop - history.groups[g].start for g in kept)


@given(seeds, st.data())
def test_masking_keeps_every_call_and_place(seed, data):
    history = to_normal(random_history(seed), "openai-chat")
    results = history.find("tool_result")
    chosen = data.draw(st.sets(st.sampled_from(results))) if results else set()
    masked = edit.mask(history, dict.fromkeys(chosen, "[cleared]"))
    assert [m.role for m in masked] == [m.role for m in history]
    assert masked.pairs == history.pairs
    assert [masked.block(at).text for at in sorted(chosen)] == ["[cleared]"] * len(chosen)
    untouched = [i for i in range(len(history)) if i not in {m for m, _ in chosen}]
    assert all(masked.messages[i] is history.messages[i] for i in untouched)
    assert json.dumps(from_normal(to_normal(from_normal(masked)))) == json.dumps(
        from_normal(masked)
    )


def test_late_result_pulls_everything_up_to_its_call_into_one_group():
    items = [
        {"role": "user", "content": "go"},
        {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"},
        {"role": "user", "content": "wait"},
        {"type": "function_call_output", "call_id": "x", "output": "late"},
        {"role": "user", "content": "next"},
    ]
    history = to_normal(items)
    assert [(g.start, g.stop) for g in history.groups] == [(0, 1), (1, 4), (4, 5)]


def test_policy_of_the_token_side_keeps_whole_groups_of_messages():
    history = to_normal(login_bug(), "openai-chat")
    keep = Window(6_000).keep(history.slots(sizes(history, CharCounter())))
    assert keep[0]
    assert keep[9]  # roots: the system prompt and the last user message
    for group in history.groups:
        assert len({bool(k) for k in keep[group.start : group.stop]}) == 1


def test_protected_blocks_are_never_edited_or_dropped():
    from dataclasses import replace

    history = to_normal(login_bug(), "openai-chat")
    pinned = replace(history.block((4, 0)), protected=True)
    history = edit.with_blocks(history, {(4, 0): pinned})
    for attempt in (
        lambda: edit.mask(history, {(4, 0): "x"}),
        lambda: edit.truncate(history, (4, 0), 10),
        lambda: edit.drop_groups(history, [history.group_index[4]]),
        lambda: edit.replace_span(history, 3, 5, "summary"),
        lambda: edit.drop_messages(history, [0]),
    ):
        with pytest.raises(HistoryError):
            attempt()
    assert 4 in history.roots


def test_summary_takes_the_place_of_its_span():
    history = to_normal(login_bug(), "openai-chat")
    start, stop = history.cuts[3], history.cuts[8]
    short = edit.replace_span(history, start, stop, "what happened")
    assert short.messages[start].text == "what happened"
    assert from_normal(short)[start] == {"role": "user", "content": "what happened"}
    assert len(short) == len(history) - (stop - start) + 1
    assert not short.messages[start].typed
    with pytest.raises(HistoryError):
        edit.inserted("x", "system")


# -- graphemes ----------------------------------------------------------------------------------

pieces = st.sampled_from(
    [
        "a", "é", "e\u0301", "👍🏽", "👩‍👩‍👧", "🇩🇪", "🇫🇷", "한글", "\u1112\u1161\u11ab",
        "\r\n", "\n", " ",
        "नि", "क्ष", "ก็", "กำ", "x\u200d", "\ufe0f", "\ud83d", "\udc4d", "\U0001f468", "ﾊﾞ",
    ]
)  # fmt: skip
texts = st.lists(pieces | st.characters(), max_size=12).map("".join)


@given(texts, st.integers(0, 30))
def test_cut_never_falls_inside_a_character_that_a_reader_sees(text, at):
    regex = pytest.importorskip("regex")
    edges = {0, len(text)} | {m.end() for m in regex.finditer(r"\X", text)}
    for cut in (cut_before(text, at), cut_after(text, at)):
        assert is_boundary(text, cut)
        assert cut in edges
    assert cut_before(text, at) <= min(at, len(text)) <= max(cut_after(text, at), 0)


@given(texts, st.integers(1, 40), st.sampled_from(["head", "tail", "both"]))
def test_shortened_text_fits_and_keeps_its_ends(text, limit, keep):
    short = shorten(text, limit, "…", keep)
    assert len(short) <= limit or short == text
    if short != text:
        head, tail = short.split("…", 1) if text.count("…") == 0 else ("", "")
        assert text.startswith(head)
        assert text.endswith(tail)


def test_shorten_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="marker"):
        shorten("long text", 2, "[cut]")
    with pytest.raises(ValueError, match="head, tail or both"):
        shorten("x", 1, keep="middle")


# -- advice -------------------------------------------------------------------------------------


def test_every_block_gets_four_answers_with_reasons():
    history = to_normal(login_bug(), "openai-chat")
    found = advise(history)
    assert len(found) == sum(len(m.blocks) for m in history)
    assert all(len(a.reasons) == 5 and all(a.reasons) for a in found)
    by_place = {a.message: a for a in found}
    assert by_place[0].lifetime == "forever"
    assert by_place[4].verb == "mask"
    assert by_place[4].recoverable == 1.0
    assert not by_place[4].visible
    assert by_place[9].verb == "keep"
    assert by_place[25].break_even == 0.0  # nothing stands behind the last message
    assert by_place[4].break_even > by_place[12].break_even > 0
    assert sum(row["tokens"] for row in totals(found)) == sum(a.tokens for a in found)
    json.dumps([a.to_dict() for a in found])


def test_result_that_was_asked_for_again_is_stale():
    def call(i):
        return {
            "id": f"c{i}",
            "type": "function",
            "function": {"name": "x", "arguments": '{"p":1}'},
        }

    obj = [{"role": "user", "content": "always answer in French"}]
    for i in range(2):
        obj.append({"role": "assistant", "content": None, "tool_calls": [call(i)]})
        obj.append({"role": "tool", "tool_call_id": f"c{i}", "content": "text"})
    found = advise(to_normal(obj))
    assert found[0].lifetime == "forever"
    stale, fresh = (a for a in found if a.kind == "tool_result")
    assert (stale.recoverable, stale.lifetime) == (1.0, "turn")
    assert "again in message 3" in stale.reasons[0]
    assert fresh.recoverable < 1.0
