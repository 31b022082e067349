"""What the tests of async_save(overlap=True) run, in this process or on each rank."""
import contextlib
import threading

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dcpd
from dcpd import _overlap

SECONDS = 60


def waits(go, step):
    """The step waits until the copy that is held back goes on."""
    t = threading.Thread(target=step)
    t.start()
    assert go.entered.wait(SECONDS)
    t.join(0.2)
    assert t.is_alive(), "the step did not wait"
    go.set()
    t.join()


@contextlib.contextmanager
def held_back():
    """Late copies wait for an event, which is given: `entered` says that one does."""
    real, go = _overlap.Copy._some, threading.Event()
    go.entered = threading.Event()

    def some(self, group):
        go.entered.set()
        assert go.wait(SECONDS)
        return real(self, group)

    _overlap.Copy._some = some
    try:
        yield go
    finally:
        go.set()
        _overlap.Copy._some = real


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(64, 512)
        self.norm = torch.nn.BatchNorm1d(512)
        self.outer = torch.nn.Linear(512, 64)
        self.register_buffer("seen", torch.zeros(64 << 10))  # as large as what is copied late

    def forward(self, x):
        with torch.no_grad():
            self.seen += x.sum().abs() + 1
        return self.outer(self.norm(self.inner(x)))


def trained(kind=torch.optim.Adam, **kw):
    """A model and an optimizer that have made a step."""
    torch.manual_seed(1)
    m = Net()
    o = kind(m.parameters(), lr=0.1, **kw)
    backward(m)
    o.step()
    return m, o


def backward(m):
    m(torch.randn(16, 64)).square().sum().backward()


def copies(x):
    if isinstance(x, dict):
        return {k: copies(v) for k, v in x.items()}
    return x.clone() if isinstance(x, torch.Tensor) else x


def differences(a, b, at=""):
    """Paths of the tensors of a that are not those of b."""
    if isinstance(a, dict):
        return [p for k, v in a.items() for p in differences(v, b.get(k, b.get(str(k), {})) if isinstance(b, dict) else {}, f"{at}.{k}")]
    if isinstance(a, torch.Tensor):
        return [] if isinstance(b, torch.Tensor) and torch.equal(a, b) else [at]
    return []


MESHES = {}


def mesh(world):
    if world not in MESHES:
        MESHES[world] = DeviceMesh("cpu", torch.arange(world))
    return MESHES[world]


def sharded(pg, rank, seed=0):
    """A model of DTensors and its optimizer, which have made a step."""
    from on_ranks import whole

    world = dist.get_world_size(pg)
    m = torch.nn.Module()
    for name, placement in (("rows", Shard(0)), ("columns", Shard(1)), ("same", Replicate())):
        m.register_parameter(name, torch.nn.Parameter(distribute_tensor(whole((515, 260), seed + len(name)), mesh(world), [placement])))
    o = torch.optim.SGD(m.parameters(), lr=1.0, momentum=0.9)
    step(m, o)
    return m, o


def step(m, o):
    for p in m.parameters():
        p.grad = torch.ones_like(p)
    o.step()


def local(sd):
    return {k: (v.to_local() if isinstance(v, DTensor) else v).clone() for k, v in sd.items()}


def dtensors(pg, rank, ref):
    """A step comes at once: it waits. Then the whole model of each save is as it was when the save began."""
    mesh(dist.get_world_size(pg))
    m, o = sharded(pg, rank)
    wanted, handles = [], []
    for i in range(3):
        wanted.append(local(m.state_dict()))
        with held_back() as go:
            h = dcpd.async_save({"m": m.state_dict(), "o": o.state_dict()}, f"{ref}-{i}", process_group=pg, overlap=True)
            assert not h.snapshotted
            waits(go, lambda: step(m, o))
        h.wait_snapshot(SECONDS)
        assert h.snapshotted
        handles.append(h)
    for h in handles:
        assert h.result(SECONDS)["state"] == "succeeded"
    for i, want in enumerate(wanted):
        m, _ = sharded(pg, rank, seed=50)
        into = {"m": m.state_dict()}
        dcpd.load(f"{ref}-{i}", into=into, process_group=pg)
        assert differences(want, local(into["m"])) == []
    return len(wanted)


def changed_on_one_rank(pg, rank, ref, how):
    """(class, FQN, message) of what each rank sees; and the next save is whole."""
    mesh(dist.get_world_size(pg))
    m, o = sharded(pg, rank)
    with held_back() as go:
        h = dcpd.async_save({"m": m.state_dict()}, ref, process_group=pg, overlap=True)
        if rank == 1:
            with torch.no_grad():
                (m.rows.to_local() if how == "local" else m.rows).add_(1)
        dist.barrier(pg)
        go.set()
        e = h.exception(SECONDS)
    step(m, o)
    dcpd.async_save({"m": m.state_dict()}, ref, process_group=pg, overlap=True).result(SECONDS)
    return type(e).__name__, e.fqn, str(e)


def overlap_differs(pg, rank, ref):
    dcpd.async_save({"t": torch.ones(1 << 15)}, ref, process_group=pg, overlap=rank == 1)
