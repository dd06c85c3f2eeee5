import copy
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevict.agent import edit
from kvevict.agent.formats import Reader, detect, format_names, from_normal, get_format, to_normal
from kvevict.errors import HistoryError

# -- generated histories ----------------------------------------------------------------------

text = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
ids = st.from_regex(r"[a-z0-9_]{1,8}", fullmatch=True)
scalars = st.none() | st.booleans() | st.integers(-9, 9) | text
values = st.recursive(
    scalars, lambda v: st.lists(v, max_size=2) | st.dictionaries(ids, v, max_size=2), max_leaves=4
)
objects = st.dictionaries(ids, values, max_size=3)
cache = st.sampled_from([{}, {}, {"cache_control": {"type": "ephemeral"}}])


def merged(*parts):
    return st.tuples(*(p if isinstance(p, st.SearchStrategy) else st.just(p) for p in parts)).map(
        lambda dicts: {k: v for d in dicts for k, v in d.items()}
    )


def fixed(**fields):
    return st.fixed_dictionaries(
        {k: v if isinstance(v, st.SearchStrategy) else st.just(v) for k, v in fields.items()}
    )


a_text = merged(fixed(type="text", text=text), cache)
a_image = fixed(type="image", source=fixed(type="base64", media_type="image/png", data=text))
a_document = fixed(type="document", source=fixed(type="text", data=text), title=text)
a_result = merged(
    fixed(type="tool_result", tool_use_id=ids),
    st.one_of(
        st.just({}),
        fixed(content=text),
        fixed(content=st.lists(a_text | a_image, max_size=2), is_error=st.booleans()),
    ),
    cache,
)
a_assistant = st.one_of(
    a_text,
    fixed(type="thinking", thinking=text, signature=text),
    fixed(type="redacted_thinking", data=text),
    merged(fixed(type="tool_use", id=ids, name=ids, input=objects), cache),
    fixed(type="server_tool_use", id=ids, name=ids, input=objects),
    fixed(type="web_search_tool_result", tool_use_id=ids, content=st.lists(objects, max_size=2)),
    fixed(type="compaction", content=text | st.none()),
)
anthropic_message = st.one_of(
    fixed(role="user", content=text | st.lists(a_text | a_image | a_document | a_result)),
    fixed(role="assistant", content=text | st.lists(a_assistant, max_size=4)),
)
anthropic = st.lists(anthropic_message, max_size=6)
anthropic_request = merged(
    fixed(model=text),
    st.one_of(st.just({}), fixed(system=text), fixed(system=st.lists(a_text, max_size=2))),
    fixed(messages=anthropic, tools=st.lists(fixed(name=ids, input_schema=objects), max_size=2)),
    fixed(max_tokens=st.integers(1, 9)),
)

c_part = st.one_of(
    a_text,
    fixed(type="image_url", image_url=fixed(url=text)),
    fixed(type="input_audio", input_audio=fixed(data=text, format="wav")),
)
c_call = fixed(id=ids, type="function", function=fixed(name=ids, arguments=objects.map(json.dumps)))
c_content = text | st.lists(c_part, max_size=3)
chat_message = st.one_of(
    fixed(role=st.sampled_from(["system", "developer", "user"]), content=c_content),
    merged(
        fixed(role="assistant", content=st.none() | c_content),
        st.one_of(st.just({}), fixed(reasoning_content=text)),
        st.one_of(st.just({}), fixed(tool_calls=st.lists(c_call, min_size=1, max_size=2))),
    ),
    fixed(role="tool", tool_call_id=ids, content=text | st.lists(a_text, max_size=2)),
)
chat = st.lists(chat_message, max_size=6)

r_item = st.one_of(
    fixed(role="user", content=text),
    fixed(type="message", role="assistant", content=st.lists(fixed(type="output_text", text=text))),
    fixed(type="message", role="user", content=st.lists(fixed(type="input_text", text=text))),
    fixed(type="function_call", call_id=ids, name=ids, arguments=objects.map(json.dumps)),
    fixed(type="function_call_output", call_id=ids, output=text),
    fixed(type="custom_tool_call", call_id=ids, name=ids, input=text),
    fixed(type="custom_tool_call_output", call_id=ids, output=text),
    fixed(type="local_shell_call", call_id=ids, action=fixed(type="exec", command=st.lists(text))),
    fixed(type="local_shell_call_output", id=ids, output=text),
    fixed(type="reasoning", summary=st.just([]), encrypted_content=text),
    fixed(type="item_reference", id=ids),
    fixed(type="compaction", encrypted_content=text),
    fixed(type="web_search_call", id=ids, status="completed"),
)
responses = st.lists(r_item, max_size=6)

h_call = st.one_of(
    fixed(type="function", function=fixed(name=ids, arguments=objects)),
    fixed(name=ids, arguments=objects),
    fixed(type="function", id=ids, function=fixed(name=ids, arguments=objects)),
)
hf_message = st.one_of(
    fixed(role=st.sampled_from(["system", "user"]), content=text),
    merged(
        fixed(role="assistant", content=text),
        st.one_of(st.just({}), fixed(tool_calls=st.lists(h_call, min_size=1, max_size=2))),
    ),
    fixed(role="tool", name=ids, content=text | objects),
)
hf = st.lists(hf_message, max_size=6)

GENERATED = {
    "anthropic": anthropic | anthropic_request,
    "openai-chat": chat | fixed(model=text, messages=chat, tools=st.just([])),
    "openai-responses": responses | fixed(instructions=text, input=responses | text),
    "hf": hf,
}


@pytest.mark.parametrize("name", sorted(GENERATED))
def test_generated_history_comes_back_byte_for_byte(name):
    @given(GENERATED[name])
    def check(obj):
        before = json.dumps(obj)
        history = to_normal(obj, name)
        assert json.dumps(from_normal(history)) == before
        assert json.dumps(obj) == before  # not mutated
        # The same when every message counts as edited and is put together from its parts.
        again = replace(history, messages=tuple(replace(m, source=None) for m in history.messages))
        assert json.dumps(from_normal(again)) == before

    check()


def test_recorded_session_comes_back_byte_for_byte(trajectory):
    obj, name = trajectory
    assert detect(obj) == name
    assert json.dumps(from_normal(to_normal(obj))) == json.dumps(obj)


def test_recorded_session_is_written_in_every_format_with_its_pairs(trajectory):
    obj, _ = trajectory
    history = to_normal(obj)
    for name in ("anthropic", "openai-chat", "openai-responses", "hf", "pi", "claude-code"):
        other = to_normal(from_normal(history, name), name)
        assert len(other.pairs.orphans) == 0
        assert len(other.pairs.unanswered) == len(history.pairs.unanswered)
        assert len(other.users) >= len(history.users)
        for kind in ("tool_result",):
            old = [history.block(at).text for at in history.find(kind) if history.block(at).call_id]
            assert [other.block(at).text for at in other.find(kind)][: len(old)] == old


def test_edited_parts_change_and_the_others_stay_the_very_bytes(trajectory):
    obj, _ = trajectory
    history = to_normal(obj)
    at = history.find("tool_result")[:2]
    masked = edit.mask(history, dict.fromkeys(at, "[cleared]"))
    before, after = from_normal(history), from_normal(masked)
    assert json.dumps(from_normal(to_normal(after))) == json.dumps(after)
    read = to_normal(after)
    assert len(read) == len(history)
    for m, (old, new) in enumerate(zip(history.messages, read.messages, strict=True)):
        if m in {a for a, _ in at}:
            changed = [b.text for b in new.answers]
            assert "[cleared]" in changed
            assert [b.call_id for b in new.answers] == [b.call_id for b in old.answers]
        else:
            assert json.dumps(new.raw) == json.dumps(old.raw)
    assert len(json.dumps(after)) < len(json.dumps(before))


@pytest.mark.parametrize("name", ["anthropic", "openai-chat", "openai-responses", "hf", "pi"])
def test_emptied_tool_input_stays_a_json_object(name):
    history = to_normal(from_normal(to_normal(TOOLS, "anthropic"), name), name)
    emptied = edit.empty_input(history, history.find("tool_use"))
    read = to_normal(from_normal(emptied), name)
    assert [json.loads(read.block(at).text) for at in read.find("tool_use")] == [{}, {}]
    assert not read.pairs.unanswered


TOOLS = [
    {"role": "user", "content": "go"},
    {
        "role": "assistant",
        "content": [
            {"type": "tool_use", "id": "a", "name": "read", "input": {"path": "x"}},
            {"type": "tool_use", "id": "b", "name": "read", "input": {"path": "y"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": "one"},
            {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "2"}]},
        ],
    },
    {"role": "assistant", "content": "done"},
]


def test_request_keeps_key_order_system_and_tools():
    request = {"tools": [{"name": "read", "input_schema": {}}], "messages": TOOLS, "system": "s"}
    history = to_normal(request)
    assert history.format == "anthropic"
    assert history.system[0].text == "s"
    assert len(history.tools) == 1
    assert list(from_normal(history)) == ["tools", "messages", "system"]


def test_system_prompt_and_tools_survive_a_change_of_format():
    request = {"system": "be kind", "tools": [{"name": "read", "input_schema": {"type": "object"}}]}
    chat = from_normal(to_normal({**request, "messages": TOOLS}), "openai-chat")
    assert chat["messages"][0] == {"role": "system", "content": "be kind"}
    assert chat["tools"][0]["function"]["name"] == "read"
    back = from_normal(to_normal(chat, "openai-chat"), "anthropic")
    assert back["system"] == "be kind"
    assert back["tools"] == [
        {"name": "read", "description": "", "input_schema": {"type": "object"}}
    ]


def test_media_never_become_text_and_are_found_at_any_depth():
    data = "QUJD" * 1000
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    history = to_normal(
        [
            {"role": "user", "content": [image]},
            TOOLS[1],
            {"role": "user", "content": [{**TOOLS[2]["content"][0], "content": [image]}]},
        ],
        "anthropic",
    )
    blocks = [b for m in history for b in m.blocks if b.media]
    assert [b.media for b in blocks] == [("image",), ("image",)]
    assert all(data not in b.text for b in blocks)


@pytest.mark.parametrize(
    ("obj", "name", "index", "path"),
    [
        ([{"role": "wizard", "content": "x"}], "anthropic", 0, "messages[0].role"),
        (
            [{"role": "user", "content": [{"type": "hologram"}]}],
            "anthropic",
            0,
            "messages[0].content[0].type",
        ),
        ([{"role": "user", "content": 7}], "anthropic", 0, "messages[0].content"),
        (
            [{"role": "assistant", "content": [{"type": "tool_use", "name": "x"}]}],
            "anthropic",
            0,
            "messages[0].content[0].id",
        ),
        (
            [{"role": "user", "content": "x"}, {"role": "tool", "content": "y"}],
            "openai-chat",
            1,
            "messages[1].tool_call_id",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "x"}}]}],
            "openai-chat",
            0,
            "messages[0].tool_calls[0].id",
        ),
        ([{"type": "teleport_call"}], "openai-responses", 0, "input[0].type"),
        (
            [{"type": "session"}, {"type": "message", "message": {"role": "ghost"}}],
            "pi",
            0,
            "entries[1].message.role",
        ),
        (["hello"], "anthropic", 0, "messages[0]"),
        ({"messages": "hello"}, "anthropic", None, "messages"),
        (7, "openai-chat", None, ""),
    ],
)
def test_unreadable_part_raises_with_index_and_path(obj, name, index, path):
    with pytest.raises(HistoryError) as caught:
        to_normal(obj, name)
    assert (caught.value.index, caught.value.path) == (index, path)


def test_unknown_role_is_pointed_at_even_where_no_format_is_named():
    with pytest.raises(HistoryError, match="known: system") as caught:
        to_normal([{"role": "user", "content": "x"}, {"role": "wizard", "content": "y"}])
    assert (caught.value.index, caught.value.path) == (1, "messages[1].role")


@pytest.mark.parametrize("obj", [None, 7, "x", {}, {"a": 1}])
def test_unrecognised_object_raises_and_names_the_formats(obj):
    with pytest.raises(HistoryError, match="anthropic"):
        to_normal(obj)


def test_deep_nesting_raises_instead_of_crashing():
    deep: dict = {}
    for _ in range(100_000):
        deep = {"x": deep}
    call = {"type": "tool_use", "id": "a", "name": "t", "input": deep}
    with pytest.raises(HistoryError):
        to_normal([{"role": "user", "content": "x"}, {"role": "assistant", "content": [call]}])
    while deep:  # taken apart by hand: the interpreter frees deep objects recursively
        deep = deep.pop("x", {})


def test_reader_takes_over_what_did_not_change_and_sees_what_did():
    messages = copy.deepcopy(TOOLS)
    reader = Reader("anthropic")
    first = reader.read(messages)
    messages.append({"role": "user", "content": "more"})
    second = reader.read(messages)
    assert all(a is b for a, b in zip(first.messages, second.messages, strict=False))
    messages[0]["content"] = "changed in place"
    third = reader.read(messages)
    assert third.messages[0].text == "changed in place"
    assert third.messages[1] is second.messages[1]
    assert json.dumps(from_normal(third)) == json.dumps(messages)
    parsed = json.loads(json.dumps(messages))
    assert reader.read(parsed).messages[1] is second.messages[1]


def test_sub_agent_entries_stay_out_of_the_history_and_in_the_log():
    log = [
        {"type": "user", "sessionId": "s", "message": {"role": "user", "content": "go"}},
        {
            "type": "user",
            "sessionId": "s",
            "isSidechain": True,
            "message": {"role": "user", "content": "sub"},
        },
        {"type": "system", "subtype": "compact_boundary", "compactMetadata": {"preTokens": 9}},
        {
            "type": "user",
            "sessionId": "s",
            "isCompactSummary": True,
            "message": {"role": "user", "content": "sum"},
        },
        {
            "type": "assistant",
            "message": {
                "role": "assistant",
                "id": "m",
                "content": "ok",
                "usage": {"input_tokens": 3},
            },
        },
    ]
    history = to_normal(log)
    assert [m.text for m in history] == ["go", "sum", "ok"]
    assert [(e.kind, e.tokens_before) for e in history.events] == [
        ("sidechain", None),
        ("compaction", 9),
    ]
    assert [m.typed for m in history] == [True, False, False]
    assert from_normal(history) == log


def test_every_format_answers_for_an_empty_list():
    for name in format_names():
        if not get_format(name).detect([]):
            continue
        assert from_normal(to_normal([], name)) == []
