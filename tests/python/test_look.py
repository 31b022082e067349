"""open, attach, the client's resources, and what people see: reprs, trees, plots, the doctor."""
import os
import shutil
import subprocess
import sys
import threading

import harness as lib
import numpy as np
import on_ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard
from unread import Unread, memfds

import dcpd


def test_open_reads_the_copy_of_what_is_gone(own):
    d = own("--tier=main=far", storages=("main", "far"))
    w = torch.arange(40.0).reshape(5, 8)
    dcpd.save({"w": w, "lr": 0.5}, "main:run/step-1")
    client = dcpd.connect()
    lib.wait_for(lambda: client.checkpoints.get("main:run/step-1")["replicated"], 30, "the copy")
    shutil.rmtree(d.storages["main"] / "run")
    ck = dcpd.open("main:run/step-1")
    assert torch.equal(ck["w"][1:3], w[1:3]) and ck["lr"] == 0.5
    with pytest.raises(dcpd.NotFound):
        dcpd.open("main:run/step-2")


def test_open_reads_slices(at):
    name = lib.fresh()
    w = torch.arange(2 * 3 * 40.0).reshape(6, 40)
    sd = {"model": {"w": w, "h": torch.randn(5).bfloat16(), "c": torch.randn(2, 2, dtype=torch.complex128), "z": torch.tensor(4)},
          "lr": 0.5, "betas": (0.9, 0.99), "none": torch.empty(0, 4)}
    dcpd.save(sd, f"main:{name}")
    ck = dcpd.open(f"main:{name}")
    assert set(ck) == {"model.w", "model.h", "model.c", "model.z", "lr", "betas", "none"} and len(ck) == 7 and "lr" in ck
    t = ck["model.w"]
    assert (t.shape, t.dtype, t.nbytes, t.ndim, len(t)) == ((6, 40), "float32", 960, 2, 6)
    for i in [slice(0, 4), (slice(None), slice(3, 7)), (slice(1, 5), 2), -1, (Ellipsis, 0), (slice(None, None, 2), slice(1, 30, 7)),
              slice(None), (2, 3), slice(4, 2), slice(-2, None)]:
        assert torch.equal(t[i], w[i]), i
    assert torch.equal(t.read(), w) and np.array_equal(np.asarray(t), w.numpy())
    with ck as same:
        assert same is ck
    assert torch.equal(ck["model.h"][1:3], sd["model"]["h"][1:3]) and torch.equal(ck["model.c"][:, 1], sd["model"]["c"][:, 1])
    assert ck["model.z"].read() == 4 and ck["none"][:].shape == (0, 4)
    assert ck["lr"] == 0.5 and ck["betas"] == (0.9, 0.99)
    for bad in (7, (0, 0, 0), (Ellipsis, Ellipsis), slice(None, None, -1), [1, 2], None):
        with pytest.raises(IndexError):
            t[bad]
    with pytest.raises(KeyError, match="nope"):
        ck["nope"]
    with pytest.raises(dcpd.NotFound):
        dcpd.open(f"main:{lib.fresh()}")


def test_statistics(at):
    w = torch.tensor([[1.0, -3.0], [0.0, float("nan")]])
    dcpd.save({"model": {"w": w, "n": torch.arange(5)}, "x": torch.zeros(2)}, f"main:{(name := lib.fresh())}")
    ck = dcpd.open(f"main:{name}")
    assert ck.stats().keys() == {"model.w", "model.n", "x"} and ck.stats("model.n", "x").keys() == {"model.n", "x"}
    got = ck.stats("*.w")["model.w"]
    assert (got["min"], got["max"], got["nan"], got["zeros"], got["count"]) == (-3, 1, 1, 1, 4)
    assert got["norm"] == pytest.approx(10 ** 0.5) and got["histogram"] == [[0, 0, 1], [1, 1, 0]]
    with pytest.raises(dcpd.NotFound):
        ck.stats("nope")


def test_merge(at):
    a, b, c = (f"main:{lib.fresh()}" for _ in "abc")
    for ref, x in ((a, 1.0), (b, 4.0)):
        dcpd.save({"w": torch.full((3,), x)}, ref)
    job = dcpd.connect().jobs.run("merge", sources=[a, b], target=c, weights=[2, 0.5])
    assert job["result"]["averaged"] == 1 and torch.equal(dcpd.load(c)["w"], torch.full((3,), 4.0))


def test_delta(at):
    """References, paths and a state dict in shared memory; another base, and a delta alone, are refused."""
    base, new, other, change, out = (f"main:{lib.fresh()}" for _ in range(5))
    w = torch.randn(300, 70).bfloat16()
    after = w.clone()
    after[7, 3:9] += 1
    for ref, t in ((base, w), (new, after), (other, w + 1)):
        dcpd.save({"w": t, "step": 3 + (ref == new)}, ref)
    result = dcpd.delta(base, at.storages["main"] / new[5:], change, encoding="overwrite")
    assert result["changed_tensors"] == 1 and "dropped" not in result and result["bytes"] < w.nbytes // 2
    assert dcpd.apply(base, change, out)["content_digest"] == result["content_digest"]
    assert torch.equal((got := dcpd.load(out))["w"], after) and got["step"] == 4
    assert dcpd.apply(base, change, f"shm:{(made := lib.fresh())}")["content_digest"] == result["content_digest"]
    dcpd.connect().state_dicts.delete(made)
    with pytest.raises(dcpd.StateDictMismatch, match=result["base_content_digest"]) as e:
        dcpd.apply(other, change, out + "-2")
    assert e.value.code == "base_mismatch"
    for read in (dcpd.load, lambda ref: dcpd.open(ref)["w"][0:1]):
        with pytest.raises(dcpd.RequestRefused, match="apply"):
            read(change)
    dcpd.connect().jobs.run("load", source=new, target=f"shm:{(name := lib.fresh())}")
    assert dcpd.delta(new, f"shm:{name}", change + "-3")["changed_tensors"] == 0
    dcpd.connect().state_dicts.delete(name)


def test_repair(at):
    name, other = f"run-{lib.fresh()}/step-1", f"run-{lib.fresh()}/step-1"
    state = {"w": torch.arange(6.0), "n": 3}
    for n in (name, other):
        dcpd.save(state, f"main:{n}")
    path = at.storages["main"] / name
    (path / ".metadata").unlink()
    assert dcpd.repair(path)["rebuilt"][0]["proven"] and torch.equal(dcpd.load(f"main:{name}")["w"], state["w"])
    (path / "__0_0.distcp").unlink()
    assert not dcpd.repair(f"main:{name}")["whole"]
    assert dcpd.repair(f"main:{name}", from_=f"main:{other}")["whole"] and dcpd.load(f"main:{name}")["n"] == 3


def test_inspect(at):
    name = lib.fresh()
    path = at.storages["main"] / f"{name}.pt"
    torch.save({"w": torch.ones(2)}, path)
    assert dcpd.inspect(f"main:{name}.pt")["safe"] and dcpd.inspect(path)["safe"]
    torch.save({"w": os.system}, path)
    got = dcpd.inspect(f"main:{name}.pt")
    assert not got["safe"] and [(g["module"], g["name"]) for g in got["globals"] if g["runs"]] == [("posix", "system")]


def test_diff(at):
    """References, paths and state dicts in shared memory, mixed."""
    a, b = lib.fresh(), lib.fresh()
    w = torch.ones(4)
    dcpd.save({"w": w, "same": w}, f"main:{a}")
    dcpd.save({"w": w * 3, "same": w}, f"main:{b}")
    got = dcpd.diff(f"main:{a}", at.storages["main"] / b)
    assert not got["equal"] and [(m["path"], m["rel_l2"], m["cosine"]) for m in got["movers"]] == [("w", 2.0, 1.0)]
    assert got["unchanged"]["by_digest"]["tensors"] == 1
    assert dcpd.diff(f"main:{a}", f"main:{b}", read_all=True)["unchanged"]["by_reading"]["tensors"] == 1
    assert dcpd.diff(f"main:{a}", f"main:{b}", exclude=["w"])["equal"] and dcpd.diff(f"main:{a}", f"main:{b}", atol=2)["equal"]
    name = lib.fresh()
    at.put(name, [lib.image({"w": ("F32", [4], w.numpy().tobytes())})])
    assert dcpd.diff(f"main:{a}", f"shm:{name}", include=["w"])["equal"]


def test_large_reads_are_cut(at, monkeypatch):
    from dcpd import _open

    monkeypatch.setattr(_open, "_PIECE", 1000)
    name = lib.fresh()
    w = torch.randn(50, 30)
    dcpd.save({"w": w}, f"main:{name}")
    assert torch.equal(dcpd.open(f"main:{name}")["w"][3:], w[3:])


@pytest.mark.long
def test_reads_wait_while_the_daemon_is_busy(own):
    """Other clients hold all that the daemon keeps for clients that have not read yet: a read goes on when they are gone."""
    d = own("--lookup-deadline", "4s")
    w = np.arange(64 << 20, dtype=np.uint32).reshape(64, -1)
    dcpd.save({"w": w}, "main:x")
    held = Unread(d, d.api.storage_path("main", "x", "/tensors/w"))
    lib.wait_for(lambda: memfds(d) == w.nbytes, 10, "the answer that nobody reads")
    t = threading.Timer(6, held.close)
    t.start()
    assert np.array_equal(np.asarray(dcpd.open("main:x")["w"][1:3]), w[1:3])
    t.join()


def test_plots_and_reprs(ranks, at):
    name = lib.fresh()
    ranks(on_ranks.save_tensors, f"main:{name}", {"w": ((8, 6), (4,), [Shard(1)]), "b": ((5,), (4,), [Shard(0)])})
    ck = dcpd.open(f"main:{name}")
    text = ck["m.w"].plot()
    # 6 columns over 4 ranks: 2, 2, 2, 0
    assert "001122" in text.replace("  ", "") and "rank 2 [0:8, 4:6]" in text
    assert "00112" in ck["m.b"].plot()
    assert "m.value.betas" in ck.tree() and "float32[8, 6]" in ck.tree()
    for page in (ck._repr_html_(), ck["m.w"]._repr_html_(), dcpd.connect()._repr_html_()):
        assert page.count("<") == page.count(">") and "m.w" in page or "dcpd" in page
    assert ck["m.w"]._repr_html_().count("<rect") == 3
    assert "world size 4" in repr(ck) and "4 chunks" in repr(ck["m.w"]) or "3 chunks" in repr(ck["m.w"])


def test_html_is_escaped(at):
    name = lib.fresh()
    dcpd.save({"<script>": torch.ones(1), "v": "<b>"}, f"main:{name}")
    ck = dcpd.open(f"main:{name}")
    assert "<script>" not in ck._repr_html_() and "<b>\"" not in ck._repr_html_()
    assert "<script>" not in ck["<script>"]._repr_html_()


def test_attach_shows_the_segment_itself(at):
    name, sd = lib.fresh(), lib.fresh()
    dcpd.save({"w": torch.arange(4.0), "n": 3}, f"main:{name}")
    c = dcpd.connect()
    c.jobs.run("load", source=f"main:{name}", target=f"shm:{sd}")
    with dcpd.attach(f"shm:{sd}") as view:
        w = view["w"]
        assert w.tolist() == [0, 1, 2, 3] and view["n"] == 3 and len(view) == 2 and sd in repr(view)
        a = dcpd.attach(sd, as_numpy=True)
        with pytest.raises(ValueError, match="read-only"):
            a["w"][0] = 1
        slot = c.state_dicts.get(sd)["ranks"][0]["slots"][0]
        file = lib.segment_file(slot["segment"])
        data = bytearray(file.read_bytes())
        at_ = data.index(w.numpy().tobytes(), 4096)
        with open(file, "r+b") as f:
            f.seek(at_)
            f.write(np.float32(7).tobytes())
        assert w[0] == 7 and a["w"][0] == 7, "one memory"
        a.close()
    c.state_dicts.delete(sd)
    assert w[0] == 7, "the memory stays while somebody looks at it"
    with pytest.raises(dcpd.NotFound):
        dcpd.attach(f"shm:{sd}")
    at.create(sd)
    with pytest.raises(dcpd.NotSealed):
        dcpd.attach(f"shm:{sd}")


def test_client_lists(at):
    """Lists by run, filter and order; what PyTorch saves over a checkpoint counts in the next one."""
    run = lib.fresh()
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        dcpd.save({"w": torch.full((4, 4), loss)}, f"main:{run}/step-{step}", metrics={"loss": loss})
    with dcpd.connect() as c:
        def steps(**query):
            return [x["step"] for x in c.checkpoints.list("main", run=run, **query)]
        assert steps(sort="metrics.loss") == [2, 3, 1] and steps(sort="metrics.loss", limit=1) == [2]
        assert steps(filter="metrics.loss<2.5 AND step>=2 AND dcpd=true", sort="-step") == [3, 2]
        assert [x["step"] for x in c.runs.get(f"main:{run}", sort="-metrics.loss")["checkpoints"]] == [1, 3, 2]
        assert [x["step"] for x in c.runs.get(f"main:{run}", filter="step!=2")["checkpoints"]] == [3, 1]
        with pytest.raises(dcpd.RequestRefused, match="character 1"):
            c.checkpoints.list("main", filter="stp=1")
        where = at.storages["main"] / run / "step-1"
        dcp.save({"w": torch.ones(64, 64), "v": torch.zeros(3)}, checkpoint_id=where)
        assert steps(sort="-time")[0] == 1 and steps(sort="-bytes")[0] == 1
        assert c.runs.get(f"main:{run}")["aliases"]["latest"] == f"{run}/step-1"


def test_client_resources(at):
    name = lib.fresh()
    dcpd.save({"w": torch.ones(4, 4)}, f"main:{name}")
    with dcpd.connect() as c:
        assert name in [x["name"] for x in c.checkpoints.list("main", prefix=name)]
        assert c.checkpoints.get(f"main:{name}")["tensors"] == 1 and c.checkpoints.exists(("main", name))
        plan = c.jobs.plan("reshard", source=f"main:{name}", target={"storage": "main", "name": name + "-r", "world_size": 2})
        assert plan and not c.checkpoints.exists(f"main:{name}-r")
        job = c.jobs.run("reshard", source=f"main:{name}", target={"storage": "main", "name": name + "-r", "world_size": 2})
        assert c.jobs.run("diff", a=f"main:{name}", b=f"main:{name}-r")["result"]["equal"]
        assert c.jobs.get(job.id).done and job.id in [j.id for j in c.jobs.list(limit=5)] and "succeeded" in repr(job)
        assert c.files if hasattr(c, "files") else c.checkpoints.files(f"main:{name}")
        c.jobs.wait(c.checkpoints.delete(f"main:{name}-r"))
        assert not c.checkpoints.exists(f"main:{name}-r")
        with pytest.raises(dcpd.RequestRefused):
            c.jobs.create("save", source="nonsense", target=f"main:{name}")
        with pytest.raises(dcpd.ProtocolMismatch, match="versions"):
            c.jobs.create("save", source="shm:x", target=f"main:{name}", from_the_future=1)
        with pytest.raises(dcpd.StateDictMismatch) as e:
            c.jobs.run("load", source=f"main:{name}", target={"state_dict": _target(at, name), })
        assert e.value.job and "w" in str(e.value)


def _target(at, name):
    at.put(name, [lib.image({"w": ("F32", [2], bytes(8))})])
    return name


def test_tcp_with_a_token(at, monkeypatch):
    tcp = at.tcp_client()
    url = "http://{}:{}".format(*tcp.tcp)
    with pytest.raises(dcpd.Forbidden):
        dcpd.connect(url)
    token = (at.state / "token").read_text().strip()
    name = lib.fresh()
    c = dcpd.connect(url, token=token)
    dcpd.save({"x": 1}, f"main:{name}", client=c)
    assert dcpd.load(f"main:{name}", client=c) == {"x": 1}
    monkeypatch.setenv("DCPD_URL", url)
    monkeypatch.setenv("DCPD_TOKEN_FILE", str(at.state / "token"))
    assert dcpd.load(f"main:{name}") == {"x": 1}


def test_doctor(at, tmp_path):
    def run(**env):
        e = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(dcpd.__file__)), **env}
        return subprocess.run([sys.executable, "-m", "dcpd", "doctor"], env=e, capture_output=True, text=True, timeout=60)

    left = tmp_path / "left"
    left.mkdir()
    dcpd.save({"x": torch.ones(4)}, left / "ckpt")  # a storage of this directory, which outlives it
    shutil.rmtree(left)
    good = run()
    assert good.returncode == 0 and "FAIL" not in good.stdout and "storage main" in good.stdout, good.stdout + good.stderr
    bad = run(DCPD_URL=f"unix://{tmp_path}/none")
    assert bad.returncode == 1 and "FAIL" in bad.stdout and "start one" in bad.stdout


def test_progress_is_shown(at, capsys, monkeypatch):
    for name in ("tqdm", "tqdm.auto"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    dcpd.save({"x": torch.ones(1000)}, f"main:{lib.fresh()}", progress=True)
    assert "succeeded" in capsys.readouterr().err


def test_progress_is_shown_with_tqdm(at, capsys):
    pytest.importorskip("tqdm")
    dcpd.save({"x": torch.ones(1000)}, f"main:{lib.fresh()}", progress=True)
    assert "100%" in capsys.readouterr().err
