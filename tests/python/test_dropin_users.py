"""The drop-in as programs use it that know PyTorch's classes: forks, pickles, caches, subclasses, threads, isinstance."""
import io
import os
import pickle
import threading
import warnings

import harness as lib
import on_ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_dropin import load, path, same, save, state  # noqa: F401

import dcpd
from dcpd.torch import StorageReader, StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def test_isinstance_without_inheritance(tmp_path):
    w, r = StorageWriter(tmp_path / "x"), StorageReader(tmp_path / "x")
    assert isinstance(w, dcp.FileSystemWriter) and isinstance(r, dcp.FileSystemReader)
    assert dcp.FileSystemWriter not in StorageWriter.__mro__ and dcp.FileSystemReader not in StorageReader.__mro__
    assert not isinstance(dcp.FileSystemWriter(tmp_path / "y"), StorageWriter)


def test_the_same_arguments_in_the_same_order(tmp_path):
    import inspect

    for ours, theirs in ((StorageWriter, dcp.FileSystemWriter), (StorageReader, dcp.FileSystemReader)):
        a, b = (list(inspect.signature(c.__init__).parameters.values()) for c in (ours, theirs))
        assert [p.name for p in a[:len(b)]] == [p.name for p in b]
        assert all(p.kind == p.KEYWORD_ONLY for p in a[len(b):]), "arguments of dcpd's own"
    given = ("a/b", False, False, 3, 0, True, False, [], None)
    w, t = StorageWriter(*given), dcp.FileSystemWriter(*given)
    for k in ("path", "single_file_per_rank", "sync_files", "thread_count", "per_thread_copy_ahead", "cache_staged_state_dict", "overwrite",
              "rank", "use_collectives", "checkpoint_id"):
        assert getattr(w, k) == getattr(t, k), k
    r, t = StorageReader("a/b"), dcp.FileSystemReader("a/b")
    for k in ("path", "storage_data", "rank", "use_collectives", "checkpoint_id"):
        assert getattr(r, k) == getattr(t, k), k
    assert not (tmp_path / "a").exists()


def test_nothing_of_pytorchs_input_and_output_is_called(path, monkeypatch):  # noqa: F811
    """Neither its classes nor its file system."""
    def never(*args, **kw):
        raise AssertionError("PyTorch's own I/O")

    for cls in (dcp.FileSystemWriter, dcp.FileSystemReader):
        for k in ("write_data", "finish", "read_data", "read_metadata", "prepare_local_plan"):
            if hasattr(cls, k):
                monkeypatch.setattr(cls, k, never)
    monkeypatch.setattr(dcp.filesystem.FileSystem, "create_stream", never)
    save(state(), StorageWriter(path))
    f = dcp.async_save(state(1), storage_writer=StorageWriter(path), no_dist=True)
    f.result(60)
    same(load(state(2), StorageReader(path)), state(1))


def test_the_worker_writes_all_bytes(path, monkeypatch):  # noqa: F811
    """This process opens no file for writing beneath the checkpoint's storage."""
    opened = []
    real, real_open = os.open, io.open
    monkeypatch.setattr(os, "open", lambda p, flags, *a, **k: (opened.append((str(p), flags)), real(p, flags, *a, **k))[1])
    monkeypatch.setattr("builtins.open", lambda p, mode="r", *a, **k: (opened.append((str(p), mode)), real_open(p, mode, *a, **k))[1])
    save(state(), StorageWriter(path))
    wrong = [x for x in opened if str(path.parent) in x[0] and x[1] not in ("r", "rb") and not (isinstance(x[1], int) and x[1] & 3 == 0)]
    assert not wrong and path.exists()


@pytest.mark.parametrize("cache", [False, True])
def test_cached_staging_has_the_data_of_each_call(path, cache):  # noqa: F811
    """Three calls by one writer, the tensors changed in between; and a shape that changes."""
    w, sd = StorageWriter(path, cache_staged_state_dict=cache), {"w": torch.zeros(1000), "n": torch.arange(4)}
    paths = [path.parent / f"{path.name}-{i}" for i in range(4)]
    futures = []
    for i, p in enumerate(paths):
        sd["w"].fill_(float(i))
        if i == 3:
            sd["n"] = torch.arange(9)
        w.reset(p)
        futures.append(dcp.async_save(dict(sd), storage_writer=w, no_dist=True))
        futures[-1].result(60)
        sd["w"].fill_(-1.0)
    for i, p in enumerate(paths):
        got = load({"w": torch.zeros(1000), "n": torch.zeros(9 if i == 3 else 4, dtype=torch.int64)}, dcp.FileSystemReader(p))
        assert got["w"].eq(i).all() and got["n"].tolist() == list(range(9 if i == 3 else 4))


def test_nothing_is_pinned_without_a_gpu(path):  # noqa: F811
    staged = StorageWriter(path, cache_staged_state_dict=True).stage({"w": torch.ones(100)})
    assert torch.cuda.is_available() or not staged["w"].is_pinned()


def test_a_stager_by_its_protocol(path):  # noqa: F811
    w = StorageWriter(path)
    assert isinstance(w, dcp.staging.AsyncStager) and w.should_synchronize_after_execute is True
    sd = {"a": torch.ones(4), "deep": [{"b": torch.zeros(2)}], "obj": {"x": [1]}}
    twin = w.stage(sd)
    w.synchronize_staging()
    assert twin.keys() == sd.keys() and twin["a"].data_ptr() != sd["a"].data_ptr() and twin["obj"]["x"] is not sd["obj"]["x"]
    sd["deep"][0]["b"].fill_(7)
    assert not twin["deep"][0]["b"].any()
    w.close()
    save(twin, w)
    assert load({"a": torch.zeros(4)}, dcp.FileSystemReader(path))["a"].all()


def test_in_another_thread(path):  # noqa: F811
    wrong = []

    def one(i):
        try:
            save(state(i), StorageWriter(f"{path}-{i}"))
            same(load(state(9), StorageReader(f"{path}-{i}")), state(i))
        except BaseException as e:
            wrong.append(e)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not wrong and not any(t.is_alive() for t in threads)


FORK = """
import os, sys, torch, warnings
warnings.simplefilter("ignore")
import torch.distributed.checkpoint as dcp
from dcpd.torch import StorageReader, StorageWriter
w, r = StorageWriter(sys.argv[1]), StorageReader(sys.argv[1])     # made before the fork, used behind it
pids = []
for i in range(3):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            p = f"{sys.argv[1]}-{i}"
            dcp.save({"w": torch.full((100,), float(i))}, storage_writer=w, checkpoint_id=p, no_dist=True)
            new = {"w": torch.zeros(100)}
            dcp.load(new, storage_reader=r, checkpoint_id=p, no_dist=True)
            code = 0 if new["w"].eq(i).all() else 2
        finally:
            os._exit(code)
    pids.append(pid)
print([os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]) for p in pids])
"""


@pytest.mark.seconds(200)
def test_ranks_that_fork_after_the_import(script, path):  # noqa: F811
    assert script(FORK, path, timeout=180).stdout == "[0, 0, 0]\n"


def test_pickled_before_and_after_use(path):  # noqa: F811
    w = pickle.loads(pickle.dumps(StorageWriter(path, thread_count=2)))
    assert w.thread_count == 2
    save(state(), w)
    again, r = pickle.loads(pickle.dumps(w)), pickle.loads(pickle.dumps(StorageReader(path)))
    save(state(1), again)
    same(load(state(9), r), state(1))
    same(load(state(9), pickle.loads(pickle.dumps(r))), state(1))


def test_signatures_that_pytorch_looks_at():
    import inspect

    for f in (StorageWriter.set_up_storage_writer, StorageReader.set_up_storage_reader, StorageReader.read_metadata):
        assert "kwargs" in inspect.signature(f).parameters
    assert isinstance(inspect.getattr_static(StorageWriter, "validate_checkpoint_id"), classmethod)
    assert isinstance(inspect.getattr_static(StorageReader, "validate_checkpoint_id"), classmethod)


def test_a_subclass_may_bring_its_own_finish(path):  # noqa: F811
    class Mine(StorageWriter):
        def finish(self, metadata, results):
            metadata.made_by = "mine"
            super().finish(metadata, results)
            (self.path / "done.txt").write_text("yes")

        def set_up_storage_writer(self, is_coordinator):  # as before `kwargs` came
            super().set_up_storage_writer(is_coordinator)

    save(state(), Mine(path))
    save(state(1), Mine(path))
    assert (path / "done.txt").exists() and dcp.FileSystemReader(path).read_metadata().made_by == "mine"
    same(load(state(9), dcp.FileSystemReader(path)), state(1))


def test_a_prefix_that_is_there_stays(path):  # noqa: F811
    from torch.distributed.checkpoint.filesystem import _StoragePrefix
    from torch.distributed.checkpoint.planner import SavePlan

    w = StorageWriter(path)
    plans = w.prepare_global_plan([SavePlan([]), SavePlan([], storage_data=_StoragePrefix("own_")), SavePlan([])])
    assert [p.storage_data.prefix for p in plans] == ["__0_", "own_", "__2_"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert w.prepare_local_plan(plans[0]) is plans[0] or not path.exists()


def test_write_data_gives_a_future_of_results(path):  # noqa: F811
    seen = []

    class Mine(StorageWriter):
        def write_data(self, plan, planner):
            f = super().write_data(plan, planner)
            assert isinstance(f, torch.futures.Future) and all(isinstance(x, dcp.storage.WriteResult) for x in f.wait())
            seen.extend(f.wait())
            return f

    md = save(state(), Mine(path))
    assert {r.index for r in seen} == set(md.storage_data) and all(r.size_in_bytes >= 0 for r in seen)
    assert sum(r.size_in_bytes for r in seen if r.index.fqn == "w") == 300 * 400 * 4


def test_a_coordinator_that_is_not_rank_0(ranks, d, path):  # noqa: F811
    ranks(on_ranks.dropin_coordinator, str(path), 2)
    assert (path / ".metadata").exists()


def test_cached_plans_on_ranks(ranks, d, path):  # noqa: F811
    assert ranks(on_ranks.dropin_cached_plans, str(path), 4) == [list(range(4))] * 4


@pytest.mark.parametrize("how", ["save", "async"])
def test_by_themselves_twice_and_without_overwriting(ranks, d, path, how):  # noqa: F811
    got = ranks(on_ranks.dropin_local_again, str(path), how)
    assert got == [(1.0 + r, "Checkpoint already exists") for r in range(4)]


def test_a_whole_one_of_ranks_is_turned_into_torch_save(ranks, d, at, path, tmp_path):  # noqa: F811
    from test_ranks import FOUR
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    ranks(on_ranks.dropin_save, str(path), FOUR)
    dcp_to_torch_save(path, tmp_path / "x.pt")
    got = torch.load(tmp_path / "x.pt", weights_only=False)["m"]
    assert all(torch.equal(got[k], on_ranks.whole(s[0], i)) for i, (k, s) in enumerate(FOUR.items()))


def test_keys_alone(path):  # noqa: F811
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    save(state(), StorageWriter(path))
    got = _load_state_dict_from_keys({"w", "sub"}, storage_reader=StorageReader(path))
    assert torch.equal(got["w"], state()["w"]) and got["sub"]["lr"] == 0.1 and set(got) == {"w", "sub"}


def test_partial_loads(path):  # noqa: F811
    save({"a": torch.ones(3)}, StorageWriter(path))
    new = {"a": torch.zeros(3), "b": torch.full((2,), 5.0)}
    dcp.load(new, storage_reader=StorageReader(path), planner=dcp.DefaultLoadPlanner(allow_partial_load=True), no_dist=True)
    assert new["a"].all() and new["b"].eq(5).all()


def test_the_newest_of_two_storages_by_reference(at, path):  # noqa: F811
    """A reader made before the checkpoint exists, by reference; and reset to another."""
    r = StorageReader(f"main:{path.name}")
    save(state(), StorageWriter(path))
    same(load(state(9), r), state())
    other = lib.fresh()
    save(state(1), StorageWriter(f"main:{other}"))
    dcp.load(new := state(9), checkpoint_id=f"main:{other}", storage_reader=r, no_dist=True)
    same(new, state(1))
    with pytest.raises(dcpd.DcpdError):
        StorageReader("nowhere:x").read_metadata()


def test_containers_stay_the_same_objects(path):  # noqa: F811
    sd = {"deep": {"list": [torch.ones(2), {"x": torch.ones(1), "n": 5}], "t": torch.ones(3)}, "v": {"k": [1, 2]}}
    save(sd, StorageWriter(path))
    new = {"deep": {"list": [torch.zeros(2), {"x": torch.zeros(1), "n": 0}], "t": torch.zeros(3)}, "v": {"k": [0, 0]}}
    what = lambda: (new["deep"], new["deep"]["list"][1], new["v"], new["deep"]["list"][0], new["deep"]["t"])  # noqa: E731
    held = what()
    load(new, StorageReader(path))
    assert all(a is b for a, b in zip(held, what()))
    assert held[3].all() and held[4].all() and held[1]["x"].all() and held[1]["n"] == 5 and new["v"]["k"] == [1, 2]


@pytest.mark.parametrize("how", ["file", "nowhere", "local"])
def test_a_save_that_cannot_be_fails_on_all_ranks(ranks, d, path, how):  # noqa: F811
    """In the coordinator's part, and without collectives in each rank's; and the group goes on."""
    path.write_text("in the way")
    where = "nowhere:x" if how == "nowhere" else str(path)
    for r, (kind, failed, text) in enumerate(ranks(on_ranks.dropin_refused, where, how == "local")):
        assert kind == ("other" if how == "local" else "CheckpointException"), text
        assert failed == ([] if how == "local" else [0]) and ("nowhere" if how == "nowhere" else path.name) in text
    assert path.read_text() == "in the way"
    path.unlink()
    ranks(on_ranks.dropin_coordinator, str(path), 0)


def test_a_damaged_one_fails_on_all_ranks(ranks, d, path):  # noqa: F811
    ranks(on_ranks.write_as, str(path), "ours", "fsdp")
    (path / "__2_0.distcp").unlink()
    for e in ranks(on_ranks.read_as, str(path), "ours", "hsdp", check=False):
        assert isinstance(e, dcp.CheckpointException) and "__2_0.distcp" in str(e), e


def test_a_rank_that_cannot_stage(ranks, path):
    """Its copy is made before the ranks meet: it must not stay away."""
    for failed, soon in ranks(on_ranks.dropin_unstaged, str(path), world=2):
        assert list(failed) == [1] and "no room" in failed[1] and soon, failed
    got = {"t": torch.zeros(1000), "r0": torch.zeros(3), "r1": torch.zeros(3)}
    dcp.load(got, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    assert all(t.eq(1).all() for t in got.values())
