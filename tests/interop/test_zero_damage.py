"""Flips, zeros, swaps and cuts in each file of DeepSpeed's checkpoints: a reshard gives equal data, or bytes that are counted as unverified
and that verify finds, or an error of those that tell of damage."""
import random
import shutil

import dcpd as lib
import mutate
import pytest
import torch
import zero_files

HERE = {"storage": "main"}
# Codes that tell of a fault in dcpd and not in the checkpoint.
NEVER = {"worker_lost", "peer_lost", "internal", "system", "no_memory", "protocol", "timed_out", "storage_io"}


def regions(root):
    return [mutate.Region(str(path.relative_to(root)), a, b, kind, "") for path in sorted(root.rglob("*.pt"))
            for a, b, kind in mutate.archive(path.read_bytes(), False)]


def ended(d, kind, **fields):
    answer = d.api.post("/v1/jobs", {"kind": kind, **fields})
    return {"state": "failed", "error": answer.problem()} if answer.status >= 400 else d.api.wait(answer.ok(202))


def tensors_of(d, name):
    tree = torch.load(d.storages["main"] / name, weights_only=False, mmap=False)
    return {k: (str(v.dtype), tuple(v.shape), v.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) if v.numel() else None
            for k, v in flat(tree)}


def flat(tree, below=""):
    for k, v in tree.items():
        if isinstance(v, dict):
            yield from flat(v, f"{below}{k}.")
        elif isinstance(v, torch.Tensor):
            yield below + k, v


def differences(got, known):
    return {k for k in {*got, *known} if got.get(k) != known.get(k)}


class Damage:
    def __init__(self, d, source):
        self.d, self.main, self.source = d, d.storages["main"], source
        self.known = self.resharded({**HERE, "name": source})[1]
        self.regions = regions(self.main / source)

    def resharded(self, source):
        out = f"{lib.fresh()}.pt"
        job = ended(self.d, "reshard", source=source, target={**HERE, "name": out, "format": "torch"})
        tensors = tensors_of(self.d, out) if job["state"] == "succeeded" else None
        (self.main / out).unlink(missing_ok=True)
        return job, tensors

    def fault(self, m):
        """What is wrong with what came of a mutation; None if nothing is."""
        name = lib.fresh()
        shutil.copytree(self.main / self.source, self.main / name)
        changed = m.apply(self.main / name)
        job, got = self.resharded({**HERE, "name": name})
        verified = ended(self.d, "verify", source={**HERE, "name": name}, level="digest")
        shutil.rmtree(self.main / name)
        if not self.d.alive():
            return "the daemon is gone"
        if job["state"] != "succeeded":
            e = job["error"]
            if e["code"] in NEVER or not e.get("file"):
                return f"{e['code']}: {e['detail']} [{e.get('file')}]"
            return None if changed else "an error of what nothing has changed"
        named = {x["fqn"] for x in job["result"]["unverified"]} | {x["fqn"] for x in verified.get("result", {}).get("unverified", ())}
        unlike = differences(got, self.known)
        if unlike and verified["state"] == "succeeded" and not unlike <= named:
            return f"other data, which nobody names: {sorted(unlike)[:3]}"
        return f"other data, not counted: {sorted(unlike)[:3]}" if unlike and not job["result"]["unverified_bytes"] else None


@pytest.fixture(params=["2", "3", "universal"])
def damage(d, request):
    g = torch.Generator().manual_seed(1)
    groups = [{"w": torch.randn(6, 5, generator=g), "same": torch.randn(6, 5, generator=g)}, {"b": torch.randn(9, generator=g)}]
    rest = {"frozen": {"f": torch.randn(7, generator=g)}, "buffers": {"n": torch.arange(4)}, "shared": {"head": "w"}}
    folder = d.storages["main"] / lib.fresh()
    step = zero_files.write_universal(folder, 3, 2, groups[1:], **{**rest, "shared": {}}) if request.param == "universal" else \
        zero_files.write(folder, int(request.param), 2, groups, **rest)
    return Damage(d, str(step.relative_to(d.storages["main"])))


def run(damage, count, seed):
    rng = random.Random(seed)
    found = [(str(m), fault) for m in mutate.sample(rng, damage.regions, [], count) if (fault := damage.fault(m))]
    assert not found, found


@pytest.mark.seconds(240)
def test_damage(damage):
    run(damage, 40, 5)


@pytest.mark.slow
@pytest.mark.seconds(3600)
def test_much_damage(damage):
    run(damage, 2000, random.randrange(1 << 30))
