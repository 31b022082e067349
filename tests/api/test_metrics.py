"""/metrics: what an operator's alerts stand on: exact times, runs that everybody knows by their names, values that survive a restart."""
import calendar
import json
import os
import pathlib
import re
import subprocess
import time

import pytest
from crafted import Crafted

import dcpd as lib
from streaming import job

LINE = re.compile(r"([a-z_]+)(?:\{(.*)\})? (\S+)")
MANUAL = lib.ROOT / "api/metrics.md"
RULES, BOARD = lib.ROOT / "deploy/prometheus/rules.yml", lib.ROOT / "deploy/grafana/dcpd.json"


def scrape(d):
    """{(family, labels): value}, after a look at the form of every line."""
    out, typed = {}, {}
    for line in d.api.get("/metrics").body.decode().splitlines():
        if line.startswith("#"):
            words = line.split(" ", 3)
            if words[1] == "TYPE":
                typed[words[2]] = words[3]
            continue
        m = LINE.fullmatch(line)
        assert m, line
        base = re.sub(r"_(bucket|sum|count)$", "", m[1])
        assert m[1] in typed or typed.get(base) == "histogram", line
        key = (m[1], m[2] or "")
        assert key not in out, f"twice: {line}"
        out[key] = float(m[3])
    return out


def save(d, name, generation=1, storage="main", **more):
    sd = lib.fresh()
    d.put(sd, [lib.image({"a": ("F32", [4096], bytes(16384))})], generation=generation)
    j = d.api.run("save", source={"state_dict": sd}, target={"storage": storage, "name": name}, **more)
    d.drop(sd)
    return j


def run_labels(run, storage="main"):
    return f'run="{run}",storage="{storage}"'


def seconds(text):
    head, millis = text.rstrip("Z").split(".")
    return calendar.timegm(time.strptime(head, "%Y-%m-%dT%H:%M:%S")) + int(millis) / 1000


def test_last_durable_is_exact_and_survives_a_restart(spawn):
    d = spawn(args=["--keep-jobs", "2/30d"])
    odd = 'odd "run" \\ ü'
    a = save(d, "run1/step-000100", generation=3)
    save(d, f"{odd}/final", generation=8)
    save(d, "alone", generation=9)
    b = save(d, "run1/step-200", generation=4)
    d.api.run("reshard", source={"storage": "main", "name": "run1/step-200"}, target={"storage": "main", "name": "run1/step-200-tp2"})
    for _ in range(4):  # the records of the saves are pruned
        d.api.run("verify", source={"storage": "main", "name": "alone"}, level="structure")
    escaped = odd.replace("\\", "\\\\").replace('"', '\\"')
    want = {("dcpd_last_durable_step", run_labels("run1")): 200, ("dcpd_last_durable_step", run_labels(escaped)): 8,
            ("dcpd_last_durable_step", run_labels("-")): 9}
    for _ in range(2):
        got = scrape(d)
        assert {k: v for k, v in got.items() if k[0] == "dcpd_last_durable_step"} == want
        at = got["dcpd_last_durable_timestamp_seconds", run_labels("run1")]
        assert at == seconds(b["milestones"]["durable"]), "a copy within the run is no progress, and the clock's milliseconds are there"
        assert at > seconds(a["milestones"]["durable"])
        assert got["dcpd_last_verified_timestamp_seconds", run_labels("-") + ',level="structure"'] > at
        lib.wait_for(lambda: len(d.api.get("/v1/jobs").ok(200)["jobs"]) <= 2, 15, "old job records gone")
        d.kill()
        d.start()


def test_a_run_of_another_name_made_by_reshard_counts(spawn):
    d = spawn()
    c = Crafted(d.storages["main"])
    d.api.run("reshard", source=c.ref, target={"storage": "main", "name": "exports/step-7"})
    assert scrape(d)["dcpd_last_durable_step", run_labels("exports")] == 7


def test_a_verify_of_a_part_verifies_no_checkpoint(spawn):
    d = spawn()
    c = Crafted(d.storages["main"], name="parts/step-1")
    key = "dcpd_last_verified_timestamp_seconds", run_labels("parts") + ',level="digest"'
    fqn = d.api.get(d.api.storage_path("main", c.name, "/tensors")).ok(200)["tensors"][0]["fqn"]
    d.api.run("verify", source=c.ref, level="digest", include=[fqn])
    assert key not in scrape(d)
    d.api.run("verify", source=c.ref, level="digest")
    assert scrape(d)[key] > 0


@pytest.mark.long
def test_runs_are_bounded(spawn):
    """A run per checkpoint, as sweeps make them, fills neither the memory nor the scraper: the newest remain."""
    d = spawn()
    sd = lib.fresh()
    d.put(sd, [lib.image({"a": ("F32", [4], bytes(16))})])
    n = 270
    save_of = {"source": {"state_dict": sd}}
    jobs = [d.api.submit("save", target={"storage": "main", "name": f"sweep-{i:03}/step-1"}, **save_of) for i in range(n)]
    for j in jobs:
        assert d.api.wait(j)["state"] == "succeeded"
    for _ in range(2):
        runs = [k[1] for k in scrape(d) if k[0] == "dcpd_last_durable_timestamp_seconds"]
        assert len(runs) == 256 and run_labels(f"sweep-{n - 1:03}") in runs and run_labels("sweep-000") not in runs
        d.stop()
        d.start()


def test_process_metrics(d):
    got = scrape(d)
    pid = d.proc.pid
    ticks = os.sysconf("SC_CLK_TCK")
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    cpu = (int(stat[11]) + int(stat[12])) / ticks
    assert abs(got["process_cpu_seconds_total", ""] - cpu) <= 0.2
    rss = int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert 0.5 * rss < got["process_resident_memory_bytes", ""] < 2 * rss
    assert abs(got["process_open_fds", ""] - len(os.listdir(f"/proc/{pid}/fd"))) <= 4
    assert got["process_max_fds", ""] >= got["process_open_fds", ""]
    boot = next(int(x.split()[1]) for x in open("/proc/stat") if x.startswith("btime"))
    assert abs(got["process_start_time_seconds", ""] - (boot + int(stat[19]) / ticks)) < 2


@pytest.mark.long
def test_queue_age(spawn):
    """A save that waits behind another for a while shows for how long; one that awaits its trainer's seal is in no queue."""
    d = spawn()
    first, second = lib.fresh(), lib.fresh()
    d.create(first)
    d.reserve(first, 0, 16384, 1)
    d.api.submit("save", source={"state_dict": first, "generation": 1, "await_seal": True}, target={"storage": "main", "name": "q/0"})
    time.sleep(0.5)
    assert scrape(d)["dcpd_queue_oldest_seconds", 'kind="save"'] == 0
    d.put(second, [lib.image({"a": ("F32", [64 << 20], bytes(256 << 20))})])
    slow = {"source": {"state_dict": second}, "options": {"pace": "background"}}
    jobs = [d.api.submit("save", target={"storage": "main", "name": f"q/{i}"}, **slow) for i in (1, 2, 3, 4)]
    lib.wait_for(lambda: any(job(d, j)["state"] == "running" for j in jobs), 20, "a save runs")
    with lib.stopped(*d.workers()):  # the save in front goes no further
        time.sleep(1.2)
        queued = [j for j in jobs if job(d, j)["state"] == "queued"]
        age = scrape(d)["dcpd_queue_oldest_seconds", 'kind="save"']
    assert queued and age >= 1, (queued, age)
    for j in jobs:
        d.api.post(f"/v1/jobs/{j['id']}:cancel")
        d.api.wait(j)
    assert scrape(d)["dcpd_queue_oldest_seconds", 'kind="save"'] == 0


def test_bytes_of_each_storage(spawn):
    d = spawn(["main", "other"])

    def moved():
        got = scrape(d)
        return {(s, way): got.get((f"dcpd_storage_{way}_bytes_total", f'storage="{s}"'), 0)
                for s in ("main", "other") for way in ("read", "written")}

    sd, size = lib.fresh(), 32 << 20
    d.put(sd, [lib.image({"a": ("F32", [size // 4], bytes(size))})])
    before = moved()
    d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": "io/1"})
    saved = moved()
    assert size <= saved["main", "written"] - before["main", "written"] < 1.1 * size
    d.api.run("reshard", source={"storage": "main", "name": "io/1"}, target={"storage": "other", "name": "io/2"})
    copied = moved()
    assert size <= copied["main", "read"] - saved["main", "read"] < 2.2 * size
    assert size <= copied["other", "written"] - saved["other", "written"] < 1.1 * size
    assert copied["main", "written"] - saved["main", "written"] < 1 << 16
    raw = d.api.get(d.api.storage_path("other", "io/2", "/tensors/a?format=raw"))
    assert raw.status == 200 and len(raw.body) == size
    assert moved()["other", "read"] - copied["other", "read"] >= size, "look-ups count as well"


@pytest.mark.long
def test_a_storage_that_is_gone_has_no_series(d, tmp_path):
    name = lib.fresh()
    d.api.post("/v1/storages", {"name": name, "path": str(tmp_path), "lease_seconds": lib.PATIENCE}).ok(201, 200)
    assert any(name in k[1] for k in scrape(d))
    lib.wait_for(lambda: d.api.get(f"/v1/storages/{name}").status == 404, 10, "the storage's lease over")
    assert not [k for k in scrape(d) if name in k[1]], "an alert on its state would last for ever"


def of_table():
    """Family → type, of server/metrics.c."""
    kinds = {"COUNTER": "counter", "GAUGE": "gauge", "HISTOGRAM": "histogram", "SPAN": "histogram"}
    rows = re.findall(r'\{ "((?:dcpd|process)_[a-z_]+)", ([A-Z]+), "', (lib.ROOT / "server/metrics.c").read_text())
    assert len(rows) > 30
    return {name: kinds[kind] for name, kind in rows}


@pytest.fixture(scope="module")
def promtool():
    r = subprocess.run([lib.ROOT / "tests/promtool.sh"], capture_output=True, text=True)
    if r.returncode:
        pytest.skip(f"no promtool: {r.stderr.strip()[-200:]}")
    return r.stdout.split()[-1]


def test_the_manual_has_a_row_for_each_family(d):
    """Its name, its type, and the labels that its series have, of those that there are here."""
    rows = dict(re.findall(r"^\| `((?:dcpd|process)_[a-z_]+)` \| (\w+ \|[^|]*)\|", MANUAL.read_text(), re.M))
    assert {k: v.split()[0] for k, v in rows.items()} == of_table()
    for family, labels in scrape(d):
        base = re.sub(r"_(bucket|sum|count)$", "", family)
        base = base if base in rows else family
        told = set(re.findall(r"`(\w+)`", rows[base]))
        assert set(re.findall(r'(\w+)="', labels)) - {"le"} == told, (family, labels)


def test_promtool_finds_nothing_to_say(d, promtool):
    save(d, f"{lib.fresh()}/step-1")
    text = d.api.get("/metrics").body
    r = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True)
    assert (r.returncode, r.stdout, r.stderr) == (0, b"", b"")


def test_alert_rules(promtool):
    """Each fires when it should and not before: deploy/prometheus/rules_test.yml has series for them."""
    for words in (["check", "rules", RULES], ["test", "rules", RULES.parent / "rules_test.yml"]):
        r = subprocess.run([promtool, *words], capture_output=True, text=True, cwd=RULES.parent)
        assert r.returncode == 0, r.stdout + r.stderr
    names = re.findall(r"- alert: (\w+)", RULES.read_text())
    assert len(names) > 10 and len(set(names)) == len(names)


def test_board_and_rules_use_metrics_that_there_are():
    expressions = [t["expr"] for p in json.loads(BOARD.read_text())["panels"] for t in p.get("targets", [])]
    expressions += re.findall(r"^\s+expr: (.+)$", RULES.read_text(), re.M)
    assert len(expressions) > 40
    table, used = of_table(), set()
    for text in expressions:
        for name in re.findall(r"\b(?:dcpd|process)_[a-z_]+", text):
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            base = base if table.get(base) == "histogram" else name
            assert base in table, (name, text)
            assert (table[base] == "counter") == bool(re.search(rf"(rate|increase)\({name}\b", text)) or table[base] == "histogram", text
            used.add(base)
    assert {"dcpd_lost_work_seconds", "dcpd_storage_io_bytes_total", "dcpd_save_lag_seconds"} <= used
    ids = [p["id"] for p in json.loads(BOARD.read_text())["panels"]]
    assert len(set(ids)) == len(ids)


def test_openmetrics(d):
    """The same numbers under the same names, with the families as OpenMetrics has them, for a client that accepts it."""
    plain = d.api.get("/metrics")
    r = d.api.get("/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"})
    assert plain.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert r.headers["Content-Type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    lines = r.body.decode().splitlines()
    assert lines[-1] == "# EOF" and lines.count("# EOF") == 1
    family, families, samples = None, [], set()
    for line in lines[:-1]:
        if line.startswith("# HELP "):
            family = line.split(" ")[2]
            families.append(family)
        elif line.startswith("#"):
            assert line.split(" ")[2] == family, line
            kind = line.split(" ")[3] if line.startswith("# TYPE ") else kind
            assert not line.startswith("# UNIT") or family.endswith("_" + line.split(" ")[3])
        else:
            name = LINE.fullmatch(line)[1]
            assert name in {"counter": {family + "_total"}, "gauge": {family},
                            "histogram": {family + x for x in ("_bucket", "_sum", "_count")}}[kind], line
            le = re.search(r'le="([^"]+)"', line)
            assert not le or le[1] == "+Inf" or "." in le[1] or "e" in le[1]
            samples.add(line.rsplit(" ", 1)[0])
    assert len(set(families)) == len(families), "a counter and a gauge of one name clash in OpenMetrics"
    assert {x.rsplit(" ", 1)[0] for x in plain.body.decode().splitlines() if x[0] != "#"} <= samples


def test_bytes_and_seconds_by_storage_direction_and_stage(spawn):
    """A save's and a reshard's bytes are told by stage and add up to the storage's; their time is no more than the jobs took."""
    d = spawn(["main", "other"])
    size, sd = 64 << 20, lib.fresh()
    d.put(sd, [lib.image({"a": ("F32", [size // 4], bytes(size))})])
    begun = time.monotonic()
    d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": "io/1"})
    d.api.run("reshard", source={"storage": "main", "name": "io/1"}, target={"storage": "other", "name": "io/2"})
    took = time.monotonic() - begun
    got, by = scrape(d), {}
    for what in ("bytes", "seconds"):
        for (family, labels), value in got.items():
            if family == f"dcpd_storage_io_{what}_total":
                l = dict(re.findall(r'(\w+)="([^"]*)"', labels))
                by[what, l["storage"], l["direction"], l["stage"]] = value
    for storage, way, least in (("main", "write", size), ("main", "read", size), ("other", "write", size)):
        parts = {k[3]: v for k, v in by.items() if k[:3] == ("bytes", storage, way)}
        told = got[f"dcpd_storage_{'read' if way == 'read' else 'written'}_bytes_total", f'storage="{storage}"']
        assert least <= sum(parts.values()) == told, (storage, way, parts, told)
        assert parts.get("copy", 0) >= size, parts
        assert 0 < by["seconds", storage, way, "copy"] <= took
        assert {k[3] for k in by if k[1:3] == (storage, way) and k[0] == "seconds"} == set(parts)
        io = d.api.get(f"/v1/storages/{storage}").ok(200)["io"]
        assert {x["stage"]: x[way]["bytes"] for x in io["stages"] if way in x} == parts, "the record says the same"
        assert sum(m[way]["bytes"] for m in io["minutes"] if way in m) == told
        assert all(m[way]["seconds"] <= took for m in io["minutes"] if way in m)
