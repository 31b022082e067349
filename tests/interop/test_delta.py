"""Deltas and what they are applied to, bit for bit: all dtypes, layouts and formats, chains, and the published form beside a reader and
writer of it that is none of ours (delta_form.py)."""
import random
import shutil

import delta_form as form
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transform_cases as cases
from safetensors.torch import load_file, save_file

import dcpd as lib

HERE = {"storage": "main"}
SAFE = [t for t in (*cases.FLOATS, *cases.INTS) if "fnuz" not in str(t)]  # safetensors has these
DTYPES = [*cases.FLOATS, *cases.INTS, torch.complex64, torch.complex128]


def data(t):
    return cases.raw(t).numpy().tobytes()


def state(seed, dtypes=tuple(DTYPES)):
    """Tensors of every dtype, of many shapes: of no dims, of no elements, of more than a block."""
    g, r, out = torch.Generator().manual_seed(seed), random.Random(seed), {}
    for i, dtype in enumerate(dtypes):
        for k, shape in enumerate([(), (0, 4), (7,), (r.randint(1, 40), r.randint(1, 90)), (3, 5, r.randint(1, 70))]):
            n = torch.Size(shape).numel() * dtype.itemsize
            raw = torch.randint(0, 256, (n,), generator=g, dtype=torch.uint8)
            raw = raw % 2 if dtype == torch.bool else raw
            out[f"layers.{i}.{k}"] = raw.view(dtype).reshape(shape)
    big = torch.randint(0, 256, (1_300_000 * 2,), generator=g, dtype=torch.uint8)
    out["model.big"] = big.view(torch.bfloat16).reshape(1300, 1000)
    return out


def changed(before, seed, share=0.4, density=0.02):
    """Some of the tensors with some of their bytes changed."""
    r, g, out = random.Random(seed), torch.Generator().manual_seed(seed), {}
    for name, t in before.items():
        raw = cases.raw(t)
        if t.numel() and (r.random() < share or name == "model.big"):
            where = torch.rand(raw.numel(), generator=g) < density
            where[r.randrange(raw.numel())] = True
            flip = torch.randint(1, 256, raw.shape, generator=g, dtype=torch.uint8) if t.dtype != torch.bool else torch.ones_like(raw)
            raw = torch.where(where, raw ^ flip, raw)
        out[name] = raw.view(t.dtype).reshape(t.shape)
    return out


def put(d, tensors, seed=0, world=1):
    ref = {**HERE, "name": lib.fresh()}
    if world == 0: # one file of safetensors
        ref["name"] += ".safetensors"
        save_file(tensors, str(d.storages["main"] / ref["name"]))
        return ref
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(str(d.storages["main"] / ref["name"])), no_dist=True)
    if world > 1:
        cut = {**HERE, "name": ref["name"] + "-cut"}
        d.api.run("reshard", source=ref, target={**cut, "world_size": world, "layout": cases.layout(seed, tensors, world)})
        return cut
    return ref


def get(d, ref, like):
    got = {k: torch.zeros(v.shape, dtype=v.dtype) for k, v in like.items()}
    dcp.load(got, storage_reader=dcp.FileSystemReader(str(d.storages["main"] / ref["name"])), no_dist=True)
    return got


def delta(d, base, new, encoding="xor", **more):
    to = {**HERE, "name": lib.fresh() + "/weight_v000007"}
    return to, d.api.run("delta", base=base, source=new, target=to, encoding=encoding, **more)["result"]


def apply(d, base, change, world=1, layout=(), name=None, **more):
    to = {**HERE, "name": name or lib.fresh()}
    return to, d.api.run("apply", base=base, source=change, target={**to, "world_size": world, "layout": list(layout), **more})["result"]


def digest(tensors):
    return form.content_digest({k: (str(t.dtype).removeprefix("torch."), tuple(t.shape), data(t)) for k, t in tensors.items()})


def folder(d, ref):
    return d.storages["main"] / ref["name"]


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_all_dtypes(d, encoding):
    """Base on four ranks, new on one; applied to two ranks; read by the other reader, too."""
    before = state(1)
    after = changed(before, 2)
    base, new = put(d, before, 3, 4), put(d, after)
    change, result = delta(d, base, new, encoding)
    names = {k for k in after if data(before[k]) != data(after[k])}
    assert form.read(folder(d, change), {k: data(t) for k, t in before.items()}) == {k: data(after[k]) for k in names}
    assert result["changed_tensors"] == len(names) and result["tensors"] == len(names) and result["format"] == "delta"
    assert result["changed_bytes"] == sum(int((cases.raw(before[k]) != cases.raw(after[k])).sum()) for k in names)
    assert result["base_content_digest"] == digest(before) and result["content_digest"] == digest(after)
    meta = form.index(folder(d, change))["metadata"]
    assert meta["version"] == "000007" and meta["delta_encoding"] == encoding and meta["content_digest"] == digest(after)
    to, done = apply(d, base, change, 2, cases.layout(5, after, 2))
    cases.same(get(d, to, after), after)
    assert done["content_digest"] == digest(after) and done["base_content_digest"] == digest(before)
    assert d.api.run("diff", a=new, b=to)["result"]["equal"]
    d.api.run("verify", source=to)
    d.api.run("verify", source=change)


@pytest.mark.long
@pytest.mark.parametrize("in_memory", [True, False], ids=["base in memory", "base on disk"])
def test_into_memory(d, in_memory):
    """A delta is applied into shared memory, of a base there or on disk: into a new state dict in another layout, which the next delta is
    applied to, and into one that is there. Nobody sees what is of another base."""
    first = state(31)
    second, third = changed(first, 32), changed(first, 33)
    base, changes = put(d, first, 3, 2), []
    for before, after in (first, second), (second, third):
        old, new = put(d, before), put(d, after)
        changes.append(delta(d, old, new)[0])
    here = [lib.fresh() for _ in range(3)]
    if in_memory:
        d.api.run("load", source=base, target={"state_dict": here[0], "world_size": 2, "layout": cases.layout(8, first, 2)})
    layout = cases.layout(5, first, 3)
    done = d.api.run("apply", base={"state_dict": here[0]} if in_memory else base, source=changes[0],
                     target={"state_dict": here[1], "world_size": 3, "layout": layout, "lease_seconds": 600})["result"]
    assert done["content_digest"] == digest(second) and done["base_content_digest"] == digest(first) and done["world_size"] == 3
    d.api.run("apply", base={"state_dict": here[1]}, source=changes[1], target={"state_dict": here[2], "world_size": 1})
    saved = [{**HERE, "name": lib.fresh()} for _ in range(2)]
    d.api.run("save", source={"state_dict": here[2]}, target=saved[0])
    cases.same(get(d, saved[0], third), third)
    r = d.ctl("apply", f"shm:{here[1]}", f"main:{changes[1]['name']}", f"shm:{here[2]}")
    assert r.returncode == 0, r.stderr
    error = d.api.fails("apply", "base_mismatch", base=base, source=changes[1], target={"state_dict": here[1]})
    assert error["expected"] == digest(second) and error["actual"] == digest(first)
    d.api.fails("apply", "base_mismatch", base=base, source=changes[1], target={"state_dict": here[1] + "x"})
    d.api.get(f"/v1/state-dicts/{here[1]}x").problem("not_found")
    d.api.run("save", source={"state_dict": here[1]}, target=saved[1])
    cases.same(get(d, saved[1], second), second)
    for target, options in ({"state_dict": here[1], "format": "safetensors"}, {}), ({"state_dict": here[1]}, {"overwrite": True}), \
            ({**HERE, "name": "new", "lease_seconds": 5}, {}), ({"state_dict": here[1]}, {"files_per_rank": 2}):
        d.api.post("/v1/jobs", {"kind": "apply", "base": base, "source": changes[0], "target": target,
                                "options": options}).problem("validation_failed")
    d.api.post("/v1/jobs", {"kind": "apply", "base": {"state_dict": here[1]}, "source": changes[0],
                            "target": {"state_dict": here[1]}}).problem("validation_failed")
    for name in here[not in_memory:]:
        d.drop(name)


def test_values_travel(d):
    """All of the new side's, changed or not, with their paths; what it lacks is gone. Other readers of the form pass over them."""
    w = torch.arange(1000.0)
    sides = [{"model": {"w": w}, "step": 6, "gone": "x", "optim": {"groups": [{"lr": 0.5, "names": ["w"]}]}},
             {"model": {"w": w + 1}, "step": 7, "optim": {"groups": [{"lr": 0.25, "names": ["w", "é"]}]}, "shape": torch.Size([3, 4])}]
    refs = [{**HERE, "name": f"{lib.fresh()}.pt"} for _ in sides]
    for ref, tree in zip(refs, sides):
        torch.save(tree, folder(d, ref))
    change, result = delta(d, *refs)
    assert "dropped" not in result
    assert form.read(folder(d, change), {"model.w": data(w)}) == {"model.w": data(w + 1)}
    for base in refs[0], {"state_dict": (held := lib.fresh())}:
        if base is not refs[0]:
            d.api.run("load", source=refs[0], target={"state_dict": held})
        to, done = apply(d, base, change, name=f"{lib.fresh()}.pt", format="torch")
        got = torch.load(folder(d, to), weights_only=True)
        assert torch.equal(got["model"].pop("w"), w + 1) and "dropped" not in done
        assert got == {"model": {}, "step": 7, "optim": sides[1]["optim"], "shape": torch.Size([3, 4])}
    d.drop(held)
    made = lib.fresh()
    d.api.run("apply", base=refs[0], source=change, target={"state_dict": made})
    saved = {**HERE, "name": lib.fresh()}
    d.api.run("save", source={"state_dict": made}, target=saved)
    values = set(dcp.FileSystemReader(str(folder(d, saved))).read_metadata().state_dict_metadata)
    assert values == {"model.w", "step", "shape", "optim.groups.0.lr", "optim.groups.0.names"}
    d.drop(made)


@pytest.mark.parametrize("encoding", [pytest.param("xor", marks=pytest.mark.long), "overwrite"])
@pytest.mark.parametrize("checksum", ["xxh3-128", pytest.param("adler32", marks=pytest.mark.long)])
def test_slimes(d, encoding, checksum):
    """What a writer of the published form writes, without a content digest, is applied."""
    before = state(11, SAFE)
    after = changed(before, 12)
    base, change = put(d, before, 0, 0), {**HERE, "name": lib.fresh()}
    old, new = ({k: data(t) for k, t in s.items()} for s in (before, after))
    form.write(folder(d, change), old, new, encoding, checksum, level=19)
    shown = d.api.get(f"/v1/checkpoints/main/{change['name']}").ok()
    assert shown["format"] == "delta"
    to, result = apply(d, base, change, name=lib.fresh() + ".safetensors", format="safetensors")
    cases.same(load_file(str(folder(d, to))), after)
    assert result["content_digest"] == digest(after)


def test_content_digests(d):
    """One for equal tensors, whatever the layout and format."""
    tensors = state(21, SAFE)
    dcp_ref, cut, flat = put(d, tensors), put(d, tensors, 5, 3), put(d, tensors, 0, 0)
    for a, b in ((dcp_ref, cut), (cut, flat), (flat, flat)):
        change, result = delta(d, a, b)
        assert result["changed_tensors"] == 0 and result["base_content_digest"] == result["content_digest"] == digest(tensors)
        assert form.index(folder(d, change))["weight_map"] == {}
    to, _ = apply(d, cut, change)
    cases.same(get(d, to, tensors), tensors)


def test_chain(d):
    """Three deltas, each of the one before; each is refused by any other base."""
    states = [state(31, (torch.bfloat16, torch.float32))]
    for i in range(3):
        states.append(changed(states[-1], 40 + i))
    refs = [put(d, s, i, 1 + i % 3) for i, s in enumerate(states)]
    changes = [delta(d, a, b, e)[0] for a, b, e in zip(refs, refs[1:], ("xor", "overwrite", "xor"))]
    at = refs[0]
    for i, change in enumerate(changes):
        other = d.api.fails("apply", "base_mismatch", base=refs[(i + 2) % 4], source=change, target={**HERE, "name": lib.fresh()})
        assert digest(states[i]) in other["detail"] and digest(states[(i + 2) % 4]) in other["detail"]
        at, _ = apply(d, at, change, 1 + i)
        cases.same(get(d, at, states[i + 1]), states[i + 1])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_random_pairs(d, seed):
    r = random.Random(seed)
    before = state(100 + seed, tuple(r.sample(SAFE, 4)))
    after = changed(before, 200 + seed, r.random(), r.choice([0.0001, 0.05, 0.9]))
    base, new = (put(d, t, seed, r.choice([0, 1, 2, 4])) for t in (before, after))
    change, _ = delta(d, base, new, r.choice(["xor", "overwrite"]))
    to, _ = apply(d, base, change, 3, cases.layout(seed, after, 3))
    cases.same(get(d, to, after), after)


def test_not_a_source(d):
    before = state(51, (torch.float32,))
    change, _ = delta(d, put(d, before), put(d, changed(before, 52)))
    said = d.api.fails("reshard", "format_unsupported", source=change, target={**HERE, "name": lib.fresh()})
    assert "apply" in said["detail"]
    assert d.api.run("inspect", source=change)["result"]["safe"]
    shutil.rmtree(folder(d, change))


def test_command_line(d):
    """dcpctl delta and apply, and what ls and show say; the exit status of a wrong base."""
    before = state(61, (torch.bfloat16,))
    base, new = put(d, before), put(d, changed(before, 62))
    a, b, change, out = (f"main:{r['name']}" for r in (base, new, *({"name": lib.fresh()} for _ in range(2))))
    done = d.ctl("delta", a, b, change, "--encoding", "overwrite", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"delta"') and "content_digest" in done.stdout
    assert any(line.split()[:2] == [change[5:], "delta"] or (change[5:] in line and " delta " in line)
               for line in d.ctl("ls", "main").stdout.splitlines())
    assert "delta" in d.ctl("show", change).stdout
    assert d.ctl("apply", a, change, out).returncode == 0 and d.ctl("diff", b, out).returncode == 0
    wrong = d.ctl("apply", b, change, out + "-2")
    assert wrong.returncode == 5 and "content digest" in wrong.stderr
    assert d.ctl("delta", a, b).returncode == 2
