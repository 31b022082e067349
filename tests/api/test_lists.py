"""Lists of checkpoints: order and pages, what is kept between pages and how it follows what happens on the disk, and what a page costs."""
import json
import os
import random
import shutil
import struct
import time
import urllib.parse

import pytest

import dcpd as lib


def page(d, storage="main", **query):
    at = f"/v1/checkpoints{'/' + storage if storage else ''}"
    return d.api.get(f"{at}?{urllib.parse.urlencode(query, quote_via=urllib.parse.quote)}").ok(200)


def pages(d, size, storage="main", **query):
    """Names, page after page; no page is longer than `size`."""
    names, token = [], None
    while True:
        p = page(d, storage, page_size=size, **query, **({"page_token": token} if token else {}))
        assert len(p["checkpoints"]) <= size and "problems" not in p
        names += [c["name"] for c in p["checkpoints"]]
        token = p.get("next_page_token")
        if not token:
            return names


def checkpoint(root, name):
    at = root / name
    at.mkdir(parents=True)
    (at / ".metadata").write_bytes(b"x")


def is_checkpoint(at):
    if at.is_symlink():
        return False
    if at.is_file():
        return at.suffix in (".pt", ".pth", ".safetensors")
    return any(f.name == ".metadata" or f.suffix == ".safetensors" for f in at.iterdir() if not f.is_dir())


def truth(root):
    """What a list must say: names in the order of their bytes."""
    found, todo = [], [root]
    while todo:
        at = todo.pop()
        for e in at.iterdir():
            if e.name[0] in ".-" or e.is_symlink():
                continue
            if is_checkpoint(e):
                found.append(str(e.relative_to(root)))
            elif e.is_dir():
                todo.append(e)
    return sorted(found, key=os.fsencode)


def grow(rng, at, depth):
    """Names that are the beginnings of others, with bytes below and above the slash."""
    names = ["a", "a-", "a-b", "a--", "a.c", "a b", "a0", "ab", "b", "b!", "b!x", "ä", "z", "y", ".hidden", "-x"]
    for name in rng.sample(names, rng.randint(5, 11)):
        kind = rng.random()
        if kind < 0.35:
            checkpoint(at, name)
        elif kind < 0.45:
            (at / f"{name}.pt").write_bytes(b"x")
        elif kind < 0.5:
            (at / f"{name}.txt").write_bytes(b"x")
        elif kind < 0.55:
            (at / name).symlink_to("/")
        else:
            (at / name).mkdir()
            if depth:
                grow(rng, at / name, depth - 1)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(i, marks=pytest.mark.long) for i in range(2, 6))])
def test_order_and_pages(spawn, seed):
    """Pages of any size, one after the other, are the whole list: each checkpoint once, in the order of the bytes of its name."""
    rng = random.Random(seed)
    d = spawn()
    root = d.storages["main"]
    grow(rng, root, 3)
    checkpoint(root, "one")
    want = truth(root)
    assert len(want) > 3
    for size in (1, 2, 3, 7, 1000):
        assert pages(d, size) == want, size
    for prefix in ["a", "a-", "a/", "b!", "ab", "nope", *rng.sample(want, 2), want[0][:-1]]:
        assert pages(d, 3, prefix=prefix) == [n for n in want if n.startswith(prefix)], prefix
    for name in rng.sample(want, 3):  # a token may be of what is gone
        assert pages(d, 1000, page_token=f"main:{name}") == [n for n in want if os.fsencode(n) > os.fsencode(name)]


def test_lists_follow_the_disk(spawn):
    """What this daemon or others make, move, replace and remove shows in the very next list, however fast it goes."""
    rng = random.Random(1)
    d = spawn()
    root = d.storages["main"]
    checkpoint(root, "runs/0/s0")
    d.put("s", [lib.image({"w": ("U8", [8], b"abcdefgh")})])
    for i in range(150):
        names = truth(root)
        what = rng.randrange(6)
        at = root / rng.choice(names) if names else None
        if what == 0 or at is None:
            checkpoint(root, f"runs/{rng.randrange(3)}/new{i}")
        elif what == 1:
            shutil.rmtree(at)
        elif what == 2:
            to = root / f"runs/{rng.randrange(3)}/moved{i}"
            to.parent.mkdir(exist_ok=True)
            at.rename(to)
        elif what == 3:
            (at / ".metadata").unlink()  # a checkpoint no more
        elif what == 4:  # it was a directory with a checkpoint, and is one itself
            (at.parent / ".metadata").write_bytes(b"x")
            assert [c["name"] for c in page(d, page_size=1000)["checkpoints"]] == truth(root), i
            (at.parent / ".metadata").unlink()
        elif i % 3 == 0:
            d.api.run("save", source={"state_dict": "s"}, target={"storage": "main", "name": f"runs/9/saved{i}"})
        elif "saved" in at.name:
            d.api.run("delete", target={"storage": "main", "name": str(at.relative_to(root))})
        assert [c["name"] for c in page(d, page_size=1000)["checkpoints"]] == truth(root), (i, what)


def test_a_file_of_another_tool_hides_no_checkpoints(spawn):
    """A .safetensors file among checkpoints is one beside them; saves and deletes go on. Bound by an index, or alone, they are one."""
    d = spawn()
    root = d.storages["main"]
    d.put("s", [lib.image({"w": ("U8", [8], b"abcdefgh")})])
    save = {"source": {"state_dict": "s"}, "target": {"storage": "main", "name": "run/step-1"}}
    d.api.run("save", **save)
    header = b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    file = len(header).to_bytes(8, "little") + header + b"1234"
    (root / "run" / "final.safetensors").write_bytes(file)
    assert pages(d, 10) == ["run/final.safetensors", "run/step-1"]
    save["target"]["name"] = "run/deeper/step-2"
    d.api.run("save", **save)
    assert pages(d, 1) == ["run/deeper/step-2", "run/final.safetensors", "run/step-1"]
    assert pages(d, 10, prefix="run/s") == ["run/step-1"]
    d.api.fails("delete", "not_a_checkpoint", target={"storage": "main", "name": "run"})
    assert d.api.get(d.api.storage_path("main", "run")).ok()["format"] == "safetensors", "who names the folder means its file"
    (root / "run" / "model.safetensors.index.json").write_text('{"weight_map":{"w":"final.safetensors"}}')
    assert pages(d, 10) == ["run"]
    (root / "run" / "model.safetensors.index.json").unlink()
    for name in ("run/step-1", "run/deeper/step-2"):
        assert name in pages(d, 10)
        d.api.run("delete", target={"storage": "main", "name": name})
    assert pages(d, 10) == ["run"]
    assert d.api.fails("save", "name_invalid", **save)["detail"]


def test_records_are_never_old(spawn):
    """A file that grows in place changes no directory; size and etag follow all the same."""
    d = spawn()
    checkpoint(d.storages["main"], "c")
    first = page(d)["checkpoints"][0]
    f = d.storages["main"] / "c" / "__0_0.distcp"
    f.write_bytes(b"x" * 100)
    second = page(d)["checkpoints"][0]
    with f.open("r+b") as o:
        o.write(b"y" * 1000)
    third = page(d)["checkpoints"][0]
    assert (first["bytes"], second["bytes"], third["bytes"]) == (1, 101, 1001)
    assert len({c["etag"] for c in (first, second, third)}) == 3


def lookup_cpu(d):
    """CPU seconds of the daemon's look-up workers, ended ones too."""
    total = 0
    for pid in [d.proc.pid, *d.workers()]:
        with open(f"/proc/{pid}/stat") as f:
            part = f.read().rpartition(")")[2].split()
        total += sum(map(int, part[13:15] if pid == d.proc.pid else part[11:13]))
    return total / os.sysconf("SC_CLK_TCK")


@pytest.mark.long
def test_a_page_does_not_walk_the_tree(spawn):
    """All of 6,000 in pages of 50 cost the workers little more than in pages of 1,000: each checkpoint is opened once either way."""
    d = spawn(args=["--lookup-idle", "1h"])
    root = d.storages["main"]
    checkpoint(root, "runs/seed")
    for i in range(6000):
        (root / f"runs/step-{i:05}").mkdir()
        os.link(root / "runs/seed/.metadata", root / f"runs/step-{i:05}/.metadata")
    assert len(pages(d, 1000)) == 6001
    start = lookup_cpu(d)
    pages(d, 1000)
    large = lookup_cpu(d) - start
    start = lookup_cpu(d)
    assert len(pages(d, 50)) == 6001
    small = lookup_cpu(d) - start
    assert small <= 5 * large + 0.5, f"{small:.2f} s of CPU in pages of 50, {large:.2f} s in pages of 1,000"


def test_a_token_may_be_long(spawn):
    """Names of the greatest length that is allowed: the list goes on behind them."""
    d = spawn()
    stem = "/".join(["x" * 200] * 15)
    for last in "abc":
        checkpoint(d.storages["main"], f"{stem}/{last * 200}")
    assert pages(d, 1) == [f"{stem}/{last * 200}" for last in "abc"]


def test_storages_one_after_the_other(spawn):
    """A list of all storages is in the order of their names; one that is gone is told as a problem where its turn comes."""
    d = spawn(("alpha", "beta", "gamma"))
    for s in ("alpha", "gamma"):
        for i in range(3):
            checkpoint(d.storages[s], f"r/{i}")
    assert pages(d, 2, storage=None) == ["r/0", "r/1", "r/2"] * 2
    first = page(d, None, page_size=3)
    assert {c["storage"] for c in first["checkpoints"]} == {"alpha"} and first["next_page_token"]
    assert "next_page_token" not in page(d, None, page_size=6)
    shutil.rmtree(d.storages["beta"])
    p = page(d, None, page_size=10)
    assert len(p["checkpoints"]) == 6 and [x["storage"] for x in p["problems"]] == ["beta"]
    assert p["problems"][0]["code"] == "storage_gone"
    for token in ("alpha:r/1", "alpha:", "alphabet:x", "zeta:", "gamma", "nonsense"):
        storage, _, name = token.partition(":")
        want = [(s, f"r/{i}") for s in ("alpha", "gamma") for i in range(3) if (s, f"r/{i}") > (storage, name)]
        assert [(c["storage"], c["name"]) for c in page(d, None, page_token=token)["checkpoints"]] == want, token


def safetensors(names):
    head = json.dumps({n: {"dtype": "U8", "shape": [4], "data_offsets": [4 * i, 4 * i + 4]} for i, n in enumerate(names)}).encode()
    return struct.pack("<Q", len(head)) + head + bytes(4 * len(names))


def in_place(file, data):
    """Another content of the same length in the same file."""
    assert file.stat().st_size == len(data)
    with open(file, "r+b") as f:
        f.write(data)


def fqns(d, name):
    return [t["fqn"] for t in d.api.get(d.api.storage_path("main", name, "/tensors")).ok(200)["tensors"]]


def test_tensors_follow_what_happens_to_files(spawn):
    """A checkpoint that was parsed is kept for the next question, of whatever format; one that was written to in place is another one."""
    d = spawn(args=["--workers", "2"])
    root = d.storages["main"]
    (root / "many").mkdir()
    (root / "many/model-00001-of-00002.safetensors").write_bytes(safetensors(["a1", "b1"]))
    (root / "many/model-00002-of-00002.safetensors").write_bytes(safetensors(["a1", "c1"]))
    index = root / "many/model.safetensors.index.json"
    first, second = (json.dumps({"weight_map": {"a1": f"model-0000{n}-of-00002.safetensors", "b1": "model-00001-of-00002.safetensors",
                                                "c1": "model-00002-of-00002.safetensors"}}).encode() for n in (1, 2))
    index.write_bytes(first)
    (root / "one.safetensors").write_bytes(safetensors(["x1", "y1"]))
    time.sleep(4)  # what was changed a moment ago is not kept

    def file_of_a():
        return next(t["chunks"][0]["file"] for t in d.api.get(d.api.storage_path("main", "many", "/tensors")).ok(200)["tensors"]
                    if t["fqn"] == "a1")

    for _ in range(2):
        assert sorted(fqns(d, "many")) == ["a1", "b1", "c1"] and file_of_a().startswith("model-00001")
    in_place(index, second)
    assert file_of_a().startswith("model-00002")
    in_place(root / "many/model-00001-of-00002.safetensors", safetensors(["a2", "b1"]))
    assert sorted(fqns(d, "many")) == ["a1", "a2", "b1", "c1"]
    (root / "many/model-00002-of-00002.safetensors").unlink()
    d.api.get(d.api.storage_path("main", "many", "/tensors")).problem("checkpoint_incomplete")
    for _ in range(2):
        assert sorted(fqns(d, "one.safetensors")) == ["x1", "y1"]
    in_place(root / "one.safetensors", safetensors(["x1", "y2"]))
    assert sorted(fqns(d, "one.safetensors")) == ["x1", "y2"]
    os.replace(root / "one.safetensors", root / "two.safetensors")
    d.api.get(d.api.storage_path("main", "one.safetensors", "/tensors")).problem("not_found")
    assert sorted(fqns(d, "two.safetensors")) == ["x1", "y2"]
