"""Known inputs with one right answer, most from public reports (facts, agents.md 4 and 5.7)."""

import copy
import json

import pytest

from kvevict.agent import memory
from kvevict.agent.advise import advise
from kvevict.agent.choosing import CLEARED
from kvevict.agent.examples import login_bug, random_history
from kvevict.agent.formats import to_normal
from kvevict.agent.history import THINKING_KINDS
from kvevict.agent.manager import HistoryManager
from kvevict.agent.message_policy import (
    Context,
    Limits,
    Moment,
    Services,
    message_policies,
    parse_message_policy,
)
from kvevict.agent.policies.memgpt import WARNING
from kvevict.agent.validate import common_prefix, validate
from kvevict.errors import BudgetError, PolicyError

POLICIES = sorted(message_policies())
WORDS = 3  # characters a token


def user(text):
    return {"role": "user", "content": text}


def steps(count, size=300, tool="Read", first=0, text=True):
    """Return `count` steps of a model: a call and its result of `size` tokens."""
    out = []
    for n in range(first, first + count):
        call = {"type": "tool_use", "id": f"c{n}", "name": tool, "input": {"path": f"f{n}.py"}}
        said = [{"type": "text", "text": f"step {n}"}] if text else []
        out.append({"role": "assistant", "content": [*said, call]})
        result = {
            "type": "tool_result",
            "tool_use_id": f"c{n}",
            "content": f"{n:05d} " * (size // 2),
        }
        out.append({"role": "user", "content": [result]})
    return out


def results(messages):
    """Return the content of every tool result, in order."""
    return [
        b["content"]
        for m in messages
        if isinstance(m["content"], list)
        for b in m["content"]
        if b["type"] == "tool_result"
    ]


def texts(messages):
    return [
        m["content"] if isinstance(m["content"], str) else m["content"][0].get("text", "")
        for m in messages
    ]


def prepare(policy, messages, **kwargs):
    return HistoryManager(policy, **kwargs).prepare(messages)


# 1 and 2: orphans --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_langchain_38352_no_orphan_is_kept(policy):
    messages = [
        {"role": "user", "content": "go " * 300},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "b", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "an orphan " * 300},
        {"role": "tool", "tool_call_id": "b", "content": "b " * 300},
        {"role": "user", "content": "on"},
    ]
    try:
        prepared = prepare(policy, messages, format="openai-chat", window=900, max_output=100)
    except BudgetError:
        return
    assert validate(prepared.messages, "openai-chat") == []
    assert "orphan" not in json.dumps(prepared.messages)


@pytest.mark.parametrize("policy", ["langchain_trim", "window", "streaming_llm", "h2o", "random"])
def test_budget_of_two_messages_keeps_system_and_user_or_names_the_floor(policy):
    messages = [
        {"role": "system", "content": "s" * 30},
        {"role": "user", "content": "u" * 30},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "t" * 300},
        {"role": "assistant", "content": "done " * 10},
        {"role": "user", "content": "v" * 30},
    ]
    prepared = prepare(policy, messages, format="openai-chat", window=60, max_output=20)
    roles = [m["role"] for m in prepared.messages]
    assert roles[0] == "system"
    assert "user" in roles
    assert "tool" not in roles
    messages[1]["content"] = messages[5]["content"] = "u" * 300
    with pytest.raises(BudgetError, match="roots") as raised:
        prepare(policy, messages, format="openai-chat", window=60, max_output=20)
    assert raised.value.floor_tokens > 100


# 3, 4, 5, 8: what never happens ------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_the_only_user_message_survives_forty_tool_turns(policy):
    messages = [user("fix the login, never touch prod"), *steps(40)]
    manager = HistoryManager(policy, window=8_000, max_output=1_000)
    prepared = manager.prepare(messages)
    assert any("never touch prod" in text for text in texts(prepared.messages))
    assert validate(prepared.messages, "anthropic") == []


@pytest.mark.parametrize("policy", POLICIES)
def test_history_of_system_messages_alone_is_unchanged(policy):
    messages = [{"role": "system", "content": f"rule {n} " * 50} for n in range(6)]
    prepared = prepare(policy, messages, format="openai-chat", window=1_000, max_output=10)
    assert prepared.messages == messages


@pytest.mark.parametrize("policy", POLICIES)
def test_image_costs_the_same_at_any_depth_and_compacts_nothing(policy):
    image = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": "A" * 4_000_000},
    }
    call = {"type": "tool_use", "id": "a", "name": "shot", "input": {}}
    top = [user("look"), {"role": "user", "content": [image]}]
    nested = [
        user("look"),
        {"role": "assistant", "content": [call]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "a", "content": [image]}],
        },
    ]
    a, b = prepare(policy, top), prepare(policy, nested)
    assert a.messages == top
    assert b.messages == nested
    assert abs(a.report.tokens - b.report.tokens) < 10


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("window", "output"), [(8_000, 8_000), (8_000, 20_000), (200_000, 190_000)]
)
def test_nothing_is_compacted_on_hi(policy, window, output):
    asked = []
    manager = HistoryManager(
        policy, window=window, max_output=output, summarizer=lambda m, b: asked.append(1) or "x"
    )
    assert manager.prepare([user("hi")]).messages == [user("hi")]
    assert not asked


def test_opencode_with_an_input_limit_below_the_reserve_never_compacts():
    messages = [user("a " * 500), *steps(5)]
    policy = "opencode_compact:limit_input=100"
    assert prepare(policy, messages, window=50_000).messages == messages


# 6: at least or nothing --------------------------------------------------------------------------


def test_anthropic_clear_at_least_means_at_least_or_nothing():
    messages = [user("go"), *steps(10, 1_000)]
    policy = "anthropic_clear_tool_uses:trigger=5000,keep=3,clear_at_least={}"
    prepared = prepare(policy.format(1_000_000), messages)
    assert json.dumps(prepared.messages) == json.dumps(messages)
    assert not prepared.report.stages
    assert prepared.report.actions[0].why.startswith("would free")
    freed = prepare(policy.format(1), messages).report.freed_tokens
    assert prepare(policy.format(freed), messages).report.freed_tokens == freed
    assert prepare(policy.format(freed + 1), messages).report.freed_tokens == 0


def test_langchain_clear_at_least_means_stop_after():
    messages = [user("go"), *steps(10, 1_000)]
    unreachable = prepare("langchain_clear:trigger=5000,keep=3,clear_at_least=1000000", messages)
    assert results(unreachable.messages)[:7] == ["[cleared]"] * 7
    some = prepare("langchain_clear:trigger=5000,keep=3,clear_at_least=1500", messages)
    assert results(some.messages).count("[cleared]") == 2


# 7 and 9: loops and failures ---------------------------------------------------------------------


@pytest.mark.parametrize("policy", [p for p in POLICIES if not p.startswith("codex_local")])
def test_incompressible_message_names_the_floor_without_asking_a_model(policy):
    asked = []
    messages = [user("x" * 300_000), *steps(3)]
    manager = HistoryManager(
        policy, window=60_000, max_output=8_000, summarizer=lambda m, b: asked.append(1) or "short"
    )
    for _ in range(3):
        with pytest.raises(BudgetError) as raised:
            manager.prepare(messages)
        assert raised.value.floor_tokens >= 100_000
    assert len(asked) <= 1


def test_large_root_below_the_window_does_not_compact_every_call():
    asked = []

    def summarizer(messages, budget):
        asked.append(1)
        return "short"

    messages = [user("x" * 270_000)]  # 90k tokens: above usable (72k), below W - O
    policy = "opencode_compact:tail_least=0,tail_most=10"
    manager = HistoryManager(policy, window=120_000, max_output=24_000, summarizer=summarizer)
    for n in range(20):
        messages += steps(1, 200, first=n)
        manager.prepare(messages)
    assert 1 <= len(asked) <= 2


def failing(kind):
    def summarizer(messages, budget):
        if kind == "raises":
            raise RuntimeError("down")
        return {"empty": "", "none": None, "longer": "x" * 10**6, "cut": ("half", False)}[kind]

    return summarizer


SUMMARISING = [
    "claude_code:collapse_at=1",
    "codex_local",
    "codex_remote",
    "opencode_compact",
    "anthropic_compact:trigger=50000",
    "memgpt:flush=0.5",
    "letta_sliding",
    "complexity_trap_summary:n=3,m=2",
    "complexity_trap_hybrid:n=3,m=20",
    "acon",
    "roo:condense=true",
    "pi",
    "shape:mask_at=1",
]


@pytest.mark.parametrize("kind", ["raises", "empty", "none", "longer", "cut"])
@pytest.mark.parametrize("policy", SUMMARISING)
def test_failed_summary_changes_nothing_counts_and_stops_at_three(policy, kind):
    messages = [
        user("go"),
        *[
            m
            for n in range(40)
            for m in ({"role": "assistant", "content": f"thought {n} " * 150}, user(f"and {n}"))
        ],
    ]
    messages += steps(8, 300, tool="think", first=100)
    asked = []
    inner = failing(kind)

    def summarizer(request, budget):
        asked.append(1)
        return inner(request, budget)

    total = HistoryManager("full").prepare(messages).report.tokens
    window = 60_000 if "anthropic" in policy else round(total * 1.05)
    output = 1_000 if "anthropic" in policy else round(total * 0.04)
    counter = 0.8 if "anthropic" in policy else None
    manager = HistoryManager(policy, "anthropic", window, output, counter, summarizer)
    before = json.dumps(messages)
    for n in range(1, 4):
        prepared = manager.prepare(messages)
        if prepared.report.failures != n:  # not due, or two failures in one call
            break
        if not policy.startswith(("roo", "memgpt")) and n < 3:
            assert json.dumps(prepared.messages) == before
        messages = [*messages, {"role": "assistant", "content": "ok"}, user("go on")]
        before = json.dumps(messages)
    count = len(asked)
    assert 1 <= count <= 3
    for _ in range(3):
        messages = [*messages, {"role": "assistant", "content": "ok"}, user("go on")]
        manager.prepare(messages)
    assert len(asked) <= 3
    assert manager.state["failures"] == len(asked)


def test_failure_counter_is_reset_by_a_success():
    answers = iter(["", "", "a good summary", "", ""])
    manager = HistoryManager(
        "codex_local", window=4_000, max_output=100, summarizer=lambda m, b: next(answers)
    )
    messages = [user("go")]
    seen = []
    for n in range(5):
        messages += [{"role": "assistant", "content": "word " * 3_000}, user(f"on {n}")]
        seen.append(manager.prepare(messages).report.failures)
        if n == 2:
            manager.compact()
    assert seen[:3] == [1, 2, 0]
    assert seen[3] == 1


def test_after_three_failures_old_results_are_cut_and_no_model_is_asked():
    asked = []
    manager = HistoryManager(
        "pi:reserve=2000,tail=500",
        window=10_000,
        max_output=500,
        summarizer=lambda m, b: asked.append(1) or "",
    )
    messages = [user("go"), *steps(3, 3_000)]
    for n in range(6):
        messages += steps(1, 900, first=10 + n)
        prepared = manager.prepare(messages)
    assert len(asked) == 3
    assert "truncate_old_results" in manager.state["events"][0]["stages"]
    assert any("[truncated]" in text for text in results(prepared.messages))
    assert not prepared.report.over_window


# 12: thinking ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_thinking_of_the_latest_turn_is_byte_identical(policy):
    messages = [user("first task"), *steps(20), user("second task")]
    for n in range(3):
        block = {"type": "thinking", "thinking": f"secret {n}", "signature": f"sig{n}"}
        call = {"type": "tool_use", "id": f"t{n}", "name": "Read", "input": {}}
        messages.append({"role": "assistant", "content": [block, call]})
        result = {"type": "tool_result", "tool_use_id": f"t{n}", "content": "r " * 200}
        messages.append({"role": "user", "content": [result]})
    prepared = prepare(policy, messages, window=5_000, max_output=500)
    kept = [
        b
        for m in to_normal(prepared.messages, "anthropic").messages
        for b in m.blocks
        if b.kind in THINKING_KINDS
    ]
    last = messages[-2]["content"][0]
    assert kept
    assert kept[-1].raw == last
    for block in kept:
        assert block.raw in [messages[i]["content"][0] for i in (-6, -4, -2)]


# 13: append-only on every trajectory -------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        "anthropic_clear_tool_uses:trigger=3000,clear_at_least=1000",
        "codex_local",
        "opencode_prune:protect=500,minimum=300",
        "shape:min_gain=500,results=3",
    ],
)
def test_requests_only_grow_between_evictions(policy, trajectory):
    recorded, format = trajectory
    history = to_normal(recorded, format)
    ends = [g.stop for g in history.groups if history.messages[g.stop - 1].role != "assistant"]
    ends = ends[:: max(1, len(ends) // 25)]
    manager = HistoryManager(policy, format=format, window=8_000, max_output=500)
    previous = None
    for end in ends:
        part = to_normal(recorded, format)
        part = type(part)(part.messages[:end], part.format, part.system, part.tools)
        try:
            prepared = manager.prepare(part)
        except BudgetError:
            continue
        if previous is not None and not any(a.done for a in prepared.report.actions):
            assert prepared.messages.messages[: len(previous)] == previous
            assert prepared.report.reused_prefix_tokens > 0
        previous = prepared.messages.messages


# 14: SWE-agent -----------------------------------------------------------------------------------


def test_swe_agent_elides_observations_minus_n_minus_one():
    messages = [user("the task"), *steps(12)]
    prepared = prepare("swe_agent_last_n:n=3", messages)
    elided = [r for r in results(prepared.messages) if r.startswith("Old environment output: (")]
    observations = 13  # with the instance template
    assert len(elided) == observations - 3 - 1
    assert elided[0] == "Old environment output: (1 lines omitted)"
    batch = results(prepare("swe_agent_last_n:n=3,polling=10", messages).messages)
    assert sum(r.startswith("Old environment") for r in batch) == 10 - 3 - 1


def test_swe_agent_polling_breaks_the_prefix_once_in_ten_calls():
    manager = HistoryManager("swe_agent_last_n:n=3,polling=10")
    messages, previous, breaks = [user("the task")], None, []
    for n in range(40):
        messages += steps(1, first=n)
        now = manager.prepare(messages).messages
        if previous is not None:
            breaks.append(common_prefix(previous, now) < len(previous))
        previous = now
    assert all(sum(breaks[n : n + 10]) <= 1 for n in range(len(breaks) - 9))
    assert sum(breaks) == 4


# 15: OpenCode ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("extra", "hidden"), [(0, False), (1, True)])
def test_opencode_prunes_only_beyond_twenty_thousand(extra, hidden):
    def result(n, tokens):
        call = {"type": "tool_use", "id": f"c{n}", "name": "read", "input": {}}
        body = {"type": "tool_result", "tool_use_id": f"c{n}", "content": "x" * (tokens * WORDS)}
        return [{"role": "assistant", "content": [call]}, {"role": "user", "content": [body]}]

    messages = [user("go"), *result(0, 20_000 + extra), *result(1, 20_000), *result(2, 20_000)]
    messages += [user("second"), *result(3, 9_000), user("third"), *result(4, 9_000)]
    prepared = prepare("opencode_prune", messages)
    assert (results(prepared.messages)[0] == CLEARED) is hidden
    assert prepared.report.freed_tokens == (20_000 + extra - 11 if hidden else 0)


def test_opencode_exempts_skills_stops_at_a_summary_and_restores():
    messages = [user("go"), *steps(3, 30_000, tool="skill"), *steps(5, 30_000, first=3)]
    messages += [user("second"), user("third")]
    manager = HistoryManager("opencode_prune", window=500_000)
    prepared = manager.prepare(messages)
    assert [r == CLEARED for r in results(prepared.messages)] == [False] * 3 + [True] * 4 + [False]
    assert set(manager.state["hidden"].values()) == {len(messages)}
    assert manager.restore(8) == [8]
    messages += [{"role": "assistant", "content": "ok"}, user("fourth")]
    assert len(manager.restore()) == 3
    shown = HistoryManager("full", state=manager.state).prepare(messages)
    assert shown.messages == messages


# 16: Codex ---------------------------------------------------------------------------------------


def test_codex_keeps_users_newest_first_and_puts_the_summary_last():
    messages = [user("a" * 45_000), {"role": "assistant", "content": "b" * 500_000}]
    messages += [user("c" * 30_000), {"role": "assistant", "content": "d" * 60_000}]
    manager = HistoryManager("codex_local", window=200_000)
    manager.compact()
    prepared = manager.prepare([*messages, user("go on")])
    said = texts(prepared.messages)
    assert [m["role"] for m in prepared.messages] == ["user"] * 4
    assert said[1:3] == ["c" * 30_000, "go on"]
    assert "tokens truncated…" in said[0]
    assert len(said[0]) <= (20_000 - 10_000 - 2) * WORDS
    assert said[0].startswith("aaa")
    assert said[0].endswith("aaa")
    assert said[3].startswith("Another language model started to solve this problem")


def test_codex_does_not_keep_its_earlier_summary_and_filters_wrappers():
    manager = HistoryManager("codex_local", window=3_000, max_output=100)
    messages = [user("<environment_context>\n/home</environment_context>"), user("the task")]
    for n in range(12):
        messages += [{"role": "assistant", "content": f"work {n} " * 200}, user(f"go {n}")]
        messages.append(user("<environment_context>\n/other</environment_context>"))
        prepared = manager.prepare(messages)
    said = texts(prepared.messages)
    assert sum(t.startswith("Another language model") for t in said) == 1
    assert len(manager.state["events"]) >= 2


def test_codex_clamps_its_limit_at_ninety_per_cent():
    limits = Limits(200_000, 32_000)
    assert parse_message_policy("codex_local").trigger_tokens(limits) == 180_000
    assert parse_message_policy("codex_local:limit=190000").trigger_tokens(limits) == 180_000
    assert parse_message_policy("codex_local:limit=100000").trigger_tokens(limits) == 100_000
    assert parse_message_policy("codex_local:trigger=199000").trigger_tokens(limits) == 180_000


# 17: MemGPT --------------------------------------------------------------------------------------


def context(view, window=1_000):
    services = Services(lambda *_: None)
    return Context(Limits(window, 100), services, Moment(len(view)), lambda m: 10, {})


def test_memgpt_cutoff_on_a_user_message_moves_on_by_one():
    chat = [m for n in range(8) for m in (user(f"u{n}"), {"role": "assistant", "content": f"a{n}"})]
    policy = parse_message_policy("memgpt:evict=0.5")
    view = to_normal([*chat, user("now")], "anthropic")  # 17 messages of 10 tokens
    assert view.messages[9].role == "assistant"
    assert policy.cutoff(view, context(view)) == 9  # more than 85 tokens: behind the ninth
    policy = parse_message_policy("memgpt:evict=0.55")
    assert view.messages[10].role == "user"
    assert policy.cutoff(view, context(view)) == 11


def test_memgpt_warns_once_flushes_and_pages_back():
    manager = HistoryManager("memgpt", window=2_000, max_output=200)
    messages = [user("My dog is called Rufus.")]
    warned = flushed = 0
    for n in range(30):
        messages += [{"role": "assistant", "content": f"noted {n} " * 30}, user(f"fact {n}")]
        prepared = manager.prepare(messages)
        warned += "warning" in prepared.report.stages
        flushed += "flush" in prepared.report.stages
        assert sum(t == WARNING for t in texts(prepared.messages)) <= 1
    assert warned
    assert flushed
    assert warned in (flushed, flushed + 1)
    assert not any("Rufus" in t for t in texts(prepared.messages)[1:])
    assert "Rufus" in manager.recall.page_in("dog")


# systems in detail -------------------------------------------------------------------------------


def test_thresholds_of_the_systems():
    limits = Limits(200_000, 32_000)
    known = {
        "claude_code": 167_000,
        "claude_code:capacity=0.95": 190_000,
        "codex_local": 180_000,
        "codex_remote": 180_000,
        "opencode_compact": 148_000,
        "anthropic_clear_tool_uses": 100_000,
        "anthropic_compact": 150_000,
        "gemini_compress": 100_000,
        "pi": 183_616,
        "roo": 148_000,
        "cline_basic": 180_000,
        "claude_code:trigger=80%": 160_000,
    }
    found = {p: parse_message_policy(p).trigger_tokens(limits) for p in known}
    assert found == known
    assert parse_message_policy("claude_code").trigger_tokens(Limits(200_000, 8_000)) == 179_000
    with pytest.raises(PolicyError, match="minimum"):
        parse_message_policy("anthropic_compact:trigger=40000")


def test_anthropic_clearing_excludes_tools_and_empties_inputs_of_named_tools():
    messages = [user("go"), *steps(4, 500, "read"), *steps(4, 500, "bash", first=4)]
    messages += steps(4, 500, "keepme", first=8)
    policy = (
        "anthropic_clear_tool_uses:trigger=1000,keep=2,exclude_tools=bash,clear_tool_inputs=read"
    )
    out = prepare(policy, messages).messages
    cleared = [r == "[Tool result cleared to save context]" for r in results(out)]
    assert cleared == [True] * 4 + [False] * 4 + [True] * 2 + [False] * 2
    inputs = [
        b["input"]
        for m in out
        for b in m["content"]
        if isinstance(b, dict) and b["type"] == "tool_use"
    ]
    assert [i == {} for i in inputs] == [True] * 4 + [False] * 8


def test_anthropic_clearing_by_tool_uses_and_with_a_warning_first():
    messages = [user("go"), *steps(9, 500)]
    policy = "anthropic_clear_tool_uses:trigger=8,trigger_type=tool_uses,memory=true"
    manager = HistoryManager(policy)
    first = manager.prepare(messages)
    assert first.report.stages == ("memory_warning",)
    assert texts(first.messages)[-1] == memory.CLEARING_WARNING
    messages = [*messages, *steps(1, 500, first=9)]
    second = manager.prepare(messages)
    assert second.report.stages == ("clear_tool_uses",)
    assert common_prefix(first.messages, second.messages) < len(first.messages)
    assert manager.prepare(messages).messages == second.messages


def test_thinking_is_cleared_but_for_the_last_turns():
    messages = []
    for n in range(4):
        block = {"type": "thinking", "thinking": f"hm {n}", "signature": "s"}
        said = {"type": "text", "text": f"answer {n}"}
        messages += [user(f"q{n}"), {"role": "assistant", "content": [block, said]}]
    messages.append(user("q4"))

    def left(policy):
        out = prepare(policy, messages).messages
        return [
            b["thinking"]
            for m in out
            for b in m["content"]
            if isinstance(b, dict) and b["type"] == "thinking"
        ]

    assert left("anthropic_clear_thinking") == ["hm 3"]
    assert left("anthropic_clear_thinking:keep=3") == ["hm 1", "hm 2", "hm 3"]
    assert left("anthropic_clear_thinking:keep=all") == [f"hm {n}" for n in range(4)]


def test_server_compaction_is_taken_up_and_a_failed_one_is_not():
    done = {"role": "assistant", "content": [{"type": "compaction", "content": "all so far"}]}
    messages = [user("go"), *steps(5), user("more"), done, user("on")]
    prepared = prepare("anthropic_compact", messages)
    assert prepared.messages == [user("more"), done, user("on")]
    failed = copy.deepcopy(messages)
    failed[-2]["content"][0]["content"] = None
    assert prepare("anthropic_compact", failed).messages == failed


def test_openai_compaction_passes_through_and_prunes_before_the_item():
    item = {"type": "compaction", "encrypted_content": "gAAAA" * 100}
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "x" * 900},
        item,
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "on"}]},
    ]
    policy = parse_message_policy("openai_compact:compact_threshold=50000")
    assert policy.request_options() == {
        "context_management": [{"type": "compaction", "compact_threshold": 50_000}]
    }
    for name in ("openai_compact", "codex_remote"):
        out = prepare(name, items, format="openai-responses").messages
        assert item in out
        assert items[1] not in out
        assert out[-1] == items[-1]
    request = {"input": items, "previous_response_id": "resp_1", "model": "m"}
    assert prepare("openai_compact", request, format="openai-responses").messages == request


def test_remote_compaction_is_one_opaque_item():
    class Remote:
        opaque = True

        def __call__(self, messages, budget):
            return "ENCRYPTED"

    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "x" * 9_000}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "on"}]},
    ]
    manager = HistoryManager(
        "codex_remote", format="openai-responses", window=3_000, max_output=100, summarizer=Remote()
    )
    out = manager.prepare(items).messages
    assert out == [items[0], {"type": "compaction", "encrypted_content": "ENCRYPTED"}, items[2]]
    again = HistoryManager(
        "codex_remote",
        format="openai-responses",
        window=3_000,
        max_output=100,
        state=json.loads(json.dumps(manager.state)),
    )
    assert again.prepare(items).messages == out


def project(tmp_path):
    (tmp_path / ".claude" / "rules").mkdir(parents=True)
    (tmp_path / ".claude" / "skills" / "deploy").mkdir(parents=True)
    (tmp_path / "CLAUDE.md").write_text("Always use tabs.")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "CLAUDE.md").write_text("Nested rule.")
    (tmp_path / "src" / "a.py").write_text("print('now')")
    (tmp_path / ".claude" / "rules" / "style.md").write_text("Short lines.")
    (tmp_path / ".claude" / "rules" / "api.md").write_text(
        "---\npaths:\n  - src/api/**\n---\nScoped."
    )
    (tmp_path / ".claude" / "memory.md").write_text("The user is called Ada.")
    (tmp_path / ".claude" / "skills" / "deploy" / "SKILL.md").write_text("Deploy so. " * 5_000)
    return tmp_path


def worked(tmp_path):
    messages = [user("fix it, quote: KEEP-THIS-PHRASE")]
    for n, (tool, value) in enumerate(
        [
            ("Edit", {"file_path": "src/a.py"}),
            ("Skill", {"name": "deploy"}),
            ("Edit", {"file_path": "../../etc/passwd"}),
        ]
    ):
        call = {"type": "tool_use", "id": f"w{n}", "name": tool, "input": value}
        messages.append({"role": "assistant", "content": [call]})
        result = {"type": "tool_result", "tool_use_id": f"w{n}", "content": "done " * 100}
        messages.append({"role": "user", "content": [result]})
    return [
        *messages,
        {"role": "assistant", "content": "I must test next. " * 9_000},
        user("go on"),
    ]


def test_claude_code_injects_its_roots_again_from_disk(tmp_path):
    manager = HistoryManager("claude_code", resources=project(tmp_path))
    manager.compact("the API changes")
    prompts = []
    manager._summarizer = lambda m, b: prompts.append(m[-1]["content"]) or "the summary"
    said = "\n".join(texts(manager.prepare(worked(tmp_path)).messages))
    assert "This session is being continued" in said
    for text in ("Always use tabs.", "Short lines.", "Ada", "print('now')", "Deploy so."):
        assert text in said
    for text in ("Nested rule.", "Scoped.", "root:"):
        assert text not in said
    assert said.count("Deploy so.") < 5_000 * 3 / 11 + 10  # 5,000 tokens of a skill at most
    assert "Focus on: the API changes" in prompts[0]
    assert "9. Next step" in prompts[0]
    assert "verbatim" in prompts[0]


def test_claude_code_takes_session_memory_before_it_asks_a_model(tmp_path):
    notes = {"session_memory": "We fixed the clock.", "rules": "Tabs."}
    manager = HistoryManager(
        "claude_code",
        resources=lambda kind, name: notes.get(kind),
        summarizer=lambda m, b: pytest.fail("asked"),
    )
    manager.compact()
    said = "\n".join(texts(manager.prepare(worked(tmp_path)).messages))
    assert "We fixed the clock." in said
    assert "Tabs." in said


def test_claude_code_edits_from_the_tail_to_keep_the_prefix():
    messages = [user("go"), *steps(30, 1_000)]
    head = HistoryManager("claude_code", window=50_000, max_output=8_000)
    tail = HistoryManager("claude_code:edit_from=tail", window=50_000, max_output=8_000)
    a, b = head.prepare(messages).messages, tail.prepare(messages).messages
    first = {
        name: next(i for i, (x, y) in enumerate(zip(messages, out, strict=False)) if x != y)
        for name, out in (("head", a), ("tail", b))
    }
    assert first["head"] == 2
    assert first["tail"] > first["head"]
    assert [r == CLEARED for r in results(a)] == [True] * 27 + [False] * 3


def test_claude_code_stages_in_the_order_of_cost():
    names = [s.name for s in parse_message_policy("claude_code").stages()]
    assert names == ["snip", "microcompact", "collapse", "autocompact"]
    repeated = [user("go"), *steps(1, 900, text=False), *steps(1, 900, text=False, first=0)]
    for n, message in enumerate(repeated[3:]):
        for block in message["content"]:
            for key in ("id", "tool_use_id"):
                if key in block:
                    block[key] = f"again{n // 2}"
    manager = HistoryManager("claude_code:snip_at=0.1", window=15_000, max_output=100)
    prepared = manager.prepare(repeated)
    assert prepared.report.stages == ("snip",)
    assert prepared.messages == [repeated[0], *repeated[3:]]


def test_overflow_compacts_at_once_and_clear_starts_anew():
    messages = [user("go"), *steps(10), user("new task")]
    manager = HistoryManager("claude_code")
    manager.prepare(messages)
    manager.overflowed()
    compacted = manager.prepare(messages)
    assert compacted.report.stages == (
        "microcompact",
        "autocompact",
    ) or compacted.report.stages == ("autocompact",)
    manager.clear()
    messages = [*messages, user("something else")]
    assert manager.prepare(messages).messages == [user("something else")]


def test_overflow_of_a_policy_without_a_summary_still_frees():
    manager = HistoryManager("full")
    messages = [user("go"), *steps(10, 3_000)]
    before = manager.prepare(messages).report.tokens
    manager.overflowed()
    assert manager.prepare(messages).report.tokens < 0.8 * before


def test_complexity_trap_summarises_batches_and_feeds_no_summary_to_itself():
    spans = []

    def summarizer(messages, budget):
        spans.append([m["content"] for m in messages.span])
        return "summary"

    manager = HistoryManager("complexity_trap_summary:n=4,m=3", summarizer=summarizer)
    messages = [user("task")]
    for n in range(20):
        messages += steps(1, 200, first=n)
        out = manager.prepare(messages).messages
    assert len(spans) == 4
    assert all(len(span) == 8 for span in spans)
    assert not any("summary" in text for span in spans for text in span)
    assert sum("[Summary of the earlier steps]" in t for t in texts(out)) == 1


def test_complexity_trap_masks_all_but_ten_turns_and_keeps_every_action():
    messages = [user("task"), *steps(25)]
    out = prepare("complexity_trap_mask", messages).messages
    assert [r.startswith("Old environment") for r in results(out)] == [True] * 15 + [False] * 10
    assert out[1::2] == messages[1::2]


def test_gemini_masks_into_the_store_and_restores(tmp_path):
    messages = [user("go"), *steps(40, 3_000)]
    manager = HistoryManager("gemini_mask", store=tmp_path)
    prepared = manager.prepare(messages)
    masked = [r for r in results(prepared.messages) if r.startswith("<tool_output_masked>")]
    assert masked
    address = masked[0].split("kvevict-store:")[1].split(" ")[0]
    assert manager.store.get(address) == results(messages)[0]
    few = [user("go"), *steps(25, 3_000)]  # less than 30,000 tokens beyond the newest 50,000
    assert prepare("gemini_mask", few).messages == few


def test_gemini_compress_has_snapshot_acknowledgement_tail_and_truncates_after_one_failure():
    messages = []
    for n in range(20):
        messages += [
            user(f"question {n} " * 20),
            {"role": "assistant", "content": f"answer {n} " * 60},
        ]
    messages.append(user("last"))
    out = prepare("gemini_compress", messages, window=8_000, max_output=100).messages
    assert texts(out)[0].startswith("<state_snapshot>")
    assert out[1]["role"] == "assistant"
    assert texts(out)[1].startswith("Got it.")
    kept = sum(len(t) for t in texts(out)[2:]) / sum(len(t) for t in texts(messages))
    assert 0.2 < kept <= 0.31
    asked = []
    manager = HistoryManager(
        "gemini_compress",
        window=8_000,
        max_output=100,
        summarizer=lambda m, b: asked.append(1) or "",
    )
    for _ in range(4):
        messages = [*messages, {"role": "assistant", "content": "ok"}, user("on")]
        manager.prepare(messages)
    assert len(asked) == 1


def test_openhands_keeps_the_first_events_and_half_the_target():
    messages = [user("task")]
    for n in range(150):
        messages += [
            {"role": "assistant", "content": f"did {n} and found file{n}.py"},
            user(f"on {n}"),
        ]
    prepared = prepare("openhands", messages[:241])
    assert prepared.report.stages == ("condense",)
    assert prepared.messages[:2] == messages[:2]
    assert texts(prepared.messages)[2].startswith("<CONVERSATION SUMMARY>")
    assert len(prepared.messages) == 2 + 1 + 117
    assert prepare("openhands", messages[:239]).messages == messages[:239]


def test_letta_cuts_at_an_assistant_message():
    messages = []
    for n in range(20):
        messages += [user(f"q{n} " * 30), {"role": "assistant", "content": f"a{n} " * 30}]
    messages.append(user("now"))
    out = prepare("letta_sliding", messages, window=1_500, max_output=100).messages
    assert texts(out)[0].startswith("[Summary of the messages before]")
    assert out[1]["role"] == "assistant"
    assert out[1:] == messages[-len(out) + 1 :]


def test_roo_condenses_or_hides_half_and_never_the_first_message():
    messages = [user("task <command name='x'>run</command>")]
    for n in range(20):
        messages += [{"role": "assistant", "content": f"a{n} " * 40}, user(f"u{n} " * 40)]
    condensed = prepare("roo", messages, window=2_000, max_output=100).messages
    assert len(condensed) == 2
    assert "<command name='x'>run</command>" in texts(condensed)[0]
    hidden = prepare("roo:condense=false", messages, window=2_000, max_output=100).messages
    assert hidden[0] == messages[0]
    assert texts(hidden)[1].startswith("[Sliding window truncation: ")
    assert int(texts(hidden)[1].split()[3]) % 2 == 0


def test_cline_basic_asks_no_model_and_tells_what_was_done():
    messages = [user("task"), *steps(20), user("next thing"), *steps(1, 100, first=50)]
    out = prepare(
        "cline_basic",
        messages,
        window=6_500,
        max_output=100,
        summarizer=lambda m, b: pytest.fail("asked"),
    ).messages
    assert [m["role"] for m in out[:3]] == ["user"] * 3
    assert "Tools used: Read x2" in texts(out)[1]
    assert "- step 50" in texts(out)[1]
    assert texts(out)[2] == "next thing"


def test_pi_keeps_the_newest_tokens_and_cuts_at_no_result():
    messages = [user("task"), *steps(40, 900)]
    out = prepare("pi:tail=5000", messages, window=50_000, max_output=8_000).messages
    assert texts(out)[0].startswith("The conversation history before this point was compacted")
    tail = [m for m in out if m in messages and m["role"] == "assistant"]
    assert 4 <= len(tail) <= 8


def test_handoff_happens_only_by_hand():
    messages = [user("task"), *steps(5, tool="Edit")]
    manager = HistoryManager("amp_handoff", window=100_000)
    assert manager.prepare(messages).messages == messages
    manager.handoff("write the docs")
    messages = [*messages, {"role": "assistant", "content": "ok"}, user("go")]
    said = texts(manager.prepare(messages).messages)
    assert said[0].startswith("[Handoff from an earlier thread]\nGoal: write the docs")
    assert "Files: f0.py, f1.py" in said[0]


def test_shape_masks_what_can_be_had_again_and_stores_what_cannot():
    messages = [user("task"), *steps(10, 900, "read"), *steps(10, 900, "ask_colleague", first=10)]
    messages += steps(2, 900, first=30)
    manager = HistoryManager(
        "shape:results=2,min_gain=100,mask_at=0.1", window=60_000, max_output=5_000
    )
    prepared = manager.prepare(messages)
    assert prepared.report.stages == ("mask_recoverable", "store_long_lived")
    out = results(prepared.messages)
    assert out[:10] == [CLEARED] * 10
    assert manager.store.restore(out[10:20]) == results(messages)[10:20]


@pytest.mark.parametrize("seed", [None, *range(12)])
def test_shape_does_exactly_what_advise_advises(seed):
    messages = login_bug() if seed is None else random_history(seed, "openai-chat", 60)
    history = to_normal(messages, "openai-chat")
    advice = {(a.message, a.block): a for a in advise(history)}
    manager = HistoryManager(
        "shape:results=3,min_gain=1,mask_at=0.01,trigger=100%", "openai-chat", window=40_000
    )
    after = to_normal(manager.prepare(messages).messages, "openai-chat")
    assert len(after) == len(history)
    changed = {
        at: after.block(at).text
        for at in history.find("tool_result", "tool_use", "text")
        if after.block(at).text != history.block(at).text
    }
    for at, text in changed.items():
        verb = "externalise" if text.startswith("[Stored outside") else "mask"
        assert advice[at].verb == verb, advice[at].reasons
    for at, advised in advice.items():  # and all of it, where the edit makes it smaller
        if advised.verb in ("mask", "externalise") and advised.tokens > 100:
            assert at in changed or history.block(at).kind == "text"
    assert changed or seed is not None


def test_shape_empties_large_arguments_of_calls_that_have_their_result():
    messages = [user("task"), *steps(12, 30)]
    for message in messages[1::2]:
        message["content"][-1]["input"] = {"path": "a.py", "new": "x" * 6_000}
    manager = HistoryManager("shape:results=2,min_gain=100,mask_at=0.1,trigger=100%", window=60_000)
    prepared = manager.prepare(messages)
    inputs = [m["content"][-1]["input"] for m in prepared.messages[1::2]]
    assert inputs[:10] == [{}] * 10
    assert inputs[10:] == [m["content"][-1]["input"] for m in messages[21::2]]


def test_shape_keeps_lasting_rules_verbatim_and_files_them():
    rule = "From now on never touch the database. " * 20
    old = "Always answer in French. " * 300
    messages = [user("task"), *steps(5, 900), user(old), *steps(5, 900), user(rule)]
    messages += [
        *steps(40, 900, "ask_colleague", first=10),
        user("go on"),
        *steps(3, 900, first=60),
    ]
    manager = HistoryManager("shape:rules=500", window=30_000, max_output=2_000)
    prepared = manager.prepare(messages)
    assert "summarise_rest" in prepared.report.stages
    said = json.dumps(prepared.messages)
    assert user(rule) in prepared.messages
    assert user(old) not in prepared.messages
    assert "kvevict-store:" in said
    assert said.count("Always answer in French.") <= 8  # its beginning, and a quote
    held = json.dumps(manager.store.restore(prepared.messages))
    assert json.dumps(old)[1:-1] in held


def test_token_policies_are_the_very_same_keep():
    from kvevict.policies import H2O, Random, StreamingLLM, Window

    limits = Limits(10_000, 1_000, 100)
    assert parse_message_policy("streaming_llm:sinks=4,window=1020").vocabulary(
        limits
    ) == StreamingLLM(4, 1020)
    assert parse_message_policy("h2o:heavy=512,recent=512").vocabulary(limits) == H2O(512, 512)
    assert parse_message_policy("window:window=64").vocabulary(limits) == Window(64)
    assert parse_message_policy("random:budget=64,seed=1").vocabulary(limits) == Random(64, seed=1)
    assert parse_message_policy("window").vocabulary(limits) == Window(8_900)


def test_h2o_keeps_the_heavy_group_and_window_the_recent_ones():
    messages = [user("task")]
    for n in range(30):
        messages += [{"role": "assistant", "content": f"{n:04d}" * 25}, user(f"{n:04d}" * 25)]

    def scores(view):
        return [
            100.0 if m.text.startswith("0007") else float(i) / 1e3
            for i, m in enumerate(view.messages)
        ]

    h2o = HistoryManager("h2o:heavy=200,recent=400", scores=scores).prepare(messages).messages
    window = HistoryManager("window:window=600").prepare(messages).messages
    assert any(t.startswith("0007") for t in texts(h2o))
    assert not any(t.startswith("0007") for t in texts(window))
    assert texts(window)[-1].startswith("0029")


# the login bug -----------------------------------------------------------------------------------


def test_login_bug_under_three_systems_side_by_side():
    history = login_bug()
    claude = prepare("claude_code", history, format="openai-chat")
    assert len(claude.messages) == 26
    cleared = [i for i, m in enumerate(claude.messages, 1) if m["content"] == CLEARED]
    assert cleared == [5, 8]
    calls = [i for i, m in enumerate(claude.messages, 1) if m.get("tool_calls")]
    assert calls == [4, 7, 12, 20, 25]

    manager = HistoryManager("codex_local", format="openai-chat")
    manager.compact()
    codex = manager.prepare(history).messages
    assert [m["role"] for m in codex] == ["system", "user", "user", "user"]
    assert codex[:3] == [history[0], history[1], history[9]]
    assert codex[3]["content"].startswith("Another language model started")

    manager = HistoryManager(
        "opencode_prune:protect=3000,minimum=2000,turns=1", format="openai-chat"
    )
    pruned = manager.prepare(history)
    hidden = [i for i, m in enumerate(pruned.messages, 1) if m["content"] == CLEARED]
    assert hidden == [5]
    assert set(manager.state["hidden"]) == {"4"}
    manager.restore()
    assert (
        HistoryManager("full", format="openai-chat", state=manager.state).prepare(history).messages
        == history
    )

    manager = HistoryManager("opencode_compact", format="openai-chat")
    manager.compact()
    opencode = manager.prepare(history).messages
    assert opencode[0] == history[0]
    assert opencode[1]["content"] == "What did we do so far?"
    assert "## Goal" in opencode[2]["content"]
    assert opencode[-1]["role"] == "user"
    assert opencode[-1]["content"].endswith(history[9]["content"])


def test_claude_code_collapses_the_older_half_before_it_summarises_everything():
    asked = []
    messages = [user("go"), *steps(30, 1_000, tool="think"), user("on"), *steps(1, 100, first=90)]
    manager = HistoryManager(
        "claude_code:collapse_at=0.7,trigger=40000",
        summarizer=lambda m, b: asked.append(m[-1]["content"]) or "the older half",
    )
    prepared = manager.prepare(messages)
    assert prepared.report.stages == ("collapse",)
    assert len(asked) == 1
    said = texts(prepared.messages)
    assert said[0] == "go"
    assert said[1] == "[Collapsed part of the conversation]\nthe older half"
    assert prepared.messages[-3:] == messages[-3:]
