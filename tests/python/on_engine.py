"""What the tests of kept weights run, each in a process of its own, an inference engine: `on_engine.py CASE NAME …`. It prints lines of
JSON."""
import gc
import json
import os
import pathlib
import sys
import time
import warnings

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "lib"))  # behind the package, whose name the harness has too

import fake_gpu  # noqa: E402
import torch  # noqa: E402

import dcpd  # noqa: E402
from dcpd import _keep  # noqa: E402

trainer = fake_gpu.Trainer()
_keep._flat = fake_gpu.as_flat(trainer)
warnings.simplefilter("ignore")  # memory that is read-only


def weights(seed=0):
    g = torch.Generator().manual_seed(seed)
    return {"model": {"w": torch.randn(300, 1000, generator=g), "b": torch.randn(7, generator=g).bfloat16(), "n": torch.tensor(3 + seed)},
            "config": {"heads": 8, "name": "engine"}}


def same(view, seed=0):
    want = weights(seed)
    return all(torch.equal(view[f"model.{k}"], v) for k, v in want["model"].items()) and view["config.heads"] == 8 \
        and view["config.name"] == "engine" and len(view) == 5


def tell(**what):
    print(json.dumps(what), flush=True)


def hang():
    time.sleep(600)


def left():
    gc.collect()
    return trainer.cuda.fake_cuda_left()


def save(name):
    dcpd.save(weights(), f"main:{name}")


def serve(name, *more):
    """The first engine: keeps, and serves until it is killed."""
    record = dcpd.keep(f"main:{name}", name, device="cuda:0")
    with dcpd.attach(f"shm:{name}", device="cuda:0") as view:
        tell(same=same(view), id=record["id"], text=repr(view))
        hang()


def next_engine(name):
    """Another engine: at once from memory."""
    with dcpd.attach(f"shm:{name}", device="cuda:0") as view:
        tell(same=same(view), attached=dcpd.connect().device_images.get(view.id)["attached"])


def lifetimes(name):
    """Views are good after close() and until the last one has gone; nothing of the driver's stays then, and the daemon knows."""
    client = dcpd.connect()
    before = left()
    view = dcpd.attach(f"shm:{name}", device="cuda:0", client=client)
    w, id = view["model.w"], view.id
    interface = view.memory.__cuda_array_interface__
    assert interface["shape"] == (client.device_images.get(id)["bytes"],) and interface["data"] == (view.memory.address, False)
    view.close()
    assert left() > before and torch.equal(w, weights()["model"]["w"]) and client.device_images.get(id)["attached"] == 1
    del w, view
    assert left() == before
    while client.device_images.get(id)["attached"]:
        time.sleep(0.01)
    tell(ok=True)


def forked(name):
    """A fork of an engine does not keep the image in use, and does not touch the driver."""
    client, before = dcpd.connect(), left()
    view = dcpd.attach(f"shm:{name}", device="cuda:0", client=client)
    id = view.id
    end, begin = os.pipe()
    child = os.fork()
    if not child:
        os.close(begin)
        del view
        gc.collect()
        os.read(end, 1)
        os._exit(0 if left() > before else 1)
    assert same(view)
    del view
    deadline = time.monotonic() + 20
    while client.device_images.get(id)["attached"] and time.monotonic() < deadline:
        time.sleep(0.01)
    attached = client.device_images.get(id)["attached"]
    os.close(begin)
    tell(attached=attached, status=os.waitpid(child, 0)[1])


def captured(name):
    """The driver refuses to wait: what may still be read stays mapped, and in use."""
    client, before = dcpd.connect(), left()
    view = dcpd.attach(f"shm:{name}", device="cuda:0", client=client)
    id = view.id
    os.environ["FAKE_CUDA_FAIL"] = "cuCtxSynchronize:0:900"
    del view
    tell(mapped=left() > before, attached=client.device_images.get(id)["attached"])


def impatient(name):
    for timeout in (0, 0.5):
        begin = time.monotonic()
        try:
            dcpd.keep(f"shm:{name}", device="cuda:0", timeout=timeout)
            raise AssertionError("it was not there")
        except dcpd.WaitTimeout:
            assert time.monotonic() - begin < 20
    tell(ok=True)


def shared_memory(name):
    """The host tier: views of /dev/shm, and a module of one's own filled out of them."""
    record = dcpd.keep(f"main:{name}", name)
    with dcpd.attach(f"shm:{name}") as view:
        own = torch.nn.Linear(1000, 300, bias=False)
        own.load_state_dict({"weight": view["model.w"]})
        tell(same=same(view), into=torch.equal(own.weight, weights()["model"]["w"]), generation=record["generation"])
        hang()


def overtaken(name):
    """A newer generation replaces the image between the engine's look and its request."""
    client = dcpd.connect()
    dcpd.publish(weights(), name).wait(60)
    old = dcpd.keep(f"shm:{name}", device="cuda:0")
    dcpd.publish(weights(1), name).wait(60)
    lists, listed = [], client.device_images.list

    def list_then_keep(of):
        lists.append(listed(of))
        if len(lists) == 1:
            dcpd.keep(f"shm:{name}", device="cuda:0")
        return lists[-1]

    client.device_images.list = list_then_keep
    with dcpd.attach(f"shm:{name}", device="cuda:0", client=client) as view:
        tell(same=same(view, 1), other=view.id != old["id"], looks=len(lists))
        client.device_images.drop(view.id)


def late(name):
    """Another engine has loaded between this one's look and its load."""
    looks, is_sealed = [], _keep._is_sealed
    _keep._is_sealed = lambda *args: bool(looks) and is_sealed(*args) or looks.append(0)
    tell(generation=dcpd.keep(f"main:{name}", name)["generation"], looks=len(looks))


def ranks(name):
    """Two ranks, cut by a layout: each is kept by itself."""
    rules = [{"match": "model.w", "mesh": [2], "placements": ["Shard(0)"]}, {"match": "*", "placements": ["Replicate()"]}]
    out = []
    for rank in range(2):
        dcpd.keep(f"main:{name}", name, device=0, rank=rank, world_size=2, layout=rules)
        with dcpd.attach(name, rank, device=torch.device("cuda", 0)) as view:
            out.append(torch.equal(view["model.w"], weights()["model"]["w"][150 * rank:150 * (rank + 1)]))
    tell(same=out)


def generations(name):
    """A newer generation of the state dict replaces the older one on the GPU; an engine has what it has."""
    client = dcpd.connect()
    publication = dcpd.publish(weights(), name)
    publication.wait(60)
    first = dcpd.keep(f"shm:{name}", device="cuda:0", ttl_seconds=60)
    old = dcpd.attach(f"shm:{name}", device="cuda:0")
    dcpd.publish(weights(1), name).wait(60)
    second = dcpd.keep(f"shm:{name}", device="cuda:0")
    assert second["generation"] > first["generation"] and second["ttl_seconds"] == 3600
    with dcpd.attach(f"shm:{name}", device="cuda:0") as new:
        assert same(new, 1) and same(old)
    try:
        dcpd.attach(f"shm:{name}", generation=first["generation"], device="cuda:0")
        raise AssertionError("it was superseded")
    except dcpd.NotFound:
        pass
    client.device_images.drop(second["id"])
    tell(ok=True)


def refused(name, *calls):
    """What each call of the driver's may answer to an engine that maps: words, and nothing stays."""
    before, out = left(), []
    for call in ("cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemcpyDtoH_v2", "cuDeviceGet",
                 "cuDevicePrimaryCtxRetain", "cuDeviceGetUuid_v2", "cuCtxPushCurrent_v2"):
        os.environ["FAKE_CUDA_FAIL"] = f"{call}:0:801"
        try:
            dcpd.attach(f"shm:{name}", device="cuda:0")
            out.append(f"{call} was not called")
        except dcpd.RequestRefused as e:
            out += [] if f"device images cannot be used: {call}: error 801" in str(e) else [f"{call}: {e}"]
        os.environ["FAKE_CUDA_FAIL"] = ""
        if left() != before:
            out.append(f"{call}: {left() - before} left")
    gc.collect()
    with dcpd.attach(f"shm:{name}", device="cuda:0") as view:
        tell(out=out, same=same(view))


def missing(name):
    try:
        dcpd.attach(f"shm:{name}", device="cuda:0")
        tell(said="")
    except dcpd.NotFound as e:
        tell(said=str(e))


def outlive(name):
    """The daemon ends: what is mapped stays."""
    view = dcpd.attach(f"shm:{name}", device="cuda:0")
    tell(same=same(view))
    sys.stdin.readline()
    tell(same=same(view))


def keep(name, *more):
    try:
        tell(**dcpd.keep(f"main:{name}", name, device="cuda:0"))
    except dcpd.DcpdError as e:
        tell(raised=type(e).__name__, said=str(e))


def checked(*args):
    """An engine of the check of a real GPU (tests/gpu/check.py)."""
    sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "gpu"))
    import check

    sys.argv[1:] = args
    check.main()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
