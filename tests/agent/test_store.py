import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevict.agent.store import Recall, Recalled, Store
from kvevict.errors import HistoryError


@pytest.fixture(params=["disk", "memory"])
def store(request, tmp_path):
    return Store(tmp_path / "texts" if request.param == "disk" else None)


@pytest.mark.parametrize("text", ["", "plain", "日本 \r\n", "half \ud800 pair", "x" * 100_000])
def test_text_comes_back_as_it_was(store, text):
    assert store.get(store.put(text)) == text


@given(st.text(alphabet=st.characters(), max_size=60))
def test_restore_undoes_pointers_anywhere_in_a_message(text):
    store = Store()
    pointer = store.pointer(text, preview=20)
    message = {"role": "user", "content": [{"type": "text", "text": f"a {pointer} b"}]}
    assert store.restore(message)["content"][0]["text"] == f"a {text} b"


def test_same_text_is_stored_once_under_a_machine_independent_address(tmp_path):
    first, second = Store(tmp_path / "a"), Store(tmp_path / "b")
    assert first.put("same") == first.put("same") == second.put("same")
    assert sum(1 for p in (tmp_path / "a").rglob("*") if p.is_file()) == 1
    assert str(tmp_path) not in first.pointer("same")


def test_unknown_malformed_and_damaged_texts_are_refused(tmp_path):
    store = Store(tmp_path)
    address = store.put("precious")
    file = next(p for p in tmp_path.rglob("*") if p.is_file())
    file.write_text("tampered")
    with pytest.raises(HistoryError, match="damaged"):
        store.get(address)
    with pytest.raises(HistoryError, match="no text"):
        store.get("0" * 64)
    with pytest.raises(HistoryError, match="no store address"):
        store.get("../../etc/passwd")
    assert "../../etc/passwd" not in store


def test_crash_while_writing_leaves_nothing_behind(tmp_path, monkeypatch):
    def broken(_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="disk full"):
        Store(tmp_path).put("text")
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_concurrent_writers_agree(tmp_path):
    texts = [f"text {n % 5}" * 1000 for n in range(40)]
    threads = [threading.Thread(target=Store(tmp_path).put, args=(t,)) for t in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store = Store(tmp_path)
    assert all(store.get(store.put(t)) == t for t in texts)
    assert sum(1 for p in tmp_path.rglob("*") if p.is_file()) == 5


def recalled(texts):
    return [Recalled(str(i), "user", text) for i, text in enumerate(texts)]


def test_recall_finds_pages_and_counts(tmp_path):
    with Recall(tmp_path / "recall.sqlite", page_size=2) as recall:
        assert recall.add(recalled(f"the port of service {n} is 80{n}" for n in range(5))) == 5
        assert recall.add(recalled(["again"])) == 0  # the key is known
        found, total = recall.search("service port")
        assert (len(found), total) == (2, 5)
        assert len(recall.search("service", page=2)[0]) == 1
        text = recall.page_in("service", 1)
        assert text.startswith("Showing 2 of 5 results (page 1/2):")
        assert recall.page_in("nothing of the kind") == "No results found."
    with Recall(tmp_path / "recall.sqlite") as again:
        assert len(again) == 5


@pytest.mark.parametrize(
    "query", ['"', "AND OR NOT", "a* NEAR(b)", "'; DROP TABLE messages;--", ""]
)
def test_recall_reads_no_query_syntax(query):
    recall = Recall()
    recall.add(recalled(["AND OR NOT a b NEAR", "plain"]))
    recall.search(query)
    assert len(recall) == 2


def test_recall_finds_chinese_inside_a_sentence_and_takes_lone_surrogates():
    recall = Recall()
    recall.add(recalled(["我们决定使用端口八千零八十", "half \ud800 pair"]))
    assert recall.search("端口")[1] == 1
    assert recall.search("pair")[1] == 1


def test_recall_works_without_full_text_search():
    recall = Recall()
    recall.add(recalled(["alpha beta", "beta gamma"]))
    recall.full_text = False
    assert [r.text for r in recall.search("BETA gamma")[0]] == ["beta gamma"]
