"""Webhooks: what happens to checkpoints is posted, signed, to those who asked; once each, whatever dies."""
import hashlib
import hmac
import json
import shutil
import ssl
import subprocess
import threading
import time

import package
import pytest
from crafted import Crafted
from receiver import Receiver

import dcpd as lib

SECRET = b"a secret of sixteen bytes or more"


@pytest.fixture(scope="module")
def wd(tmp_path_factory):
    """A daemon that may post to 127.0.0.0/8."""
    d = lib.Daemon(tmp_path_factory.mktemp("webhooks"), ("main", "other"), ["--webhook-allow", "127.0.0.0/8"])
    secret(d)
    yield d
    d.discard()


@pytest.fixture
def receiver():
    r = Receiver()
    yield r
    r.close()


def secret(d, name="s", data=SECRET + b"\n", mode=0o600):
    folder = d.state / "secrets"
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(data)
    (folder / name).chmod(mode)


def put(d, name, url, events=("checkpoint.durable",), **more):
    return d.api.request("PUT", f"/v1/webhooks/{name}", {"url": url, "secret": "s", "events": list(events), **more})


def deliveries(d, name):
    return d.api.get(f"/v1/webhooks/{name}/deliveries").ok(200)["deliveries"]


def settled(d, name, n=1, state="done"):
    """The deliveries, once n of them are in that state."""
    return lib.wait_for(lambda: (got := deliveries(d, name)) and sum(x["state"] == state for x in got) >= n and got, 60, f"{n} {state}")


def save(d, name, **more):
    sd = lib.fresh()
    d.put(sd, [lib.image({"a": ("U8", [50], bytes(50))})])
    j = d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": name}, **more)
    d.drop(sd)
    return j


def check_signature(headers, body):
    parts = dict(p.split("=", 1) for p in headers["Dcpd-Signature"].split(","))
    assert set(parts) == {"t", "v1"} and abs(int(parts["t"]) - time.time()) < 300
    assert parts["v1"] == hmac.new(SECRET, parts["t"].encode() + b"." + body, hashlib.sha256).hexdigest()


def test_a_save_is_told(wd, receiver):
    run = lib.fresh("run")
    made = put(wd, "told", receiver.url, storage="main", match=run).ok(200)
    assert made["url"] == receiver.url and made["events"] == ["checkpoint.durable"] and made["uid"] == 0 and "secret" in made
    j = save(wd, f"{run}/step-7", labels={"a": "b"})
    save(wd, f"{run}-not/step-7")
    (path, headers, body), = receiver.wait(1)
    check_signature(headers, body)
    told = json.loads(body)
    assert path == "/hook" and headers["Content-Type"] == "application/json" and headers["User-Agent"].startswith("dcpd/")
    assert told["event"] == "checkpoint.durable" and told["id"] == headers["Dcpd-Delivery"] and told["webhook"] == "told"
    record = wd.api.get(wd.api.storage_path("main", f"{run}/step-7")).ok(200)
    assert {k: v for k, v in told["checkpoint"].items() if k != "storage"}.items() <= {**record, "verified": None}.items()
    assert told["checkpoint"]["name"] == f"{run}/step-7" and told["checkpoint"]["storage"] == "main" and told["job"] == j["id"]
    one, = settled(wd, "told")
    assert one["id"] == told["id"] and one["attempts"] == 1 and one["status"] == 200 and one["event"] == "checkpoint.durable"
    assert len(receiver.got) == 1
    assert wd.api.delete("/v1/webhooks/told").status == 204
    wd.api.get("/v1/webhooks/told").problem("not_found", status=404)


def test_events_of_all_kinds(wd, receiver):
    run = lib.fresh("run")
    root = wd.storages["main"]
    put(wd, "kinds", receiver.url, ["checkpoint.verified", "checkpoint.damaged", "checkpoint.removed", "job.failed"], match=run).ok(200)
    Crafted(root, "torch-2.15.0/plain", f"{run}/good")
    bad = Crafted(root, "torch-2.15.0/plain", f"{run}/bad")
    data = next(bad.dir.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-200] + bytes(200))
    wd.api.run("verify", source={"storage": "main", "name": f"{run}/good"}, level="digest")
    wd.api.fails("verify", "digest_mismatch", "format_zip", "format_item", "checkpoint_damaged", "format_pickle",
                 source={"storage": "main", "name": f"{run}/bad"}, level="digest")
    wd.api.run("delete", target={"storage": "main", "name": f"{run}/good"})
    told = {e["event"]: e for e in receiver.events(4)}
    assert set(told) == {"checkpoint.verified", "checkpoint.damaged", "checkpoint.removed", "job.failed"}
    assert told["checkpoint.damaged"]["checkpoint"]["name"] == f"{run}/bad" == told["job.failed"]["checkpoint"]["name"]
    assert told["checkpoint.verified"]["checkpoint"]["name"] == f"{run}/good"
    assert told["checkpoint.removed"]["checkpoint"] == {"storage": "main", "name": f"{run}/good"}
    assert told["job.failed"]["error"]["code"]
    shutil.rmtree(root / run)
    wd.api.delete("/v1/webhooks/kinds")


def test_tried_again_with_one_id(wd, receiver):
    receiver.answers = [500, 301, 503]
    put(wd, "again", receiver.url).ok(200)
    one = wd.api.post("/v1/webhooks/again:test", {}).ok(202)
    assert one["event"] == "webhook.test" and one["state"] == "waiting"
    for n in range(1, 4):
        receiver.wait(n)
        got, = lib.wait_for(lambda: [x for x in deliveries(wd, "again") if x["attempts"] == n], 20)
        assert got["state"] == "waiting" and got["status"] == (500, 301, 503)[n - 1] and "next_at" in got
        wd.api.post(f"/v1/webhooks/again/deliveries/{one['id']}:retry", {}).ok(202)  # not to wait for the back-off
    got, = settled(wd, "again")
    assert got["attempts"] == 4 and got["status"] == 200
    assert {h["Dcpd-Delivery"] for _, h, _ in receiver.got} == {one["id"]} and len({b for _, _, b in receiver.got}) == 1
    for _, headers, body in receiver.got:
        check_signature(headers, body)
    wd.api.delete("/v1/webhooks/again")


def test_backs_off_by_itself(wd, receiver):
    receiver.answers = [500]
    put(wd, "off", receiver.url).ok(200)
    wd.api.post("/v1/webhooks/off:test").ok(202)
    receiver.wait(2)
    assert settled(wd, "off")[0]["attempts"] == 2
    wd.api.delete("/v1/webhooks/off")


def test_once_over_kills_and_restarts(spawn):
    d = spawn(args=["--webhook-allow", "127.0.0.1/32"])
    secret(d)
    r = Receiver(status=500)
    put(d, "kept", r.url).ok(200)
    save(d, "run1/step-1")
    first, = r.events(1)
    d.kill()
    d.start()
    r.status = 200
    lib.wait_for(lambda: any(x["state"] == "done" for x in deliveries(d, "kept")) or
                 [d.api.post(f"/v1/webhooks/kept/deliveries/{first['id']}:retry")] and False, 30)
    one, = deliveries(d, "kept")
    assert one["id"] == first["id"] and one["state"] == "done"
    d.kill()
    d.start()
    save(d, "run1/step-2")
    second = lib.wait_for(lambda: [json.loads(b) for _, _, b in r.got if json.loads(b)["id"] != first["id"]], 30)
    assert {e["checkpoint"]["name"] for e in second} == {"run1/step-2"}
    assert [x["state"] for x in settled(d, "kept", 2)] == ["done", "done"]
    release = threading.Event()
    r.answers = [lambda h: release.wait(60)]
    sent = len(r.got)
    third = d.api.post("/v1/webhooks/kept:test").ok(202)
    r.wait(sent + 1)
    assert d.stop() == 0  # it does not wait for the receiver
    release.set()
    d.start()
    assert [x["id"] for x in settled(d, "kept", 3)][0] == third["id"] == json.loads(r.wait(sent + 2)[-1][2])["id"]
    assert d.stop() == 0
    r.close()


def test_a_receiver_that_hangs_delays_no_other(wd, receiver):
    release = threading.Event()
    slow = Receiver(answers=[lambda h: release.wait(60)] * 8)
    put(wd, "slow", slow.url).ok(200)
    put(wd, "quick", receiver.url).ok(200)
    for _ in range(6):
        wd.api.post("/v1/webhooks/slow:test").ok(202)
    slow.wait(4)
    for _ in range(3):
        wd.api.post("/v1/webhooks/quick:test").ok(202)
    settled(wd, "quick", 3)
    save(wd, f"{lib.fresh('run')}/a")
    assert len(slow.got) == 4 and all(x["state"] == "waiting" for x in deliveries(wd, "slow"))
    one = next(x["id"] for x in deliveries(wd, "slow") if json.loads(slow.got[0][2])["id"] == x["id"])
    wd.api.post(f"/v1/webhooks/slow/deliveries/{one}:retry").problem("state_conflict", status=409)
    release.set()
    wd.api.delete("/v1/webhooks/slow")  # while it is being told
    wd.api.delete("/v1/webhooks/quick")
    slow.close()


def test_redirects_are_not_followed(wd, receiver):
    def redirect(h):
        h.send_response(302)
        h.send_header("Location", f"http://127.0.0.1:{receiver.port}/elsewhere")
        h.end_headers()

    receiver.answers = [redirect]
    put(wd, "moved", receiver.url).ok(200)
    wd.api.post("/v1/webhooks/moved:test").ok(202)
    got, = lib.wait_for(lambda: [x for x in deliveries(wd, "moved") if x["attempts"] == 1], 20)
    assert got["status"] == 302 and got["state"] == "waiting"
    wd.api.delete("/v1/webhooks/moved")
    assert all(path == "/hook" for path, _, _ in receiver.got)


def test_a_long_answer_is_not_read_whole(wd, receiver):
    def flood(h):
        h.send_response(200)
        h.end_headers()
        try:
            for _ in range(4000):
                h.wfile.write(bytes(65536))
        except OSError:
            pass

    receiver.answers = [flood]
    put(wd, "flood", receiver.url).ok(200)
    wd.api.post("/v1/webhooks/flood:test").ok(202)
    assert settled(wd, "flood")[0]["status"] == 200
    wd.api.delete("/v1/webhooks/flood")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0x7f.1", "2130706433", "0.0.0.0"])
def test_private_addresses_are_refused(d, receiver, host):
    """What counts is the address that is connected to, whatever the name says."""
    secret(d)
    put(d, "private", f"http://{host}:{receiver.port}/").ok(200)
    d.api.post("/v1/webhooks/private:test").ok(202)
    got, = settled(d, "private", state="failed")
    assert "--webhook-allow" in got["error"] and got["attempts"] == 1 and not receiver.got, got
    assert d.api.delete("/v1/webhooks/private").status == 204


def test_certificates_are_checked(wd, receiver, tmp_path):
    if not shutil.which("openssl"):
        pytest.skip("no openssl to make a certificate with")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj",
                    "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", tmp_path / "key", "-out", tmp_path / "cert"],
                   check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    receiver.server.socket = tls.wrap_socket(receiver.server.socket, server_side=True)
    put(wd, "tls", receiver.url.replace("http:", "https:")).ok(200)
    wd.api.post("/v1/webhooks/tls:test").ok(202)
    got, = lib.wait_for(lambda: [x for x in deliveries(wd, "tls") if x["attempts"]], 20)
    assert "certificate" in got["error"] and got["state"] == "waiting" and not receiver.got, got
    wd.api.delete("/v1/webhooks/tls")


def test_nobody_listens(wd):
    r = Receiver()
    r.close()
    put(wd, "nobody", r.url).ok(200)
    wd.api.post("/v1/webhooks/nobody:test").ok(202)
    got, = lib.wait_for(lambda: [x for x in deliveries(wd, "nobody") if x["attempts"]], 20)
    assert got["state"] == "waiting" and got["error"] and "status" not in got
    wd.api.delete("/v1/webhooks/nobody")


def test_a_secret_that_went_is_said(wd, receiver):
    secret(wd, "gone")
    wd.api.request("PUT", "/v1/webhooks/gone", {"url": receiver.url, "secret": "gone", "events": ["job.failed"]}).ok(200)
    (wd.state / "secrets" / "gone").unlink()
    wd.api.post("/v1/webhooks/gone:test").ok(202)
    got, = lib.wait_for(lambda: [x for x in deliveries(wd, "gone") if x["attempts"]], 20)
    assert "there is no secret gone" in got["error"] and not receiver.got
    wd.api.delete("/v1/webhooks/gone")


def test_pages(wd, receiver):
    put(wd, "pages", receiver.url).ok(200)
    ids = [wd.api.post("/v1/webhooks/pages:test").ok(202)["id"] for _ in range(5)]
    got, token = [], ""
    while token is not None:
        page = wd.api.get(f"/v1/webhooks/pages/deliveries?page_size=2{token}").ok(200)
        got += [x["id"] for x in page["deliveries"]]
        token = f"&page_token={page['next_page_token']}" if "next_page_token" in page else None
    assert got == ids[::-1]
    assert "pages" in [h["name"] for h in wd.api.get("/v1/webhooks").ok(200)["webhooks"]]
    wd.api.delete("/v1/webhooks/pages")


def test_bad_requests(wd):
    good = {"url": "https://example.org/x", "secret": "s", "events": ["checkpoint.durable"]}

    def refused(code, pointer, **change):
        body = {k: v for k, v in {**good, **change}.items() if v is not None}
        p = wd.api.request("PUT", "/v1/webhooks/bad", body).problem(code, status=422)
        assert p.get("pointer") == pointer, p

    for url in ("ftp://x/", "x", "http://u:p@x/", "https://x/#f", "", 1):
        refused("validation_failed", "/url", url=url)
    refused("validation_failed", "/url", url=None)
    refused("validation_failed", "/secret", secret="nope")
    refused("name_invalid", "/secret", secret="../token")
    secret(wd, "open", mode=0o644)
    refused("validation_failed", "/secret", secret="open")
    secret(wd, "short", b"short")
    refused("validation_failed", "/secret", secret="short")
    refused("validation_failed", "/events", events=[])
    refused("validation_failed", "/events/0", events=["checkpoint.durabel"])
    refused("validation_failed", "/events/0", events=["webhook.test"])
    refused("validation_failed", "/match", match="")
    refused("name_invalid", "/storage", storage="X")
    refused("unknown_field", "/x", x=1)
    wd.api.request("PUT", "/v1/webhooks/.x", good).problem("name_invalid", status=422)
    wd.api.get("/v1/webhooks/nope").problem("not_found", status=404)
    wd.api.delete("/v1/webhooks/nope").problem("not_found")
    wd.api.post("/v1/webhooks/nope:test").problem("not_found")
    wd.api.request("PUT", "/v1/webhooks/some", good).ok(200)
    wd.api.post("/v1/webhooks/some/deliveries/01ARZ3NDEKTSV4RRFFQ69G5FAV:retry").problem("not_found")
    wd.api.delete("/v1/webhooks/some")


def test_dcpctl(wd, receiver):
    assert wd.ctl("webhook", "c", "--to", receiver.url, "--secret", "s", "--event", "checkpoint.durable", "--event", "job.failed",
                  "--match", "none").returncode == 0
    shown = json.loads(wd.ctl("webhook", "c", "--json").stdout)
    assert shown["events"] == ["checkpoint.durable", "job.failed"] and shown["match"] == "none"
    assert wd.ctl("webhook", "c", "--test").returncode == 0
    settled(wd, "c")
    r = wd.ctl("webhook", "c", "--deliveries")
    assert r.returncode == 0 and "webhook.test" in r.stdout and "done" in r.stdout and "200" in r.stdout, r
    assert receiver.url in wd.ctl("webhooks").stdout
    assert wd.ctl("webhook", "c", "--rm").returncode == 0 and wd.ctl("webhook", "c").returncode == 6
    r = wd.ctl("webhook", "c", "--to", receiver.url, "--secret", "nope", "--event", "job.failed")
    assert r.returncode == 2 and "there is no secret nope" in r.stderr, r


def test_python(wd, receiver):
    with package.daemon(f"unix://{wd.socket}") as dcpd, dcpd.connect() as c:
        made = c.webhooks.put("py", receiver.url, "s", ["job.failed"], match="none")
        assert made["events"] == ["job.failed"] and c.webhooks.get("py") == made and made in c.webhooks.list()
        one = c.webhooks.test("py")
        settled(wd, "py")
        assert [x["id"] for x in c.webhooks.deliveries("py", limit=1)] == [one["id"]]
        (_, headers, body), = receiver.wait(1)
        assert dcpd.verify_webhook(body, headers["Dcpd-Signature"], SECRET)
        assert dcpd.verify_webhook(body, headers["Dcpd-Signature"], SECRET.decode())
        assert c.webhooks.retry("py", one["id"])["id"] == one["id"]
        receiver.wait(2)
        c.webhooks.delete("py")
        with pytest.raises(dcpd.NotFound):
            c.webhooks.get("py")


def test_verify_webhook(wd):
    with package.daemon(f"unix://{wd.socket}") as dcpd:
        verify = dcpd.verify_webhook
    now = int(time.time())

    def header(t, key=SECRET, body=b"{}"):
        return f"t={t},v1=" + hmac.new(key, f"{t}.".encode() + body, hashlib.sha256).hexdigest()

    assert verify(b"{}", header(now), SECRET) and verify(b"{}", header(now - 200), SECRET)
    assert verify(b"{}", header(now - 900), SECRET, 1000)
    assert not verify(b"{}", header(now - 301), SECRET) and not verify(b"{}", header(now + 400), SECRET)
    assert not verify(b"{ }", header(now), SECRET) and not verify(b"{}", header(now), b"another")
    good = header(now)
    for bad in ("", "t=,v1=", f"t={now}", f"v1={good[-64:]}", good[:-1], good.replace("t=", "t=x"), "t=1,v1=é", "t=²,v1=a"):
        assert not verify(b"{}", bad, SECRET), bad
