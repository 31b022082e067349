"""The drop-in where PyTorch's users bring something of their own: planners, extensions, subclasses, another process, an older PyTorch."""
import io
import json
import os
import pathlib
import re
import subprocess
import sys

import harness as lib
import on_ranks
import on_versions
import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_dropin import load, path, same, save, state  # noqa: F401
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension

import dcpd
from dcpd.torch import StorageReader, StorageWriter

HERE = pathlib.Path(__file__).resolve().parent
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class Invert(StreamTransformExtension):
    """Every byte inverted."""

    @staticmethod
    def registry_name():
        return "stream.invert"

    @staticmethod
    def from_descriptor(version):
        return Invert()

    def get_descriptor(self):
        return "stream.invert/1"

    def transform_to(self, output):
        class Out(io.RawIOBase):
            def write(self, b):
                output.write(bytes(255 - x for x in bytes(b)))
                return len(b)

            def flush(self):
                output.flush()

        return Out()

    def transform_from(self, input):
        return io.BytesIO(bytes(255 - x for x in input.read()))


def test_an_extension_of_ones_own(path):  # noqa: F811
    sd = {"t": torch.arange(50.0), "v": {"a": [1]}}
    new = {"t": torch.zeros(50), "v": {"a": [0]}}
    save(sd, StorageWriter(path, _extensions=[Invert()]))
    for reader in (dcp.FileSystemReader, StorageReader):
        registry = ExtensionRegistry()
        registry.register(Invert)
        same(load(new, reader(path, _extension_registry=registry)), sd)
    with pytest.raises(dcp.CheckpointException, match="invert"):
        load(new, StorageReader(path))


class Half(dcp.DefaultSavePlanner):
    """Saves tensors as bfloat16, with data and an attribute of its own in the metadata."""

    def create_global_plan(self, plans):
        plans, md = super().create_global_plan(plans)
        md.planner_data = {**md.planner_data, "__note__": ("half", 1)}
        md.attribute_of_mine = {"k": [1, 2]}
        return plans, md

    def transform_object(self, item, obj):
        return obj.bfloat16() if isinstance(obj, torch.Tensor) else super().transform_object(item, obj)


def test_a_planner_of_ones_own(path):  # noqa: F811
    sd = {"w": torch.randn(100, 100)}
    save(sd, StorageWriter(path), planner=Half())
    md = dcp.FileSystemReader(path).read_metadata()
    assert md.attribute_of_mine == {"k": [1, 2]} and md.planner_data["__note__"] == ("half", 1)
    got = load({"w": torch.zeros(100, 100)}, dcp.FileSystemReader(path))
    assert torch.equal(got["w"], sd["w"].bfloat16().float())
    assert torch.load(io.BytesIO(stored(path, "w")), weights_only=True).dtype == torch.bfloat16


def stored(path, fqn):  # noqa: F811
    (info,) = [v for k, v in dcp.FileSystemReader(path).read_metadata().storage_data.items() if k.fqn == fqn]
    return (path / info.relative_path).read_bytes()[info.offset:info.offset + info.length]


def test_a_load_planner_of_ones_own(path):  # noqa: F811
    save({"w": torch.arange(6.0), "v": [1, 2]}, StorageWriter(path))
    seen = []

    class Planner(dcp.DefaultLoadPlanner):
        def load_bytes(self, item, value):
            seen.append(("bytes", item.dest_index.fqn))
            super().load_bytes(item, value)

        def commit_tensor(self, item, tensor):
            seen.append(("commit", item.dest_index.fqn, tensor.tolist()))

    load({"w": torch.zeros(6), "v": [0, 0]}, StorageReader(path), planner=Planner())
    assert sorted(seen) == sorted([("bytes", "v"), ("commit", "w", [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])])


def test_cached_plans(path):  # noqa: F811
    for i in range(3):
        save(state(i), StorageWriter(path), planner=dcp.DefaultSavePlanner(enable_plan_caching=True))
        same(load(state(9), dcp.FileSystemReader(path)), state(i))


def test_a_subclass_and_a_prefix_of_ones_own(path):  # noqa: F811
    class Mine(StorageWriter):
        def prepare_local_plan(self, plan):
            import dataclasses

            from torch.distributed.checkpoint.filesystem import _StoragePrefix

            return dataclasses.replace(super().prepare_local_plan(plan), storage_data=_StoragePrefix("mine_"))

        def write_data(self, plan, planner):
            self.results = super().write_data(plan, planner).wait()
            from torch.futures import Future

            f = Future()
            f.set_result(list(self.results))
            return f

    w = Mine(path)
    save(state(), w)
    assert "mine_0.distcp" in os.listdir(path) and all(isinstance(r, dcp.storage.WriteResult) for r in w.results)
    same(load(state(1), dcp.FileSystemReader(path)), state())


def test_a_stager_of_ones_own(path):  # noqa: F811
    class Stager(dcp.staging.BlockingAsyncStager):
        calls = 0

        def stage(self, sd):
            Stager.calls += 1
            return super().stage(sd)

    sd = {"w": torch.ones(1000)}
    f = dcp.async_save(sd, storage_writer=StorageWriter(path), async_stager=Stager(), no_dist=True)
    sd["w"].zero_()
    f.result(60)
    assert Stager.calls == 1 and load({"w": torch.zeros(1000)}, dcp.FileSystemReader(path))["w"].all()


PROCESS = """
import os, sys, torch, warnings
warnings.simplefilter("ignore")
import torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from dcpd.torch import StorageWriter

def main():
    dist.init_process_group("gloo", init_method="file://" + sys.argv[1] + ".store", rank=0, world_size=1)
    os.environ["MASTER_ADDR"] = "localhost"
    w = StorageWriter(sys.argv[1])
    for i in range(2):
        sd = {"w": torch.full((300, 300), 1.0 + i), "v": {"a": i}}
        f = dcp.async_save(sd, storage_writer=w, async_checkpointer_type=AsyncCheckpointerType.PROCESS)
        sd["w"].zero_()
        f.result(120)
        new = {"w": torch.zeros(300, 300), "v": {"a": -1}}
        dcp.load(new, storage_reader=dcp.FileSystemReader(sys.argv[1]))
        assert torch.equal(new["w"], torch.full((300, 300), 1.0 + i)) and new["v"] == {"a": i}, new
    print("both")

if __name__ == "__main__":
    main()
"""


@pytest.mark.long
@pytest.mark.seconds(200)
def test_async_by_a_process(script, path):  # noqa: F811
    assert "both" in script(PROCESS, path, timeout=180).stdout


KILLED = """
import multiprocessing, os, signal, sys, torch, warnings
warnings.simplefilter("ignore")
import torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from dcpd.torch import StorageWriter

def begin(x):
    return dcp.async_save({"w": torch.full((300, 300), x)}, storage_writer=StorageWriter(sys.argv[1]),
                          async_checkpointer_type=AsyncCheckpointerType.PROCESS)

def holds(x):
    new = {"w": torch.zeros(300, 300)}
    dcp.load(new, storage_reader=dcp.FileSystemReader(sys.argv[1]))
    assert torch.equal(new["w"], torch.full((300, 300), x)), new

def main():
    dist.init_process_group("gloo", init_method="file://" + sys.argv[1] + ".store", rank=0, world_size=1)
    os.environ["MASTER_ADDR"] = "localhost"
    begin(1.0).result(120)
    child = multiprocessing.active_children()[0].pid
    os.kill(child, signal.SIGSTOP)
    f = begin(2.0)
    os.kill(child, signal.SIGKILL)
    try:
        f.result(60)
    except Exception as e:
        print("told:", type(e).__name__)
    holds(1.0)
    executor._CHECKPOINT_PROCESS = None
    begin(3.0).result(120)
    holds(3.0)

if __name__ == "__main__":
    main()
"""


@pytest.mark.long
@pytest.mark.seconds(200)
def test_the_process_of_an_async_save_is_killed(script, path):  # noqa: F811
    """PyTorch says it at the future; what was saved before is there, and the next save is made."""
    assert "told:" in script(KILLED, path, timeout=180).stdout


def test_an_optimizers_state(path):  # noqa: F811
    from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict as theirs
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    from dcpd.torch import load_sharded_optimizer_state_dict as ours

    def made(seed):
        torch.manual_seed(seed)
        m = torch.nn.Linear(5, 3)
        o = torch.optim.AdamW(m.parameters())
        m(torch.randn(2, 5)).sum().backward()
        o.step()
        return m, o

    m, o = made(0)
    model, optim = get_state_dict(m, o)
    save({"model": model, "optim": optim}, StorageWriter(path))
    m2, o2 = made(1)
    model2, optim2 = get_state_dict(m2, o2)
    new = load({"model": model2, "optim": optim2}, StorageReader(path))
    set_state_dict(m2, o2, model_state_dict=new["model"], optim_state_dict=new["optim"])
    assert torch.equal(m2.weight, m.weight) and torch.equal(o2.state[m2.weight]["exp_avg"], o.state[m.weight]["exp_avg"])
    assert ours.__code__.co_varnames[:4] == theirs.__code__.co_varnames[:4]


# ---- fsync ----


@pytest.mark.skipif(not os.path.exists("/usr/bin/strace"), reason="needs strace")
def test_sync_files(tmp_path, monkeypatch):
    """The files that the daemon's processes fsync, by strace."""
    d = lib.Daemon(tmp_path / "own", args=["--io-engine", "threads"])
    out = tmp_path / "strace"
    monkeypatch.setenv("DCPD_URL", f"unix://{d.socket}")
    p = subprocess.Popen(["strace", "-f", "-yy", "-e", "trace=fsync,fdatasync", "-o", str(out), "-p", str(d.proc.pid)],
                         stderr=subprocess.PIPE, text=True)
    try:
        assert "attached" in p.stderr.readline()
        sd = {f"t{i}": torch.ones(100_000) for i in range(2)}
        for sync in (True, False):
            save(sd, StorageWriter(d.storages["main"] / str(sync), single_file_per_rank=False, sync_files=sync))
    finally:
        dcpd.close()
        p.terminate()
        p.wait()
        p.stderr.close()
        d.discard()
    synced = [line for line in out.read_text().splitlines() if ".distcp>" in line]
    assert sorted(set(re.findall(r"/([^/>]+[.]distcp)>", "\n".join(synced)))) == ["__0_0.distcp", "__0_1.distcp"] and len(synced) == 2


# ---- a list that is wrong ----


def listed(client, items, data, metadata=b"x"):
    from dcpd import image
    from dcpd.torch import _lane

    lane = _lane.take(client, len(data))
    lane.map[_lane.HEAD:_lane.HEAD + len(data)] = data
    lane.seal()
    index = _lane.take(client, 1, "list")
    pairs = [("items", items if isinstance(items, bytes) else json.dumps(items).encode()), ("metadata", metadata)]
    index.put_image(image.dump([(image.ChunkSpec(k, "uint8", (len(v),), (0,), (len(v),)), v) for k, v in pairs]))
    try:
        return client.jobs.run("save", target=f"main:{lib.fresh()}", source={
            "state_dict": index.name, "generation": index.generation,
            "parts": [{"state_dict": lane.name, "generation": lane.generation}]})
    finally:
        lane.let_go()
        index.let_go()


GOOD = {"metadata_name": ".metadata", "files": [["__0_0.distcp", 0, False]], "items": [[0, 0, 4096, 16, "w", "float32", [4]]]}


def other(**kw):
    return {**GOOD, **kw}


def item(i, x):
    one = list(GOOD["items"][0])
    one[i] = x
    return other(items=[one])


@pytest.mark.parametrize("items", [
    b"{", b"[]", other(metadata_name="../x"), other(metadata_name="__.metadata"), other(files=[["../x", 0, False]]),
    other(files=[["a/b", 0, False]]), other(files=[[".x", 0, False]]), other(files=[["x", -1, False]]),
    other(files=[["x", 1 << 40, False]]), other(files=[[7, 0, False]]), item(0, 1), item(0, -1), item(1, 1),
    item(2, 1 << 62), item(2, 1 << 20), item(3, 15), item(3, -16),
    item(4, 7), item(5, "float33"), item(6, [5]), item(6, [-4]), item(6, [1 << 62, 1 << 62]), item(6, ["4"]), item(6, [1] * 100),
    other(items=[[]]), other(items=[7])])
def test_a_list_that_is_wrong_is_refused(at, items):
    client = dcpd.connect()
    with pytest.raises(dcpd.DcpdError) as e:
        listed(client, items, bytes(16))
    assert e.value.code in ("validation_failed", "dtype_unsupported", "limit_exceeded"), e.value.code


def test_metadata_that_name_what_was_not_written(at, path):  # noqa: F811
    save({"w": torch.zeros(4)}, StorageWriter(path))
    metadata = (path / ".metadata").read_bytes()
    client = dcpd.connect()
    job = listed(client, GOOD, bytes(16), metadata)  # the same item: it fits
    assert job["result"]["metadata_checked"]
    with pytest.raises(dcpd.DcpdError, match="not written") as e:
        listed(client, item(6, [2, 2]) | {"files": [["__0_1.distcp", 0, False]]}, bytes(16), metadata)
    assert e.value.code == "format_metadata" and e.value.fqn == "w"


# ---- older versions ----


@pytest.mark.slow
@pytest.mark.seconds(3600)
@pytest.mark.parametrize("version", ["2.3", "2.6", "2.9"])
def test_older_pytorch(d, at, version):
    made = subprocess.run([HERE.parent / "venv.sh", HERE.parent / f"interop/versions/torch-{version}.txt"], capture_output=True, text=True,
                          env={**os.environ, "DCPD_TEST_VENV": ""})
    assert made.returncode == 0, made.stderr[-2000:]
    folder = d.storages["main"] / lib.fresh()
    folder.mkdir()
    save(on_versions.state(), StorageWriter(folder / "newest"))
    python = pathlib.Path(made.stdout.strip()) / "bin/python"
    r = subprocess.run([python, HERE / "on_versions.py", folder], capture_output=True, text=True, timeout=600,
                       env={**os.environ, "PYTHONPATH": str(HERE.parents[1] / "api/python"), "DCPD_URL": f"unix://{d.socket}"})
    assert r.returncode == 0, r.stdout[-2000:] + r.stderr[-4000:]


def test_a_checkpoint_whose_files_are_not_here(path, monkeypatch, tmp_path):  # noqa: F811
    """The daemon has it, this process has not its directory: an error that says so, and what can be done; else as PyTorch has it."""
    save({"a": torch.ones(3)}, StorageWriter(path))
    reference = f"main:{path.name}"
    real = dcpd.client.Storages.get
    monkeypatch.setattr(dcpd.client.Storages, "get", lambda self, name: {**real(self, name), "path": str(tmp_path / "elsewhere")})
    with pytest.raises(dcpd.errors.Forbidden) as e:
        StorageReader(reference).read_metadata()
    assert e.value.file == ".metadata" and reference in str(e.value) and "elsewhere" in str(e.value) and "dcpd.load()" in str(e.value)
    for absent in (lambda: StorageReader(reference).read_metadata(rank=3), StorageReader("main:no-such").read_metadata,
                   StorageReader(tmp_path / "nothing").read_metadata):
        with pytest.raises(FileNotFoundError):
            absent()


@pytest.mark.parametrize("alike", [True, False], ids=["alike", "cut in another way"])
@pytest.mark.parametrize("how", ["alias", "link"])
def test_what_moves_while_ranks_ask_is_one_checkpoint_for_all(ranks, d, tmp_path, how, alike):
    run = lib.fresh()
    path = f"main:{run}@latest" if how == "alias" else str(d.storages["main"] / run / "latest")
    got = ranks(on_ranks.dropin_while_another_is_saved, f"main:{run}", path, str(tmp_path / "asked"), alike, world=2)
    if alike:
        assert got == [([1.0], 1)] * 2
    else:
        assert got[0] == got[1] and len(got[0]) == 1 and "load again" in got[0][0] and "step-1 on the coordinator" in got[0][0], got


@pytest.mark.parametrize("case", ["both are links", "one is a link", "another"])
def test_one_checkpoint_that_hosts_mount_at_different_paths_is_loaded_from_each(ranks, d, tmp_path, case):
    got = ranks(on_ranks.dropin_from_each_hosts_mount, d.storages["main"] / lib.fresh(), str(tmp_path), case, world=2)
    if case != "another":
        assert got == [([1.0], 1)] * 2
    else:
        assert got[0] == got[1] and len(got[0]) == 1 and "not the checkpoint that the coordinator found" in got[0][0], got


def test_a_rank_that_reads_what_another_found_reads_its_own_metadata_there(at, tmp_path):
    for i, link in enumerate(("latest", "later")):
        dcp.save({"x": torch.full((4,), float(i))}, storage_writer=dcp.FileSystemWriter(tmp_path / f"step-{i}"), no_dist=True,
                 use_collectives=False)
        (tmp_path / link).symlink_to(f"step-{i}")

    class Told(StorageReader):
        def prepare_global_plan(self, plans):
            coordinator = StorageReader(tmp_path / "later")
            coordinator.read_metadata(rank=0)
            return coordinator.prepare_global_plan(plans)

    got = {"x": torch.zeros(4)}
    dcp.load(got, storage_reader=Told(tmp_path / "latest"), no_dist=True)
    assert got["x"].eq(1).all()
