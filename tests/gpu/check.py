"""What a host with a GPU has to show: `make check-gpu`, or the program `check` in the folder that `make gpu-folder` makes.

The unit tests of device memory run over the real libcuda and libnccl. Then the package saves and loads real tensors of torch.cuda, with the
default allocator and with expandable segments, and every byte is compared with a copy that PyTorch made. That dcpd copied, and not PyTorch
in its place, is told by the daemon's counter, and by the logger, which has nothing to say. Weights that dcpd keeps in the GPU's memory are
mapped by engines of other processes, which are killed. Without a GPU the script says what is missing and skips. `--device cpu` tries the
script itself.
"""
import argparse
import contextlib
import logging
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import traceback

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[2] / "api/python"), str(pathlib.Path(__file__).resolve().parent)]

import gpu_host  # noqa: E402

ALLOCATORS = {"default": "", "expandable": "expandable_segments:True"}
SECONDS = 120
said = []


class Said(logging.Handler):
    def emit(self, record):
        if record.levelno >= logging.WARNING:
            said.append(record.getMessage())


# ------------------------------------------------------------------------------------------------------------- tensors


def on(device, x):
    """A copy of a state dict with its tensors on a device."""
    import torch

    return {k: on(device, v) if isinstance(v, dict) else v.detach().to(device, copy=True) if isinstance(v, torch.Tensor) else v
            for k, v in x.items()}


def numbers(n, seed, dtype):
    """n elements of any bits."""
    import torch

    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n * dtype.itemsize,), dtype=torch.uint8, generator=g).view(dtype)


def kept_weights(n):
    """The weights that engines map: every process makes the same ones to compare with."""
    import torch

    return {"large": numbers(n, 60, torch.float32), "half": numbers(100003, 61, torch.bfloat16), "codes": numbers(1000003, 62, torch.uint8),
            "scalar": numbers(1, 63, torch.float64).reshape(()), "empty": torch.zeros(0, 3), "step": 64}


def raw(t):
    import torch

    return t.detach().contiguous().reshape(-1).view(torch.uint8).cpu()


def differences(got, wanted, path=""):
    """Where two state dicts differ, in words: bytes of tensors, not numbers, so that NaN is equal to itself."""
    import torch

    out = [f"{path}{k} is in one alone" for k in sorted({*map(str, got)} ^ {*map(str, wanted)})]
    for k, w in wanted.items():
        g, at = got.get(k, got.get(str(k))), f"{path}{k}"
        if isinstance(w, dict) and isinstance(g, dict):
            out += differences(g, w, at + ".")
        elif isinstance(w, torch.Tensor):
            if (g.dtype, g.shape) != (w.dtype, w.shape):
                out.append(f"{at}: {g.dtype}{list(g.shape)}, not {w.dtype}{list(w.shape)}")
            elif not torch.equal(raw(g), raw(w)):
                i = int((raw(g) != raw(w)).nonzero()[0])
                out.append(f"{at}: byte {i} of {raw(w).numel()} is {int(raw(g)[i])}, not {int(raw(w)[i])}")
        elif g != w:
            out.append(f"{at}: {g!r}, not {w!r}")
    return out


def same(got, wanted):
    found = differences(got, wanted)
    assert not found, "; ".join(found[:5])


def spoil(x):
    for v in x.values():
        if isinstance(v, dict):
            spoil(v)
        elif hasattr(v, "zero_"):
            v.detach().zero_()


def blank(x):
    """A state dict of the same form, with other tensors."""
    import torch

    return {k: blank(v) if isinstance(v, dict) else torch.zeros_like(v, requires_grad=False) if isinstance(v, torch.Tensor) else None
            for k, v in x.items()}


# --------------------------------------------------------------------------------------------------------------- cases


def wait_for(condition, otherwise):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, f"{otherwise} in {SECONDS} s"
        time.sleep(0.05)


class Engine:
    """A process that maps kept weights. It compares them once when it starts, and once more each time it is asked to."""

    def __init__(self, program, url, *args):
        self.p = subprocess.Popen([*program, *args], env={**os.environ, "DCPD_URL": url}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                  text=True)
        self.has_compared()

    def has_compared(self):
        line = self.p.stdout.readline()
        assert line == "same\n", f"an engine said {line!r}"

    def compare_again(self):
        self.p.stdin.write("\n")
        self.p.stdin.flush()
        self.has_compared()

    def kill(self):
        """Kills the process, which gets no chance to unmap or to say goodbye."""
        self.p.kill()
        self.p.wait(SECONDS)
        self.p.stdin.close()
        self.p.stdout.close()


def engine(device, what):
    """The program of an Engine: `what` is the state dict's name and the n of its kept_weights."""
    import warnings

    import dcpd

    warnings.simplefilter("ignore")  # torch warns of memory that is read-only
    name, _, n = what.partition(":")
    wanted = kept_weights(int(n))
    with dcpd.attach(f"shm:{name}", device="cuda:0" if device == "cuda" else None) as view:
        while True:
            same(dict(view), wanted)
            print("same", flush=True)
            if not sys.stdin.readline():
                break


class Check:
    program = [sys.executable, __file__]  # that engines run

    def __init__(self, device, mib):
        import torch

        import dcpd

        self.torch, self.dcpd, self.device, self.n = torch, dcpd, device, mib << 18
        self.gpu = device != "cpu"

    def state(self, seed):
        """(a state dict on the device, PyTorch's copy of it, bytes that dcpd can copy): large and small, of many dtypes, in the middle of
        allocations, and what it leaves to PyTorch."""
        t = self.torch
        kinds = [t.float32, t.bfloat16, t.float16, t.float64, t.int64, t.uint8, t.complex64]
        kinds += [getattr(t, k) for k in ("float8_e4m3fn", "float8_e5m2") if hasattr(t, k)]
        model = {f"kind{i}": numbers(100003, seed + i, k) for i, k in enumerate(kinds)}
        model["bool"] = model["kind0"].view(t.uint8) > 99
        model.update({f"small{i}": numbers(1 + i % 97, seed + i, t.float32) for i in range(500)})
        model.update(large=numbers(self.n // 2, seed, t.float32), scalar=numbers(1, seed, t.float32).reshape(()))
        sd = on(self.device, {"model": model, "optim": {"m": numbers(self.n // 2, seed + 1, t.float32).view(-1, 2), "step": seed}})
        sd["model"]["part"] = sd["optim"]["m"].view(-1).narrow(0, 1001, 49002)
        handed = sum(x.numel() * x.element_size() for d in (sd["model"], sd["optim"]) for x in d.values() if isinstance(x, t.Tensor))
        sd["model"].update(across=sd["optim"]["m"].t()[:, :999], empty=t.zeros(0, 3, device=self.device))
        sd["host"] = numbers(50001, seed + 2, t.float32)
        self.sync()
        return sd, on("cpu", sd), handed

    def sync(self):
        if self.gpu:
            self.torch.cuda.synchronize()

    def copied(self, do, least, most=1 << 62):
        """Does it; dcpd has copied so many bytes."""
        before = gpu_host.device_bytes(self.client)
        out = do()
        now = gpu_host.device_bytes(self.client) - before
        assert not self.gpu or least <= now <= most, f"dcpd copied {now} bytes, not {least}: {said}"
        return out

    def save(self):
        sd, wanted, handed = self.state(1)
        self.copied(lambda: self.dcpd.save(sd, "main:save"), handed)
        same(self.dcpd.load("main:save"), wanted)

    def async_save(self):
        for i in range(3):  # both slots, and one again
            sd, wanted, handed = self.state(10 * i)
            h = self.copied(lambda: self.dcpd.async_save(sd, f"main:async{i}"), handed)
            assert h.snapshotted
            spoil(sd)
            h.result(SECONDS)
            same(self.dcpd.load(f"main:async{i}"), wanted)

    def overlap(self):
        t = self.torch
        weights = [t.nn.Parameter(t.randn(self.n // 4096, 1024, device=self.device)) for _ in range(4)]
        optimizer = t.optim.SGD(weights, lr=0.1)
        for i in range(3):
            wanted = {"w": on("cpu", {str(k): w for k, w in enumerate(weights)})}

            def step():
                h = self.dcpd.async_save({"w": {str(k): w for k, w in enumerate(weights)}}, f"main:overlap{i}", overlap=True)
                sum((t.randn(8, w.shape[0], device=self.device) @ w).square().mean() for w in weights).backward()
                optimizer.step()  # waits until the weights are copied
                optimizer.zero_grad()
                h.result(SECONDS)

            self.copied(step, sum(w.numel() * 4 for w in weights))
            same(self.dcpd.load(f"main:overlap{i}"), wanted)

    def load(self):
        sd, wanted, handed = self.state(2)
        self.dcpd.save(sd, "main:load", cache="keep")
        into = blank(sd)
        into["model"]["across"] = into["model"]["across"].contiguous()
        self.copied(lambda: self.dcpd.load("main:load", into=into), handed)
        same(into, wanted)
        got = self.copied(lambda: self.dcpd.load("main:load", device=self.device), handed)
        assert {x.device.type for x in got["model"].values() if x.numel()} == {self.torch.device(self.device).type}
        same(got, wanted)
        same(self.dcpd.load("main:load", keys=["optim"], device=self.device), {"optim": wanted["optim"]})
        rules = [{"match": "^model\\.(large|kind0)$", "rename": "model.$1_"}]
        got = self.copied(lambda: self.dcpd.load("main:load", device=self.device, transform=rules), handed)
        same({k: got[f"model.{k}_"] for k in ("large", "kind0")}, {k: wanted["model"][k] for k in ("large", "kind0")})

    def casts(self):
        t = self.torch
        codes = t.arange(1 << 16, dtype=t.int32).to(t.int16)
        stored = {"bfloat16": codes.view(t.bfloat16).repeat(32), "float16": codes.view(t.float16).repeat(9),
                  "odd": codes.view(t.float16)[1:778]}
        for k in ("float8_e4m3fn", "float8_e5m2"):
            if hasattr(t, k):
                stored[k] = t.arange(256, dtype=t.int32).to(t.uint8).repeat(33).view(getattr(t, k))
        self.dcpd.save(stored, "main:casts", cache="keep")
        for to in (t.float32, t.float64, t.float16, t.bfloat16):
            wanted = {k: v.to(to) for k, v in stored.items()}
            into = {k: t.zeros(v.shape, dtype=to, device=self.device) for k, v in stored.items()}
            narrow = sum(v.numel() * min(v.element_size(), to.itemsize) for v in stored.values())
            self.copied(lambda: self.dcpd.load("main:casts", into=into), narrow, narrow)
            for k, got in on("cpu", into).items():
                assert t.equal(got.isnan(), wanted[k].isnan()), (k, to)
                zero = t.zeros((), dtype=to)
                same({k: t.where(got.isnan(), zero, got)}, {k: t.where(got.isnan(), zero, wanted[k])})

    def small(self):
        t = self.torch
        sd = on(self.device, {f"t{i}": numbers(1 + i % 700, i, t.float32) for i in range(10000)})
        wanted, size = on("cpu", sd), sum(x.numel() * 4 for x in sd.values())
        self.sync()
        self.copied(lambda: self.dcpd.async_save(sd, "main:small"), size).result(SECONDS)
        into = blank(sd)
        self.copied(lambda: self.dcpd.load("main:small", into=into), size)
        same(into, wanted)

    def drop_in(self):
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        from dcpd.torch import StorageReader, StorageWriter

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            for i, call in enumerate((dcp.save, dcp.async_save)):
                sd, wanted, _ = self.state(30 + i)
                h = call(sd, storage_writer=StorageWriter(f"main:drop_in{i}"))
                if h is not None and hasattr(h, "result"):
                    h.result()
                into = {**blank(sd), "optim": {**blank(sd["optim"]), "step": 0}}
                into["model"]["across"] = into["model"]["across"].contiguous()
                dcp.load(into, storage_reader=StorageReader(f"main:drop_in{i}"))
                same(into, wanted)
        finally:
            dist.destroy_process_group()

    def published(self):
        sd, wanted, handed = self.state(40)
        self.copied(lambda: self.dcpd.publish(sd["model"], "weights", version=1), 0)
        into = blank(sd["model"])
        into["across"] = into["across"].contiguous()
        with self.dcpd.subscribe("weights", into=into, timeout=SECONDS) as updates:
            assert next(iter(updates)).version == 1
            same(into, wanted["model"])

    def free_memory(self):
        """Bytes that the GPU has free."""
        return self.torch.cuda.mem_get_info(0)[0]

    def kept(self):
        """Weights in the GPU's memory outlive the engines that map them, and go when they are dropped and the last engine has ended. With
        "cpu": weights in shared memory."""
        device, images = "cuda:0" if self.gpu else None, self.client.device_images
        with contextlib.ExitStack() as undo:

            def start():
                started = Engine(self.program, self.client.url, "--device", self.device, "--engine", f"kept:{self.n}")
                undo.callback(started.kill)
                return started

            def keep(name, n):
                self.dcpd.save(kept_weights(n), f"main:{name}")
                free = self.free_memory() if self.gpu else 0
                record = self.dcpd.keep(f"main:{name}", name, device=device)
                undo.callback(self.delete, self.client.state_dicts.delete, name)
                if self.gpu:
                    undo.callback(self.delete, images.drop, record["id"])
                return record, free

            keep("warm", 1)  # and with it the context of dcpd's process: from here on it is weights that take and free memory
            image, free = keep("kept", self.n)
            if self.gpu:
                size, taken = image["bytes"], free - self.free_memory()
                assert taken > size * 3 // 4, f"an image of {size} bytes has taken {taken}: it is not in the GPU's memory"
            first = start()
            first.kill()
            if self.gpu:
                self.client.state_dicts.delete("kept")  # the next engine's bytes are the GPU's
                wait_for(lambda: not images.get(image["id"])["attached"], "dcpd did not notice the end of a killed engine")
            second = start()
            if self.gpu:
                images.drop(image["id"])
                second.compare_again()
            second.kill()
            if self.gpu:
                wait_for(lambda: free - self.free_memory() < size // 4, f"{size} bytes of a dropped image were not freed")

    def operations(self):
        """Operations on state dicts that move their bytes over NCCL end with the bytes of those in shared memory."""
        t, client = self.torch, self.client
        wait_for(lambda: "not yet known" not in client.capabilities()["backends"]["nccl"].get("reason", ""), "dcpd did not look for NCCL")
        found = client.capabilities()
        gpus = len(found["devices"])
        lacks = found["backends"]["nccl"].get("reason") or ("there is one GPU, and NCCL takes one member a GPU" if gpus < 2 else "")
        if lacks:
            print(f"operations: skipped, nothing was moved over NCCL: {lacks}")
            return
        world = min(gpus, 4)
        weights = {"large": numbers(self.n // 4, 70, t.float32).view(-1, 256), "half": numbers(100003, 71, t.bfloat16)}

        def cut(large):
            return [{"match": "large", "mesh": [world], "placements": [large]}, {"match": "*", "mesh": [world], "placements": ["Shard(0)"]}]

        self.dcpd.save(weights, "main:operations")
        self.dcpd.keep("main:operations", "cut", world_size=world, layout=cut("Shard(0)"))
        made = ["cut"]
        for kind, more in (("gather", {}), ("redistribute", {"layout": cut("Shard(1)")}), ("broadcast", {})):
            for backend in ("shm", "nccl"):
                source, name = "shm:cut" if kind != "broadcast" else f"shm:gather-{backend}", f"{kind}-{backend}"
                made.append(name)
                result = client.jobs.run(kind, SECONDS, source=source, target=f"shm:{name}", backend=backend, **more)["result"]
                assert result["backend"] == backend and result["moved_bytes"], result
            for rank in range(world):
                with self.dcpd.attach(f"{kind}-shm", rank) as over_shm, self.dcpd.attach(f"{kind}-nccl", rank) as over_nccl:
                    same(dict(over_nccl), dict(over_shm))
                    if kind != "redistribute":
                        same(dict(over_nccl), weights)
        for name in made:
            client.state_dicts.delete(name)

    def delete(self, call, name):
        with contextlib.suppress(self.dcpd.NotFound):
            call(name)

    def ranks(self):
        """Two processes on one GPU, each with half of each tensor; another cut on the way back."""
        with tempfile.TemporaryDirectory() as folder:
            todo = [subprocess.Popen([sys.executable, __file__, "--device", self.device, "--rank", f"{r}:{folder}/store"],
                                     env={**os.environ, "DCPD_URL": self.client.url}) for r in range(2)]
            codes = [p.wait(3 * SECONDS) for p in todo]
        assert codes == [0, 0], codes

    def leaves_nothing(self):
        self.dcpd.close()
        left = [x["name"] for x in self.client.state_dicts.list() if x["name"] != "weights"]
        assert not left, left
        self.client.state_dicts.delete("weights")  # that of the publication: a daemon of the check's own would wait for its end

    def all(self):
        failed = []
        for case in (self.save, self.async_save, self.overlap, self.load, self.casts, self.small, self.drop_in, self.published, self.kept,
                     self.operations, self.ranks, self.leaves_nothing):
            start = time.monotonic()
            try:
                case()
                assert not (self.gpu and said), f"the logger dcpd said: {said}"
            except Exception:
                traceback.print_exc()
                failed.append(case.__name__)
            said.clear()
            print(f"{'FAILED' if case.__name__ in failed else 'ok'} {case.__name__} {time.monotonic() - start:.1f} s", flush=True)
        return failed


def rank(device, where):
    """One of two ranks."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    import dcpd

    r, _, store = where.partition(":")
    r = int(r)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=r, world_size=2)
    if device != "cpu":
        torch.cuda.set_device(0)
    mesh = init_device_mesh("cpu" if device == "cpu" else "cuda", (2,))
    whole = {k: numbers(2 << 20, i, torch.float32).view(2048, 1024) for i, k in enumerate(("a", "b"))}

    def cut(dim, fill):
        parts = {k: v.chunk(2, dim)[r].contiguous().to(device) for k, v in whole.items()}
        return {k: DTensor.from_local(v if fill else torch.zeros_like(v), mesh, [Shard(dim)], run_check=False) for k, v in parts.items()}

    dcpd.async_save({**cut(0, True), "same": DTensor.from_local(whole["a"].to(device), mesh, [Replicate()], run_check=False)},
                    "main:ranks").result(SECONDS)
    into = cut(1, False)
    dcpd.load("main:ranks", into=into)
    same({k: v.to_local() for k, v in into.items()}, {k: v.chunk(2, 1)[r].contiguous() for k, v in whole.items()})
    dcpd.close()
    dist.destroy_process_group()


# -------------------------------------------------------------------------------------------------------------- script


def cases(o):
    import torch

    logging.getLogger("dcpd").addHandler(Said())
    if o.device == "cuda" and not torch.cuda.is_available():
        sys.exit("check-gpu: there is a GPU, but PyTorch does not see it: is its build for CUDA, and for this driver?")
    mib = max(16, min(o.mib, gpu_host.free(gpu_host.SHM) >> 22))
    c = Check(o.device, mib)
    with tempfile.TemporaryDirectory(prefix="dcpd-gpu-") as folder, c.dcpd.local(f"{folder}/checkpoints") as c.client:
        failed = c.all()
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def units(programs):
    """The unit tests, over the real libraries; which of them failed."""
    failed = []
    for p in programs:
        done = subprocess.run([p], env={**os.environ, "DCPD_TEST_GPU": "1"}, timeout=300, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        text = done.stdout.decode(errors="replace")
        print(text if done.returncode else "\n".join(x for x in text.splitlines() if "SKIPPED" in x or "PASSED" in x), flush=True)
        failed += [os.path.basename(p)] * bool(done.returncode)
    return failed


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--device", default="cuda")
    p.add_argument("--mib", type=int, default=256)
    p.add_argument("--units", nargs="*", default=[])
    p.add_argument("--cases", action="store_true")
    p.add_argument("--rank")
    p.add_argument("--engine")
    o = p.parse_args()
    if o.engine:
        engine(o.device, o.engine)
        return
    if o.rank:
        rank(o.device, o.rank)
        return
    if o.cases:
        cases(o)
        return
    if not gpu_host.tries("check-gpu", "nothing was tried", o.device):
        return
    gpu_host.find_nccl()
    failed = units(o.units)
    for name, conf in ALLOCATORS.items():
        print(f"{name} allocator:", flush=True)
        env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": conf} if conf else {**os.environ}
        done = subprocess.run([sys.executable, __file__, "--cases", "--device", o.device, "--mib", str(o.mib)], env=env)
        failed += [name] * bool(done.returncode)
        if o.device == "cpu":
            break
    sys.exit(f"check-gpu: failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
