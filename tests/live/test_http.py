"""Calls over HTTP: addresses, and each failure told apart from the others."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from rigs.raw_server import HANG, RawServer, stream, whole

from kvcheck.core.base.errors import UsageError
from kvcheck.core.live import http as live_http
from kvcheck.core.live.exchange import End
from kvcheck.core.live.http import Address, CallFailed, Http, is_loopback, one_line, parse_address

KEY = "sk-0123/abc+d"
SHORT_S = 0.15


def to(server: RawServer, *, key: str | None = None) -> Http:
    return Http(parse_address(server.url), key=key, silence_s=SHORT_S)


def failed(call: Callable[[], object]) -> CallFailed:
    with pytest.raises(CallFailed) as caught:
        call()
    assert "\n" not in caught.value.reason and len(caught.value.reason) < 500
    return caught.value


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://127.0.0.1:8000", Address(scheme="http", host="127.0.0.1", port=8000)),
        ("HTTP://LocalHost:8000/", Address(scheme="http", host="localhost", port=8000)),
        ("https://a.example/v2/", Address(scheme="https", host="a.example", port=443, base="/v2")),
        ("http://127.0.0.1:8000/v1", Address(scheme="http", host="127.0.0.1", port=8000)),
        ("http://127.0.0.1:8000/v1/", Address(scheme="http", host="127.0.0.1", port=8000)),
        ("http://a.example/openai/v1", Address(scheme="http", host="a.example", port=80, base="/openai")),
        ("http://[::1]:1", Address(scheme="http", host="::1", port=1)),
    ],
)
def test_an_address_is_read(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        *("", "127.0.0.1:8000", "localhost", "ftp://h:1", "file:///etc/passwd", "http://", "http://:80", "http://h:"),
        *("http://h:0", "http://h:65536", "http://h:x", "http://h:1?a=b", "http://h:1?", "http://h:1#f"),
        *("http://h:1/a b", "http://h:1\r\nX: y", "http://[::1:1", "http://ä:1"),
    ],
)
def test_what_is_no_address_is_one_line(text: str) -> None:
    with pytest.raises(UsageError, match="expected http://HOST:PORT") as caught:
        parse_address(text)
    assert "\n" not in str(caught.value)


def test_a_password_in_an_address_is_not_repeated() -> None:
    with pytest.raises(UsageError) as caught:
        parse_address("http://user:hunter2@h:1")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "is_it"),
    [
        *(("127.0.0.1", True), ("127.8.9.10", True), ("[::1]", True), ("localhost", True), ("LOCALHOST", True)),
        *(("0.0.0.0", False), ("10.0.0.1", False), ("localhost.evil.example", False), ("127.0.0.1.nip.io", False)),
        *(("127.1", False), ("[::]", False), ("[fe80::1]", False), ("[::ffff:10.0.0.1]", False)),
    ],
)
def test_only_this_machine_is_loopback(host: str, is_it: bool) -> None:
    assert is_loopback(parse_address(f"http://{host}:1")) is is_it


def test_a_key_is_sent_and_never_shown() -> None:
    refusal = whole({"error": {"message": f"no such key: {KEY}"}}, status="401 Unauthorized")
    raw = whole(json.dumps(f"key {KEY} again").encode(), status="403 Forbidden")
    with RawServer(refusal, raw, whole(f"<p>{KEY}</p>".encode())) as server:
        client = to(server, key=KEY)
        for _ in range(3):
            failure = failed(lambda: client.get_json("/x"))
            assert KEY not in failure.reason and "<key>" in failure.reason
        assert all(f"Authorization: Bearer {KEY}" in head for head, _ in server.asked)
        assert KEY not in repr(client)


@pytest.mark.parametrize("key", ["", "a b", "a\r\nX: y", "ä"])
def test_a_key_that_no_header_holds_is_refused_unseen(key: str) -> None:
    with pytest.raises(UsageError) as caught:
        Http(parse_address("http://h:1"), key=key)
    assert not key or key not in str(caught.value)


def test_json_goes_out_and_comes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("all_proxy", "http://127.0.0.1:9")
    with RawServer(whole({"a": [1]})) as server:
        client = Http(parse_address(f"{server.url}/base/"), silence_s=SHORT_S)
        assert client.post_json("/x", {"ids": [1, 2]}) == {"a": [1]}
        head, body = server.asked[0]
    assert head.startswith("POST /base/x HTTP/1.1") and "Connection: close" in head
    assert json.loads(body) == {"ids": [1, 2]}


def test_an_answer_in_chunks_or_up_to_the_end_of_the_connection_is_whole() -> None:
    chunks = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n[1\r\n1\r\n]\r\n0\r\n\r\n"
    with RawServer(chunks, b"HTTP/1.0 200 OK\r\n\r\n[1]") as server:
        assert to(server).get_json("/") == to(server).get_json("/") == [1]


@pytest.mark.parametrize(
    ("answer", "end", "says"),
    [
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n[1"], End.CUT, "inside the answer"),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n[1"], End.CUT, "inside the answer"),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n[1\r\n"], End.CUT, "inside the answer"),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"], End.CUT, "inside the answer"),
        ([b""], End.UNREACHED, "without an answer"),
        ([HANG], End.SILENT, "no byte within 0.15 s"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n[1", HANG], End.SILENT, "no byte"),
        ([b"HTTP/1.1 200 OK\r\nX: ", HANG], End.SILENT, "no byte"),
        ([b"SSH-2.0-OpenSSH\r\n\r\n"], End.UNREADABLE, "no HTTP"),
        ([b"HTTP/1.1 20 OK\r\n\r\n"], End.UNREADABLE, "no HTTP"),
        ([b"HTTP/1.1 200 OK\r\n" + b"X" * 70000 + b": y\r\n\r\n"], End.UNREADABLE, "no HTTP"),
        (whole(b"<html>\n it works"), End.UNREADABLE, "expected JSON, got '<html> it works'"),
        (whole(b""), End.UNREADABLE, "expected JSON, got ''"),
        (whole(b"\xff\xfe\x00"), End.UNREADABLE, "expected JSON"),
        (whole(b"[" * 100_000), End.UNREADABLE, "expected JSON"),
        (whole(b"1" * 10_000), End.UNREADABLE, "expected JSON"),
        (whole({"error": {"message": "too\nlong"}}, status="400 Bad Request"), End.REFUSED, "status 400: too long"),
        (whole({"error": "no"}, status="500 X"), End.REFUSED, "status 500: no"),
        (whole({"detail": [{"loc": 1}]}, status="422 X"), End.REFUSED, "status 422: "),
        (whole(b"", status="503 Service Unavailable"), End.REFUSED, "status 503: Service Unavailable"),
        (whole(b"x" * 5000, status="500 X"), End.REFUSED, "xxx..."),
        (whole(b"", status="307 Temporary Redirect"), End.REFUSED, "status 307"),
        ([b"HTTP/1.1 500 X\r\nContent-Length: 99\r\n\r\nhalf"], End.REFUSED, "status 500: half"),
    ],
    ids=lambda value: value.value if isinstance(value, End) else "",
)
def test_each_failure_is_told_apart(answer: bytes | list[bytes], end: End, says: str) -> None:
    with RawServer(answer) as server:
        failure = failed(lambda: to(server).get_json("/path?with=query"))
    assert failure.end is end
    assert says in failure.reason and failure.reason.startswith("GET /path: ")
    assert (failure.status is not None) is (end is End.REFUSED)


def test_a_closed_port_and_an_unknown_host_are_not_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    failure = failed(lambda: Http(parse_address(f"http://127.0.0.1:{port}")).get_json("/"))
    assert failure.end is End.UNREACHED and "refused" in failure.reason
    assert failed(lambda: Http(parse_address("http://a..b:1")).get_json("/")).end is End.UNREACHED


def test_a_server_without_tls_is_not_reached_by_https() -> None:
    with RawServer(whole([])) as server:
        address = parse_address(server.url.replace("http:", "https:"))
        failure = failed(lambda: Http(address, silence_s=SHORT_S).get_json("/"))
    assert failure.end is End.UNREACHED and ("TLS" in failure.reason or "no connection" in failure.reason)


@pytest.mark.processes(starts=True)
def test_only_a_certificate_of_the_given_file_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*made.split(), *files], check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    with RawServer(whole([7]), tls=tls) as server:
        failure = failed(lambda: to(server).get_json("/"))
        assert failure.end is End.UNREACHED and "its certificate is refused" in failure.reason
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert to(server).get_json("/") == [7]


def test_an_answer_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_http, "MOST_BYTES", 1 << 20)
    with RawServer(whole(b" " * (2 << 20)), stream(b"data: " + b"x" * (2 << 20))) as server:
        assert failed(lambda: to(server).get_json("/")).end is End.UNREADABLE
        with to(server).stream("/s", {}) as events:
            assert failed(lambda: list(events)).end is End.UNREADABLE


def test_events_come_one_by_one_however_they_are_cut() -> None:
    line = b'data: {"a": 2}\r\n\r\n'
    cut = [b": ping\n\nevent: x\nid: 3\n", line[:4], line[4:9], line[9:], b"data:[3]\n\n"]
    with RawServer(stream({"a": 1}, *cut), stream([1], ends=False)) as server:
        with to(server).stream("/s", {}) as events:
            assert list(events) == [{"a": 1}, {"a": 2}, [3]]
            assert events.is_ended
        with to(server).stream("/s", {}) as events:
            assert failed(lambda: list(events)).end is End.CUT
            assert not events.is_ended


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        (whole({"a": [1] * 9}), [{"a": [1] * 9}]),  # it was not streamed
        (stream([1], b"data:\n\ndata: \n\n", [2], b"data: [DONE] \r\n\r\n"), [[1], [2]]),  # empty, and the end
        *(
            ([stream([1])[0].replace(b"text/event-stream", kind), *stream([1])[1:]], [[1]])
            for kind in (b"Text/Event-Stream", b"text/event-stream; charset=UTF-8", b"TEXT/EVENT-STREAM ;x=y")
        ),
    ],
)
def test_events_are_read_however_they_are_written(answer: bytes | list[bytes], read: list[object]) -> None:
    with RawServer(answer) as server, to(server).stream("/s", {}) as events:
        assert list(events) == read


def test_a_stream_that_only_sends_comments_is_silent() -> None:
    pings = [*stream([1], ends=False), *[b"8\r\n: ping\n\n\r\n"] * 3, HANG]
    with RawServer(pings) as server, to(server).stream("/s", {}) as events:
        assert failed(lambda: list(events)).end is End.SILENT


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        (whole(b"<html>", kind="text/html"), End.UNREADABLE),
        (whole(b"{half"), End.UNREADABLE),
        (whole({"a": 1})[:-2], End.CUT),
        (stream(b"data: {half\n\n"), End.UNREADABLE),
        (stream(b'error: {"code": 500, "message": "no slot"}\n\n'), End.REFUSED),
        (whole({"error": "x"}, status="503 X"), End.REFUSED),
    ],
)
def test_what_is_no_stream_of_events_says_so(answer: bytes | list[bytes], end: End) -> None:
    with RawServer(answer) as server:

        def read() -> None:
            with to(server).stream("/s", {}) as events:
                list(events)

        assert failed(read).end is end


def test_leaving_a_stream_closes_its_connection() -> None:
    with RawServer([*stream([1], ends=False), HANG]) as server:
        with to(server).stream("/s", {}) as events:
            assert next(iter(events)) == [1]
        assert server.closed_early.wait(5)


def test_text_of_a_server_is_one_printable_line() -> None:
    assert one_line("a\n\x1b[31m\u202eb\ud800 c" * 100, 12) == "a [31m b ..."
    assert len(one_line("x" * 10**6)) == live_http.MOST_TEXT
