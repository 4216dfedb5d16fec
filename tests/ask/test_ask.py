"""Asking a server that behaves, misbehaves in every way we know, disappears, or is not there."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from manners.ask.ask import HOPELESS_AFTER, ask_probes, ask_probes_sync
from manners.ask.client import API_KEY_VARIABLE, base_url
from manners.ask.reply import ReplyBuilder
from manners.ask.transcripts import load_transcripts
from manners.errors import AskError
from manners.spec import Probe

from .scripted_server import DONE, call_events, event, make_spec, says, scripted_server, stream, text_events

SPEC = make_spec()


def probe(name="p", *turns):
    turns = turns or ({"content": f"Question {name}?"},)
    return Probe.model_validate({"id": name, "category": "factual", "turns": turns})


def probes(count):
    return [probe(f"p{n}") for n in range(count)]


def run(script, path, asked=None, *, spec=SPEC, **options):
    """Ask a scripted server; the outcome and the request bodies that it saw."""

    async def go():
        async with scripted_server(script) as (url, bodies):
            return await ask_probes(url, "m", spec, asked or [probe()], path, **options), bodies

    return asyncio.run(go())


@pytest.fixture
def out(tmp_path):
    return tmp_path / "transcripts.jsonl"


@pytest.fixture(autouse=True)
def _no_key(monkeypatch):
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)


# --- a server that behaves ---


def test_request_and_transcript(out):
    outcome, bodies = run(says("Hello there."), out)
    assert bodies == [
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "You are Annie."},
                {"role": "user", "content": "Question p?"},
            ],
            "temperature": 0.0,
            "max_tokens": 32,
            "seed": 7,
            "stream": True,
            "stream_options": {"include_usage": True},
            "chat_template_kwargs": {"enable_thinking": False},
            "tools": SPEC.persona.tool_dicts(),
        }
    ]
    assert (outcome.asked, outcome.skipped, outcome.errors) == (1, 0, {})
    [reply] = load_transcripts(out)["p"]
    assert (reply.content, reply.finish_reason, reply.error) == ("Hello there.", "stop", None)
    assert reply.usage == {"prompt_tokens": 11, "completion_tokens": 3}
    assert reply.request == bodies[0]
    assert reply.asked.model == "m"


def test_events_are_kept_raw_and_add_up_to_the_reply(out):
    run(says("Grüße 🙂 <script>"), out)
    [reply] = load_transcripts(out)["p"]
    assert [data for _, data in reply.events] == [
        sent.decode().removeprefix("data: ").rstrip("\n") for sent in text_events("Grüße 🙂 <script>")
    ]
    again = ReplyBuilder()
    for _, data in reply.events:
        again.add(data)
    assert (again.content, again.usage) == (reply.content, reply.usage)


def test_times_are_those_of_arrival(out):
    async def script(body, request):
        thinking, content = event({"reasoning_content": "hm"}), text_events("Hello")
        return await stream(request, 0.1, thinking, 0.2, *content[:2], 0.15, *content[2:])

    run(script, out)
    [reply] = load_transcripts(out)["p"]
    times = [t for t, _ in reply.events]
    assert times == sorted(times)
    # Lower limits are exact, upper ones would fail on a busy machine; differences say the same.
    assert reply.first_token_s >= 0.1
    assert reply.first_content_s - reply.first_token_s >= 0.19
    assert times[-1] - reply.first_content_s >= 0.14
    assert times[-1] <= reply.total_s
    assert (reply.reasoning, reply.content) == ("hm", "Hello")


def test_no_tools_no_field(out):
    _, bodies = run(says("Hi there"), out, spec=make_spec(persona={"tools": []}))
    assert "tools" not in bodies[0]


def test_bounded_concurrency(out):
    open_now, most = 0, 0

    async def script(body, request):
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0.03)
        open_now -= 1
        return await stream(request, *text_events("Hello"))

    run(script, out, probes(12), concurrency=4)
    assert most == 4
    assert len(load_transcripts(out)) == 12


def test_progress_tells_of_every_probe(out):
    seen = []
    run(says("Hello"), out, probes(3), progress=seen.append)
    assert sorted(f.probe for f in seen) == ["p0", "p1", "p2"]
    assert [(f.done, f.total, f.error) for f in seen] == [(1, 3, None), (2, 3, None), (3, 3, None)]


def test_a_second_call_while_no_loop_runs(out):
    async def go(url):
        return await asyncio.to_thread(ask_probes_sync, url, "m", SPEC, [probe()], out)

    async def with_server():
        async with scripted_server(says("Hello")) as (url, _):
            return await go(url + "/v1/")

    assert asyncio.run(with_server()).asked == 1


# --- turns ---

TOOL_PROBE = probe(
    "t",
    {"content": "Weather in Bern?", "expect": {"tool": "web_search", "arguments": {"query": "Bern weather"}}},
    {"role": "tool", "content": "rain", "expect": {"contains": ["rain"], "knowledge": "factual"}},
    {"content": "Thanks!"},
)


def in_turn(*replies):
    """Answers the n-th request with the n-th list of events."""
    waiting = iter(replies)

    async def script(body, request):
        return await stream(request, *next(waiting))

    return script


def test_a_tools_turn_answers_the_models_own_call(out):
    arguments = '{"query": "weather Bern today"}'
    _, bodies = run(
        in_turn(call_events("web_search", arguments, "abc"), text_events("It rains."), text_events("Bye!!")),
        out,
        [TOOL_PROBE],
    )
    assert bodies[2]["messages"][1:] == [
        {"role": "user", "content": "Weather in Bern?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "abc", "type": "function", "function": {"name": "web_search", "arguments": arguments}}
            ],
        },
        {"role": "tool", "tool_call_id": "abc", "content": "rain"},
        {"role": "assistant", "content": "It rains."},
        {"role": "user", "content": "Thanks!"},
    ]
    replies = load_transcripts(out)["t"]
    assert [r.history for r in replies] == ["own", "own", "own"]
    assert [c.arguments for c in replies[0].tool_calls] == [arguments]
    assert replies[0].first_content_s is not None


@pytest.mark.parametrize(
    "first",
    [
        text_events("I would search the web."),
        call_events("web_search", '{"query": "Bern'),
        call_events("web_search", "[1, 2, 3]"),
        call_events("", "{}   "),
    ],
    ids=["text", "half-json", "no-object", "no-name"],
)
def test_the_reference_call_stands_in_for_one_that_cannot_be_answered(out, first):
    _, bodies = run(in_turn(first, text_events("It rains."), text_events("Bye!!")), out, [TOOL_PROBE])
    call, answer = bodies[1]["messages"][2:]
    assert call["tool_calls"][0]["function"] == {
        "name": "web_search",
        "arguments": '{"query": "Bern weather"}',
    }
    assert answer == {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "rain"}
    assert [r.history for r in load_transcripts(out)["t"]] == ["own", "reference", "reference"]


def test_every_call_gets_an_answer(out):
    two = {
        "tool_calls": [
            {"index": n, "id": f"c{n}", "function": {"name": "web_search", "arguments": "{}"}} for n in (0, 1)
        ]
    }
    run_ = run(
        in_turn([event(two, "tool_calls"), DONE], text_events("Rain."), text_events("Bye!!")),
        out,
        [TOOL_PROBE],
    )
    assert [m["tool_call_id"] for m in run_[1][1]["messages"] if m["role"] == "tool"] == ["c0", "c1"]


def test_reasoning_is_not_sent_back(out):
    first = [event({"reasoning": "secret"}), *text_events("Hello")]
    _, bodies = run(
        in_turn(first, text_events("Bye!!")), out, [probe("p", {"content": "Hi"}, {"content": "Bye"})]
    )
    assert "secret" not in json.dumps(bodies[1])


def test_an_error_ends_the_conversation(out):
    outcome, bodies = run(in_turn([event({"content": "Hel"})]), out, [TOOL_PROBE])
    assert len(bodies) == 1
    [reply] = load_transcripts(out)["t"]
    assert reply.error.kind == "no-done"
    assert outcome.errors == {"no-done": 1}


# --- faults: each has its kind, and none is a reply ---


def fault_of(script, out, **options):
    outcome, _ = run(script, out, **options)
    [reply] = load_transcripts(out)["p"]
    assert outcome.errors == {reply.error.kind: 1}
    return reply


def streams(*actions):
    async def script(body, request):
        return await stream(request, *actions)

    return script


def answers(status, text="", content_type="application/json", **headers):
    async def script(body, request):
        return web.Response(status=status, text=text, content_type=content_type, headers=headers)

    return script


async def hang_up(body, request):
    request.transport.close()
    return web.Response()


@pytest.mark.parametrize(
    ("script", "kind", "message"),
    [
        (answers(400, '{"error": "auto tool choice"}'), "http-4xx", "HTTP 400.*auto tool choice"),
        (answers(404), "http-4xx", "HTTP 404"),
        (answers(429, "slow down"), "http-4xx", "slow down"),
        (answers(500, "boom", "text/plain"), "http-5xx", "HTTP 500.*boom"),
        (answers(503), "http-5xx", "HTTP 503"),
        (answers(302, Location="/elsewhere"), "broken-stream", "HTTP 302"),
        (answers(200, '{"choices": []}'), "broken-stream", "no event stream"),
        (streams(event({"content": "Hel"}), "cut"), "broken-stream", "after 1 events"),
        (streams(event({"content": "Hel"}), b'data: {"error": {"code": "OOM"}}\n\n'), "broken-stream", "OOM"),
        (streams(event({"content": "Hello"}), DONE), "broken-stream", "finish_reason is None"),
        (streams(event({"content": "Hel"}), event({}, "abort"), DONE), "broken-stream", "abort"),
        (streams(event({"content": "Hello"}, "stop")), "no-done", "without"),
        (streams(event({"content": "Hello"}, "stop"), b"data: [DONE]"), "no-done", "without"),
        (streams(), "no-done", "without"),
        (streams(event({"content": "Hel"}), b'data: {"choices": [{\n\n', DONE), "bad-json", "choices"),
        (streams(b"data: hello\n\n", DONE), "bad-json", "hello"),
        (hang_up, "connection", "Disconnected"),
    ],
)  # fmt: skip
def test_faults(out, script, kind, message):
    reply = fault_of(script, out)
    assert reply.error.kind == kind
    assert re.search(message, reply.error.message)


def test_timeout_keeps_what_came(out):
    reply = fault_of(streams(event({"content": "Hel"}), 30.0), out, timeout_s=0.3)
    assert (reply.error.kind, reply.content, len(reply.events)) == ("timeout", "Hel", 1)
    assert 0.3 <= reply.total_s < 3


def test_timeout_before_the_answer(out):
    async def script(body, request):
        await asyncio.sleep(30)

    assert fault_of(script, out, timeout_s=0.2).error.kind == "timeout"


def test_no_connection_in_time_is_a_matter_of_the_connection(out, monkeypatch):
    def post(*args, **kwargs):
        raise aiohttp.ConnectionTimeoutError("Connection timeout to host")

    monkeypatch.setattr(aiohttp.ClientSession, "post", post)
    assert fault_of(says("Hello"), out).error.kind == "connection"


def test_a_drip_of_comments_does_not_outlast_the_timeout(out):
    assert fault_of(streams(*[b": ping\n\n", 0.05] * 100), out, timeout_s=0.3).error.kind == "timeout"


def test_a_flood_is_cut_off(out, monkeypatch):
    monkeypatch.setattr("manners.ask.client.MAX_REPLY_BYTES", 10_000)
    reply = fault_of(streams(*[b"x" * 1000] * 20), out)
    assert (reply.error.kind, reply.error.message) == ("broken-stream", "more than 10000 bytes")


def test_one_bad_reply_does_not_spoil_the_others(out):
    async def script(body, request):
        if body["messages"][-1]["content"] == "Question p3?":
            return web.Response(status=500)
        return await stream(request, *text_events("Hello"))

    outcome, _ = run(script, out, probes(6))
    assert outcome.errors == {"http-5xx": 1}
    assert [name for name, [reply] in sorted(load_transcripts(out).items()) if reply.error] == ["p3"]


def test_a_stream_that_stays_open_after_done_is_complete(out):
    outcome, _ = run(streams(*text_events("Hello"), 20.0), out, timeout_s=5)
    assert outcome.errors == {}
    assert outcome.wall_s < 3


# --- servers that cannot be asked at all ---


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def refused(call):
    with pytest.raises(AskError) as caught:
        call()
    return caught.value


def test_nobody_there(out):
    url = f"http://127.0.0.1:{free_port()}"
    error = refused(lambda: ask_probes_sync(url, "m", SPEC, [probe()], out))
    assert (error.code, error.where, error.exit_code) == ("server-unreachable", url, 3)
    assert "Fix: start the server" in str(error)
    assert not out.exists()


def test_somebody_there_who_never_answers(out, monkeypatch):
    monkeypatch.setattr("manners.ask.client.PREFLIGHT_S", 0.2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert refused(lambda: ask_probes_sync(url, "m", SPEC, [probe()], out)).code == "server-unreachable"


@pytest.mark.parametrize(
    ("status", "code"), [(401, "server-refuses-key"), (403, "server-refuses-key"), (503, "server-not-ready")]
)
def test_refused_before_anything_is_asked(out, status, code):
    async def go():
        async with scripted_server(says("Hello"), models=status) as (url, bodies):
            try:
                await ask_probes(url, "m", SPEC, [probe()], out)
            finally:
                assert bodies == []

    assert refused(lambda: asyncio.run(go())).code == code


def test_a_server_without_a_list_of_models_will_do(out):
    async def go():
        async with scripted_server(says("Hello"), models=404) as (url, _):
            return await ask_probes(url, "m", SPEC, [probe()], out)

    assert asyncio.run(go()).errors == {}


def test_when_all_requests_are_refused_it_says_so_and_stops(out):
    error = refused(
        lambda: run(answers(400, "needs --enable-auto-tool-choice"), out, probes(200), concurrency=4)
    )
    assert error.code == "server-refuses-requests"
    assert "--enable-auto-tool-choice" in error.found
    assert HOPELESS_AFTER <= len(load_transcripts(out)) < 2 * HOPELESS_AFTER


def test_when_the_server_goes_it_stops_and_keeps_what_is_complete(out):
    served = 0

    async def script(body, request):
        nonlocal served
        served += 1
        if served > 10:
            return await hang_up(body, request)
        return await stream(request, *text_events("Hello"))

    error = refused(lambda: run(script, out, probes(200), concurrency=4))
    assert error.code == "server-gone"
    assert sum(reply.error is None for [reply] in load_transcripts(out).values()) == 10


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://x", "http://", "http://h:99999", "http://h/v1?x=1", "", "http://[h"]
)
def test_no_address(out, url):
    assert refused(lambda: ask_probes_sync(url, "m", SPEC, [probe()], out)).code == "bad-url"


def test_a_password_in_the_address_is_refused_and_not_repeated(out):
    error = refused(lambda: ask_probes_sync("http://me:hunter2@h", "m", SPEC, [probe()], out))
    assert error.code == "bad-url"
    assert "hunter2" not in str(error)


@pytest.mark.parametrize(
    "url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", " http://h:1/v1/chat/completions"]
)
def test_addresses_in_all_usual_forms(url):
    assert base_url(url) == "http://h:1"
    assert base_url(url.replace("h:1", "h:1/proxy")) == "http://h:1/proxy"


# --- the key ---


def test_the_key_is_sent_and_never_written(out, monkeypatch):
    key = "sk-very-secret-0123456789"
    monkeypatch.setenv(API_KEY_VARIABLE, key)
    seen = []

    async def script(body, request):
        seen.append(request.headers.get("Authorization"))
        if len(seen) == 1:
            return web.Response(status=401, text=f"Incorrect API key provided: {key}")
        return await stream(request, event({"content": key}), f'data: {{"error": "{key}"}}\n\n'.encode())

    outcome, _ = run(script, out, probes(2), concurrency=1)
    assert seen == [f"Bearer {key}"] * 2
    assert outcome.errors == {"http-4xx": 1, "broken-stream": 1}
    written = out.read_text()
    assert key not in written
    assert "Incorrect API key provided" in written


def test_no_key_no_header(out):
    seen = []

    async def script(body, request):
        seen.append(request.headers.get("Authorization"))
        return await stream(request, *text_events("Hello"))

    run(script, out)
    assert seen == [None]


@pytest.mark.parametrize("key", ["sk-a\nb", "schlüssel"])
def test_a_key_that_no_header_can_carry(out, monkeypatch, key):
    monkeypatch.setenv(API_KEY_VARIABLE, key)
    error = refused(lambda: ask_probes_sync("http://127.0.0.1:9", "m", SPEC, [probe()], out))
    assert error.code == "bad-api-key"
    assert key not in str(error)


# --- resuming ---


def test_what_is_complete_is_not_asked_again(out):
    run(says("Hello"), out, probes(3))
    before = out.read_bytes()
    outcome, bodies = run(says("Other"), out, probes(5))
    assert (outcome.asked, outcome.skipped) == (2, 3)
    assert [b["messages"][-1]["content"] for b in bodies] == ["Question p3?", "Question p4?"]
    assert out.read_bytes().startswith(before)


def test_a_complete_file_needs_no_server(out):
    run(says("Hello"), out, probes(3))
    outcome = ask_probes_sync(f"http://127.0.0.1:{free_port()}", "m", SPEC, probes(3), out)
    assert (outcome.asked, outcome.skipped) == (0, 3)


@pytest.mark.parametrize("keep", [1, 15, 40, 500])
def test_a_half_written_line_is_dropped_and_asked_again(out, keep):
    run(says("Hello"), out, probes(2), concurrency=1)
    first, second = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(first + second[:keep])
    outcome, _ = run(says("Again"), out, probes(2))
    assert (outcome.asked, outcome.skipped) == (1, 1)
    replies = load_transcripts(out)
    assert [replies[name][0].content for name in ("p0", "p1")] == ["Hello", "Again"]


def test_a_conversation_cut_between_turns_is_asked_again_from_its_start(out):
    replies = call_events("web_search", '{"query": "x"}'), text_events("Rain."), text_events("Bye!!")
    run(in_turn(*replies), out, [TOOL_PROBE])
    out.write_bytes(b"".join(out.read_bytes().splitlines(keepends=True)[:2]))
    outcome, _ = run(in_turn(*replies), out, [TOOL_PROBE])
    assert outcome.asked == 1
    assert [r.turn for r in load_transcripts(out)["t"]] == [0, 1, 2]


def test_errors_are_asked_again(out):
    run(answers(500), out, probes(2))
    outcome, _ = run(says("Hello"), out, probes(2))
    assert (outcome.asked, outcome.skipped) == (2, 0)
    assert all(reply.error is None for [reply] in load_transcripts(out).values())


def test_errors_stay_on_record_while_the_server_is_away(out):
    run(answers(500), out)
    before = out.read_bytes()
    refused(lambda: ask_probes_sync(f"http://127.0.0.1:{free_port()}", "m", SPEC, [probe()], out))
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"spec": make_spec(persona={"system_prompt": "You are Bob."})}, "transcripts-other-spec"),
        ({"spec": make_spec(asking={"temperature": 0.5})}, "transcripts-other-spec"),
        ({"model": "n"}, "transcripts-other-model"),
        ({"served": {"engine": "vllm"}}, "transcripts-other-model"),
        ({"probes": [probe("q")]}, "transcripts-other-probes"),
        ({"probes": [probe("p", {"content": "Other words?"})]}, "transcripts-other-probes"),
    ],
)
def test_a_file_of_another_run_is_refused_and_left_alone(out, change, code):
    run(says("Hello"), out)
    before = out.read_bytes()
    given = {"model": "m", "spec": SPEC, "probes": [probe()], "served": None} | change
    url = f"http://127.0.0.1:{free_port()}"
    error = refused(
        lambda: ask_probes_sync(
            url, given["model"], given["spec"], given["probes"], out, served=given["served"]
        )
    )
    assert error.code == code
    assert out.read_bytes() == before


def test_gates_may_change_without_asking_again(out):
    run(says("Hello"), out)
    spec = make_spec(gates=[{"name": "no_markdown", "threshold": 1.0}])
    assert ask_probes_sync("http://127.0.0.1:9", "m", spec, [probe()], out).skipped == 1


@pytest.mark.parametrize(
    "content", ["# Some notes\n", "no newline", '{"schema": 1}\n', '{"schema": 1, "probe": 3}']
)
def test_a_file_that_is_no_transcripts_is_refused_and_left_alone(out, content):
    out.write_text(content)
    assert (
        refused(lambda: ask_probes_sync("http://127.0.0.1:9", "m", SPEC, [probe()], out)).code
        == "transcripts-syntax"
    )
    assert out.read_text() == content


def test_loading_refuses_what_is_damaged(out):
    assert refused(lambda: load_transcripts(out)).code == "transcripts-missing"
    run(says("Hello"), out)
    whole = out.read_bytes()
    out.write_bytes(whole + whole)
    assert refused(lambda: load_transcripts(out)).code == "transcripts-repeated"
    out.write_bytes(whole + whole[:50])
    error = refused(lambda: load_transcripts(out))
    assert (error.code, error.where) == ("transcripts-syntax", f"{out}:2")


# --- being interrupted ---


def test_cancelling_keeps_what_is_complete(out):
    async def script(body, request):
        number = int(body["messages"][-1]["content"].removeprefix("Question p").rstrip("?"))
        return await stream(
            request, *text_events("Hello")[:2], 0.0 if number < 5 else 60.0, *text_events("x" * 9)[2:]
        )

    async def go():
        async with scripted_server(script) as (url, _):
            task = asyncio.create_task(ask_probes(url, "m", SPEC, probes(9), out, concurrency=9))
            while not out.exists() or out.read_bytes().count(b"\n") < 5:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(go())
    assert sorted(load_transcripts(out)) == [f"p{n}" for n in range(5)]
    outcome, _ = run(says("Hello"), out, probes(9))
    assert (outcome.asked, outcome.skipped) == (4, 5)


def test_ctrl_c_keeps_what_is_complete(out):
    """In a process of its own, with a real signal."""
    program = textwrap.dedent(
        """
        import sys
        sys.path.insert(0, sys.argv[3])
        from pathlib import Path
        from scripted_server import make_spec
        from manners.ask.ask import ask_probes_sync
        from manners.spec import Probe
        def probe(n):
            turns = [{"content": f"Question p{n}?"}]
            return Probe.model_validate({"id": f"p{n}", "category": "factual", "turns": turns})
        print("asking", flush=True)
        def show(finished):
            print(finished.probe, flush=True)
        probes = [probe(n) for n in range(4)]
        ask_probes_sync(sys.argv[1], "m", make_spec(), probes, Path(sys.argv[2]), progress=show)
        """
    )

    async def script(body, request):
        first = body["messages"][-1]["content"] == "Question p0?"
        return await stream(
            request, *text_events("Hello")[:2], 0.0 if first else 60.0, *text_events("Hello")[2:]
        )

    async def go():
        async with scripted_server(script) as (url, _):
            arguments = [sys.executable, "-c", program, url, str(out), str(Path(__file__).parent)]
            process = await asyncio.create_subprocess_exec(
                *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ)
            )
            assert process.stdout is not None
            assert await process.stdout.readline() == b"asking\n"
            assert await process.stdout.readline() == b"p0\n"
            process.send_signal(signal.SIGINT)
            _, stderr = await asyncio.wait_for(process.communicate(), 20)
            return stderr.decode()

    assert "KeyboardInterrupt" in asyncio.run(go())
    assert list(load_transcripts(out)) == ["p0"]
