"""What the dashboard is shown with: a daemon that has a training run, checkpoints that PyTorch wrote, and jobs that went well and wrong.

`python tests/e2e/world.py` starts such a daemon on files of this tree (--web-root web), prints the address, and waits for the end of its
standard input: for those who write the page.
"""
import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import struct
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "lib"))
sys.dont_write_bytecode = True

import dcpd as lib  # noqa: E402

FIXTURES = lib.ROOT / "tests/fixtures/torch-2.15.0"
RUN, RANKS, LAYERS, HIDDEN = "llama-demo/pretrain", 4, 4, 64
STEPS = (100, 200, 300, 400, 500, 600)
LOSS = (3.91, 2.87, 2.41, 2.22, 2.28, 2.17)
ODD = ("<script>alert(1)</script>", "\u202eevil\u202c.weight", "\U0001f9e0.weight", "אבג.weight")


def shapes():
    """The model's tensors: FQN → (shape, the dim that ranks share out, or None where every rank has all)."""
    out = {"model.embed.weight": ([256, HIDDEN], 0)}
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        out |= {at + "attn.qkv.weight": ([3 * HIDDEN, HIDDEN], 0), at + "attn.out.weight": ([HIDDEN, HIDDEN], 1),
                at + "mlp.up.weight": ([4 * HIDDEN, HIDDEN], 0), at + "mlp.down.weight": ([HIDDEN, 4 * HIDDEN], 1),
                at + "norm.weight": ([HIDDEN], None)}
    return out | {"model.norm.weight": ([HIDDEN], None), "model.head.weight": ([256, HIDDEN], 0)}


def numbers(seed, count, spread):
    """Floats that look like weights; the same ones for the same seed."""
    rand = random.Random(seed)
    few = [rand.gauss(0, spread) for _ in range(257)]
    return b"".join(struct.pack("<f", few[(i * 31 + i // 257) % 257]) for i in range(count))


def images(step, frozen=("model.embed.weight",)):
    """A segment image for each rank: weights that change from step to step but for `frozen`, and Adam's moments of one layer."""
    out = []
    for rank in range(RANKS):
        entries, tensors = {}, {}
        for fqn, (shape, dim) in shapes().items():
            sizes = list(shape)
            if dim is not None:
                sizes[dim] //= RANKS
            count = sizes[0] * (sizes[1] if len(sizes) > 1 else 1)
            seed = f"{fqn} {0 if fqn in frozen else step} {rank if dim is not None else 0}"
            offsets = [sizes[d] * rank if d == dim else 0 for d in range(len(sizes))]
            entries[fqn] = ("F32", sizes, numbers(seed, count, 0.02 * (1 + len(fqn) % 5)))
            tensors[fqn] = {"fqn": fqn, "global_shape": shape, "offsets": offsets}
        values = {"step": {"json": step}, "optim.lr": {"json": 3e-4}} if rank == 0 else {}
        out.append(lib.image(entries, {"tensors": tensors, "values": values}))
    return out


def train(d, steps=STEPS, run=RUN, storage="main"):
    for i, step in enumerate(steps):
        d.put("train", images(step), generation=step, create=i == 0)
        d.api.run("save", source={"state_dict": "train"}, target={"storage": storage, "name": f"{run}/step-{step}"},
                  metrics={"loss": LOSS[i % len(LOSS)]}, labels={"framework": "torch", "git": "4f2a91c"},
                  options={"incremental": True})
        for rank in range(RANKS):
            d.api.post(f"/v1/state-dicts/train/ranks/{rank}:release", {"generation": step}).ok()


def damage(d, name, storage="main"):
    """Flips one bit in the middle of the largest file; returns the file."""
    file = max((d.storages[storage] / name).glob("*.distcp"), key=lambda p: p.stat().st_size)
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    return file


def fixture(d, name, to, storage="main"):
    shutil.copytree(FIXTURES / name / "checkpoint", d.storages[storage] / to)


def odd_names(d, storage="main"):
    """A checkpoint whose tensors have names that a careless page would run, turn around or cut in two."""
    entries = {name: ("F32", [2, 3], struct.pack("<6f", *range(6))) for name in ODD}
    d.put("odd", [lib.image(entries)])
    d.api.run("save", source={"state_dict": "odd"}, target={"storage": storage, "name": "odd/<script>alert(2)<"})
    d.drop("odd")


def many_tensors(d, name, count=100000):
    """A checkpoint of so many small tensors, in groups of ten."""
    head = {f"model.layers.{i // 10}.mlp.experts.{i % 10}.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [16 * i, 16 * i + 16]}
            for i in range(count)}
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    d.put("many", [struct.pack("<Q", len(text)) + text + bytes(16 * count)])
    d.api.run("save", source={"state_dict": "many"}, target={"storage": "main", "name": name})
    d.drop("many")


def fill(d):
    """All of it; the daemon needs the storages main and archive."""
    train(d)
    ref = {"storage": "main", "name": f"{RUN}/step-600"}
    d.api.run("verify", source={**ref, "name": f"{RUN}/step-500"}, level="digest")
    run = lib.urllib.parse.quote(RUN, safe="")
    d.api.request("PUT", f"/v1/runs/main/{run}/aliases/best", {"name": f"{RUN}/step-600"}).ok()
    hold = d.api.storage_path("main", f"{RUN}/step-300", "/hold")
    d.api.request("PUT", hold, {"reason": "figures of the paper"}).ok()
    d.api.request("PUT", "/v1/policies/nightly", {"storage": "main", "match": RUN, "confirm": True, "trash": "72h",
                                                  "keep": {"last": 3, "best": {"metric": "loss"}, "ttl": "30d"}}).ok()
    fixture(d, "fsdp2_adam", "torch/fsdp2")
    fixture(d, "dtensor_2d_shard_shard", "torch/mesh-2x2")
    d.api.run("reshard", source=ref, target={"storage": "archive", "name": "llama-demo/serving-2", "world_size": 2,
                                             "layout": [{"match": "*weight", "mesh": [2], "placements": ["Shard(1)"], "optional": True}]})
    d.api.run("reshard", source=ref, target={"storage": "archive", "name": "llama-demo/hf", "format": "safetensors"})
    d.api.run("diff", a={**ref, "name": f"{RUN}/step-500"}, b=ref)
    odd_names(d)
    d.drop("train")
    train(d, (100, 200), run="vision/finetune")
    damage(d, "vision/finetune/step-100")
    d.drop("train")
    d.api.fails("load", source={"storage": "main", "name": "vision/finetune/step-100"}, target={"state_dict": "serve", "world_size": 2})
    d.api.wait(d.api.submit("verify", source={"storage": "main", "name": "vision/finetune/step-100"}, level="digest"))
    d.put("train", images(700), generation=700)
    return d


@contextlib.contextmanager
def started(args=()):
    home = pathlib.Path(tempfile.mkdtemp(prefix="dcpd-world-"))
    d = lib.Daemon(home, storages=("main", "archive"), args=["--workers", "2", *args])
    try:
        yield d
    finally:
        d.discard()
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with started(["--web-root", str(lib.ROOT / "web"), "--listen", f"127.0.0.1:{os.environ.get('PORT', '0')}"]) as world:
        fill(world)
        client = world.tcp_client()
        print(f"http://127.0.0.1:{client.tcp[1]}/#token={(world.state / 'token').read_text().strip()}", world.socket, flush=True)
        sys.stdin.read()
