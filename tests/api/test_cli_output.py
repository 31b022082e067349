"""dcpctl's lists: for programs (json, ndjson, csv, chosen columns) and for people (width, colours, nothing that steers a terminal)."""
import csv
import http.server
import io
import json
import subprocess
import threading

import dcpd as lib
import pytest
from crafted import Crafted
from test_cli import good
from test_cli_more import on_terminal


@pytest.fixture(scope="module")
def made(request):
    """A daemon with a checkpoint of each name: plain, wide, and such as steer a terminal or a spreadsheet."""
    d = request.getfixturevalue("shared_daemon")
    tag = lib.fresh()
    names = [f"{tag}/{n}" for n in ("step-1", "日本語-2", 'a, "b"-3', "e\u0301-4", "turn\u202e-5", "csi\u009b31m-6")]
    sd = lib.fresh()
    d.put(sd, [lib.image({"a": ("F32", [4], bytes(16))})])
    for n in names:
        r = d.api.post("/v1/jobs", {"kind": "save", "source": {"state_dict": sd}, "target": {"storage": "main", "name": n}})
        if r.status < 400:
            assert d.api.wait(r.ok(202)["id"])["state"] == "succeeded"
    d.drop(sd)
    return d, tag, names


LISTS = ["ls main", "ls shm:", "runs main", "jobs", "policies", "webhooks", "chains", "transforms", "trash main", "audit"]


@pytest.mark.parametrize("words", LISTS)
def test_every_list_in_every_form(made, words):
    d = made[0]
    whole = json.loads(good(d.ctl(*words.split(), "--json")))
    assert json.loads(good(d.ctl(*words.split(), "--output", "json"))) == whole
    items = whole if isinstance(whole, list) else next(v for v in whole.values() if isinstance(v, list))
    lines = [json.loads(x) for x in good(d.ctl(*words.split(), "--output", "ndjson")).splitlines()]
    rows = list(csv.reader(io.StringIO(good(d.ctl(*words.split(), "--output", "csv")))))
    assert len(lines) == len(rows) - 1 == len(items) and len({len(r) for r in rows}) == 1
    assert sorted(lines, key=json.dumps) == sorted(items, key=json.dumps)


def test_columns(made):
    d, tag, names = made
    rows = list(csv.DictReader(io.StringIO(good(d.ctl("ls", f"main:{tag}", "--output", "csv", "--columns", "size,NAME,etag")))))
    assert list(rows[0]) == ["size", "name", "etag"] and {r["name"] for r in rows} <= set(names) and names[0] in {r["name"] for r in rows}
    assert all(r["size"].isdigit() and r["etag"] for r in rows), "a program gets bytes, not KiB"
    first = json.loads(good(d.ctl("jobs", "--output", "ndjson", "--columns", "id,progress.bytes_done", "--limit", "1")).splitlines()[0])
    assert list(first) == ["id", "progress.bytes_done"] and first["progress.bytes_done"] > 0
    table = good(d.ctl("jobs", "--columns", "kind,id", "--limit", "1")).splitlines()
    assert table[0].split() == ["KIND", "ID"]
    r = d.ctl("ls", "main", "--columns", "nam")
    assert r.returncode == 2 and not r.stdout and 'did you mean "name"' in r.stderr
    assert d.ctl("ls", "main", "--output", "json", "--columns", "name").returncode == 2
    r = d.ctl("ls", "main", "--output", "cvs")
    assert r.returncode == 2 and 'did you mean "csv"' in r.stderr


def test_no_name_steers_the_terminal(made):
    """ESC, C1 controls and changes of direction in FQNs: `?` wherever a terminal shows them, and in sentences and tables of a pipe."""
    d, tag, names = made
    sd = lib.fresh()
    d.put(sd, [lib.image({n: ("F32", [1], bytes(4)) for n in ("esc\x1b[31mred", "csi\u009b31m", "turn\u202e", "del\x7f", "line\nnew")})])
    for form in ("table", "csv", "ndjson", "json"):
        words = ["show", f"shm:{sd}", "--tensors", "*", "--output", form]
        plain = form == "table"
        for shown in [on_terminal(d, *words, env={"NO_COLOR": "1"})[1]] + plain * [d.ctl(*words).stdout]:
            assert "esc?[31mred" in shown or "\\u001B[31mred" in shown, (words, shown)
            assert not [c for c in shown if c not in "\r\n" and (ord(c) < 32 or 0x7f <= ord(c) < 0xa0 or c == "\u202e")], (words, shown)
            assert not plain or len(shown.splitlines()) == 6
    assert "esc\x1b[31mred" in good(d.ctl("show", f"shm:{sd}", "--tensors", "*", "--output", "csv")), "a program gets what is there"
    d.drop(sd)


def test_wide_characters_line_up(made):
    d, tag, names = made
    lines = [x for x in good(d.ctl("ls", f"main:{tag}", "--columns", "name,format")).splitlines() if x]
    wide = {"日": 2, "本": 2, "語": 2, "\u0301": 0}
    ends = {sum(wide.get(c, 1) for c in x[:x.rindex(" ") + 1]) for x in lines}
    assert len(ends) == 1, lines


def test_a_terminal_is_not_overrun_and_coloured_only_on_wish(made):
    d, tag, names = made
    code, shown = on_terminal(d, "jobs", "--limit", "3", env={"COLUMNS": "80"})
    assert code == 0 and "\033[32msucceeded\033[0m" in shown and "\033[1mID" in shown
    code, plain = on_terminal(d, "jobs", "--limit", "3", env={"NO_COLOR": "1"})
    assert code == 0 and "\033" not in plain and "succeeded" in plain
    assert max(len(x) for x in plain.splitlines()) <= 80, "columns are cut, lines do not wrap"
    assert "\033" not in on_terminal(d, "jobs", env={"TERM": "dumb"})[1] and "\033" not in good(d.ctl("jobs"))


class OneEvent(http.server.BaseHTTPRequestHandler):
    """A daemon that has one event to tell, whose FQN has a NUL."""
    event = {"time": "2026-11-22T00:00:00.000Z", "type": "job", "data": {"error": {"code": "missing_key", "fqn": "a\0b"}}}

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.end_headers()
        self.wfile.write(b'{"type":"lost"}\n' + json.dumps(self.event).encode() + b"\n")

    def log_message(self, *_):
        pass


def test_an_event_with_a_nul_and_a_gap_before_it_are_shown():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), OneEvent) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = lib.clean_environment(DCPD_URL=f"http://127.0.0.1:{server.server_port}", DCPD_TOKEN="x")
        json_, table = (subprocess.run([lib.BIN / "dcpctl", "events", *more], env=env, capture_output=True, text=True, timeout=60).stdout
                        for more in (["--json"], []))
        server.shutdown()
    assert [json.loads(line) for line in json_.splitlines()] == [{"type": "lost"}, OneEvent.event], json_
    assert table.startswith("lost: events are missing") and "a\\u0000b" in table, (json_, table)
