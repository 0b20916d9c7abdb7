"""The page's server: who may ask, what it answers, and one request after the other."""

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvprobe.app.page import bundle, example, offline_page
from kvprobe.app.work import MOST_WAITING, CancelledJob, Worker
from kvprobe.cli.app import serve
from kvprobe.cli.flags import USUAL, Loading
from kvprobe.errors import UserError
from kvprobe.inference.model import Model
from tests.app.made_up import HOSTILE, START, serving
from tests.refusals import refused

ADDRESS = {"messages": [vars(message) for message in START.messages], "ask": START.ask, "new": 2}


@pytest.fixture(scope="module")
def server(tiny_llama: Model) -> Iterator[str]:
    with serving(tiny_llama) as (address, _):
        yield address


def asked(address: str, path: str = "", content: object = None, **headers: str) -> tuple[int, dict[str, str], str]:
    """The status, headers and text of an answer; `content` is posted."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 0, timeout=60)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    body = None if content is None else content if isinstance(content, str) else json.dumps(content)
    given = {"Content-Type": "application/json"} if body is not None else {}
    connection.request("GET" if body is None else "POST", parts.path + path, body, given | named)
    answer = connection.getresponse()
    read = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()
    connection.close()
    return read


def events(address: str, job: str) -> list[tuple[str, Any]]:
    status, headers, text = asked(address, f"jobs/{job}")
    assert (status, headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
    blocks = [
        dict(line.split(": ", 1) for line in block.split("\n")) for block in text.split("\n\n") if "event" in block
    ]
    return [(block["event"], json.loads(block["data"])) for block in blocks]


def test_a_state_comes_with_what_is_being_done_before_it(server: str):
    edits = [{"kind": "mask", "segments": ["m1"]}]
    status, _, text = asked(server, "jobs", {"address": {**ADDRESS, "edits": edits}})
    assert status == 200
    said = events(server, json.loads(text)["job"])
    assert ("step", "mask m1") in said
    what, state = said[-1]
    assert (what, state["kind"], state["address"]["messages"][2]["content"]) == ("done", "AppState", HOSTILE)
    _, _, text = asked(server, "jobs", {"address": {**ADDRESS, "edits": [{"kind": "mask", "segments": ["m9"]}]}})
    what, why = events(server, json.loads(text)["job"])[-1]
    assert what == "failed"
    assert "m9" in why


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://example.org"},
        {"Origin": "null"},
        {"Host": "example.org"},
        {"Host": "127.0.0.1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
@pytest.mark.parametrize("path", ["", "session.json", "static/app.js", "jobs"])
def test_other_pages_and_other_names_are_refused(server: str, headers: dict[str, str], path: str):
    content = {"address": ADDRESS} if path == "jobs" else None
    status, _, text = asked(server, path, content, **headers)
    assert status == 403
    assert "kvprobe" not in text


def test_what_lacks_the_token_is_refused(server: str):
    parts = urlsplit(server)
    root = f"http://{parts.netloc}/"
    assert len(parts.path) > 30
    for path in ("", "static/app.js", "session.json", parts.path[1:-2] + "/", "wrong/session.json"):
        assert asked(root, path)[0] == 403, path
    assert asked(root, "jobs", {"address": ADDRESS})[0] == 403
    for path in ("static/../../page.py", "static/%2e%2e%2fexample.json", "static/example.json", "static/", "elsewhere"):
        assert asked(server, path)[0] == 404, path


def test_every_answer_has_the_policy(server: str):
    for path in ("", "static/app.js", "session.json", "elsewhere", "jobs/none"):
        _, headers, _ = asked(server, path)
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "not JSON"), ("[1]", "not a JSON object"), ('{"address": NaN}', "not JSON"),
     ("x" * (2**20 + 1), "larger than")],
)  # fmt: skip
def test_what_is_no_request_is_refused_in_a_sentence(server: str, content: str, said: str):
    status, _, text = asked(server, "jobs", content)
    assert (status, said in json.loads(text)["error"]) == (400, True)
    assert asked(server, "jobs", "{}", Content_Type="text/plain")[0] == 400


def test_an_address_that_is_none_fails_as_its_work_would(server: str):
    _, _, text = asked(server, "jobs", "{}")
    ((what, why),) = events(server, json.loads(text)["job"])
    assert (what, "must be a mapping" in why) == ("failed", True)


def test_the_model_is_loaded_when_something_is_asked_and_the_page_opens_on_an_example_before(tiny_llama: Model):
    with serving(tiny_llama, None) as (address, loaded):
        _, _, text = asked(address, "session.json")
        assert json.loads(text) == example()
        assert asked(address)[0] == 200
        assert not loaded
        for _ in range(2):
            _, _, text = asked(address, "jobs", {"address": ADDRESS})
            assert events(address, json.loads(text)["job"])[-1][0] == "done"
        assert len(loaded) == 1


def test_an_offline_page_runs_its_own_scripts_alone_and_holds_hostile_text_as_data():
    page = offline_page({"start": ADDRESS, "states": [], "at": ADDRESS})
    assert HOSTILE not in page
    assert "\\u003c/script>\\u003cimg src=x" in page
    assert page.count("</script>") == page.count("<script")
    assert "unsafe" not in page.partition("</title>")[0]
    assert "import " not in bundle()


def test_a_worker_does_one_job_after_the_other_and_forgets_what_was_cancelled():
    worker, may_end, order = Worker(), threading.Event(), []

    def first(step: Any) -> int:
        assert may_end.wait(60)
        step("never said")
        return 1

    def second(step: Any) -> int:
        order.append("second")
        return 2

    one, two = worker.add(first), worker.add(second)
    assert two.said[0] == ("step", "waiting for another request")
    one.cancelled = True
    may_end.set()
    assert [*two.events()][-1] == ("done", 2)
    assert [*one.events()][-1] == ("cancelled", None)
    assert order == ["second"]
    failed = worker.add(lambda step: 1 // 0)
    assert "ZeroDivisionError" in [*failed.events()][-1][1]
    with pytest.raises(CancelledJob):
        one.step("on")
    hold = threading.Event()
    for _ in range(MOST_WAITING):
        worker.add(lambda step: hold.wait(60))
    with pytest.raises(UserError, match="waiting already"):
        _ = [worker.add(lambda step: hold.wait(60)) for _ in range(2)]
    hold.set()


def test_a_page_of_another_model_shows_no_state_of_the_example(tiny_llama: Model, server: str):
    assert json.loads(asked(server, "session.json")[2])["states"]
    with serving(tiny_llama, None, of_example=False) as (address, _):
        session = json.loads(asked(address, "session.json")[2])
    assert session == {"start": example()["start"], "states": []}


def test_what_no_text_holds_is_shared_and_an_odd_request_is_refused(server: str):
    assert asked(server, "share", json.dumps({"a": "\ud800"}))[0] == 200
    parts = urlsplit(server)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 0, timeout=60)
    connection.request("OPTIONS", "*")
    assert connection.getresponse().status == 403
    connection.close()


def test_a_question_without_a_conversation_is_refused():
    refused(lambda: serve(ask="and the inn"), "belong to --chat")


def test_a_llama_server_needs_its_folder_and_no_loading(tmp_path: Path):
    url = "http://127.0.0.1:8080"
    refused(lambda: serve(url), "--slots", "--slot-save-path")
    refused(lambda: serve(url, slots=tmp_path / "none"), "no folder")
    refused(lambda: serve(url, slots=tmp_path, loading=Loading(dtype="bfloat16")), "has loaded its model already")
    refused(lambda: serve(slots=tmp_path), "belong to the address of a llama-server")


def test_the_python_of_a_command_loads_what_it_loads():
    assert USUAL.code("tiny") == "kv.load('tiny')"
    loading = Loading(dtype="bfloat16", max_memory=("cpu=8GiB",), offload_folder=Path("there"))
    arguments = "dtype='bfloat16', max_memory={'cpu': '8GiB'}, offload_folder='there'"
    assert loading.code("tiny") == f"kv.load('tiny', {arguments})"
