"""No damaged byte is returned by any path of the daemon: what is stored is flipped here and there, and every reader either has the same
data or fails and says where; what has no digest is counted. tests/fault and tests/python look at all bytes; these are the cases by name."""
import json
import os
import pathlib
import shutil
import struct

import crafted as lib_crafted
import dcpd as lib
import pytest

GOLDEN = "torch-2.15.0/plain"
TENSORS = {"w": ("F32", [64, 48], struct.pack("<3072f", *range(3072))), "s": ("F32", [4, 4], struct.pack("<16f", *range(16))),
           "big": ("U8", [9 << 20], bytes(range(256)) * (9 << 12))}
VALUES = {"values": {"lr": {"json": 0.01}, "name": {"json": "a" * 40}}}


@pytest.fixture
def made(d):
    """A checkpoint of dcpd's own, never to be changed."""
    sd, name = lib.fresh(), f"trust/{lib.fresh()}"
    d.put(sd, [lib.image(TENSORS, VALUES)])
    d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": name})
    d.drop(sd)
    return d.storages["main"] / name


class Copy:
    """A copy of a checkpoint that may be spoiled."""

    def __init__(self, d, of, times=True):
        self.d, self.name = d, f"trust/{lib.fresh()}"
        self.dir = d.storages["main"] / self.name
        shutil.copytree(of, self.dir, copy_function=shutil.copy2 if times else shutil.copyfile)
        self.ref = {"storage": "main", "name": self.name}

    def items(self):
        """(FQN: (file, offset, length)) of chunks and values."""
        t = self.d.api.get(self.d.api.storage_path("main", self.name, "/tensors?page_size=1000")).ok(200)
        found = {x["fqn"]: (x["file"], x["offset"], x["length"]) for x in t["values"]}
        found.update({x["fqn"]: (c["file"], c["offset"], c["length"]) for x in t["tensors"] for c in x["chunks"][:1]})
        return found

    def flip(self, file, at, bit=0):
        with open(self.dir / file, "r+b") as f:
            f.seek(at)
            b = f.read(1)[0]
            f.seek(at)
            f.write(bytes([b ^ 1 << bit]))

    def load(self):
        sd = lib.fresh()
        j = self.d.api.wait(self.d.api.submit("load", source=self.ref, target={"state_dict": sd, "world_size": 1}))
        return (j, self.d.images(sd)[0]) if j["state"] == "succeeded" else (j, None)

    def verify(self, level="digest"):
        return self.d.api.wait(self.d.api.submit("verify", source=self.ref, level=level))

    def slice(self, fqn, text="", **query):
        q = "&".join(f"{k}={v}" for k, v in {"slice": text, **query}.items() if v)
        return self.d.api.get(self.d.api.storage_path("main", self.name, f"/tensors/{fqn}?{q}"))

    def fails(self, kind, *codes, **more):
        return self.d.api.fails(kind, *codes, source=self.ref, **more)

    def refused(self, *codes, file=".metadata"):
        """On every path."""
        target = {"storage": "main", "name": f"trust/{lib.fresh()}", "world_size": 2}
        for p in (self.fails("load", *codes, target={"state_dict": lib.fresh(), "world_size": 1}),
                  self.fails("reshard", *codes, target=target),
                  self.d.api.fails("diff", *codes, a=self.ref, b=self.ref), self.slice("w").problem(*codes),
                  self.d.api.get(self.d.api.storage_path("main", self.name, "/tensors")).problem(*codes),
                  self.d.api.get(self.d.api.storage_path("main", self.name)).problem(*codes),
                  self.d.api.post(self.d.api.storage_path("main", self.name, ":locate"), {"boxes": []}).problem(*codes)):
            assert p["file"] == file, p
        assert not (self.d.storages["main"] / target["name"]).exists()
        p = self.verify()["error"]
        assert p["code"] == "checkpoint_damaged" and p["damage"][0]["file"] == file, p


def payload_of(c, fqn, needle):
    file, offset, length = c.items()[fqn]
    at = (c.dir / file).read_bytes().find(needle, offset, offset + length)
    assert at > 0
    return file, at


def test_a_stored_value(d, made):
    """The bit that made lr 0.010001907."""
    c = Copy(d, made)
    file, at = payload_of(c, "lr", struct.pack(">d", 0.01))
    c.flip(file, at + 3, 2)
    for p in (c.fails("load", "digest_mismatch", target={"state_dict": lib.fresh(), "world_size": 1}),
              c.fails("reshard", "digest_mismatch", target={"storage": "main", "name": f"trust/{lib.fresh()}"}),
              d.api.fails("diff", "digest_mismatch", a=c.ref, b=c.ref),
              d.api.get(d.api.storage_path("main", c.name, "/tensors")).problem("digest_mismatch")):
        assert (p["fqn"], p["file"]) == ("lr", file) and p["offset"] <= at, p
    assert [(x["fqn"], x["part"]) for x in c.verify()["error"]["damage"]] == [("lr", "value")]


@pytest.mark.parametrize("case, fqn", [("torch-2.15.0/nested", None), ("torch-2.2.2/nested_v23", None)])
def test_a_stored_value_of_pytorch(d, case, fqn):
    """It has no digest but the CRC32 of its record."""
    c = Copy(d, d.storages["golden"] / case / "checkpoint")
    t = d.api.get(d.api.storage_path("main", c.name, "/tensors?page_size=1000")).ok(200)
    v = next(x for x in t["values"] if isinstance(x.get("value"), (int, float)))
    data = (c.dir / v["file"]).read_bytes()
    at = data.find(b"\x80\x02", v["offset"]) + 3
    c.flip(v["file"], at)
    p = c.fails("load", "digest_mismatch", target={"state_dict": lib.fresh(), "world_size": 1})
    assert (p["fqn"], p["file"]) == (v["fqn"], v["file"])


def test_the_head_of_an_item(d, made):
    """dcpd's own items are known by their layout: a load has the data whatever a head says. verify finds every spoiled byte of it."""
    c = Copy(d, made)
    want = c.load()[1].entries
    for fqn in ("w", "s", "big"):
        file, offset, length = c.items()[fqn]
        data = (c.dir / file).read_bytes()
        tail = data.find(b"PK\x01\x02", offset, offset + length)
        for at in (offset, offset + 30, offset + 142, offset + 330, tail + 9, tail + 50, offset + length - 1):
            c.flip(file, at, 6)
            j, image = c.load()
            assert image is not None and image.entries == want, (fqn, at, j.get("error"))
            e = c.verify()["error"]
            assert [(x["fqn"], x["part"], x["file"], x["offset"]) for x in e["damage"]] == [(fqn, "head", file, offset)], (at, e)
            c.flip(file, at, 6)
    assert c.verify()["state"] == "succeeded"


def test_the_strides_of_pytorchs_item(d):
    """A wrong CRC32 of data.pkl was loaded as a transposed tensor."""
    c = Copy(d, d.storages["golden"] / GOLDEN / "checkpoint")
    for fqn, (file, offset, length) in c.items().items():
        data = (c.dir / file).read_bytes()
        at = data.find(b"K\x00", data.find(b"cpu", offset, offset + length))
        if at < 0:
            continue
        c.flip(file, at + 1)
        p = c.fails("load", "digest_mismatch", target={"state_dict": lib.fresh(), "world_size": 1})
        assert (p["fqn"], p["file"]) == (fqn, file)
        assert c.verify()["error"]["damage"][0]["fqn"] == fqn
        c.flip(file, at + 1)
        return
    pytest.fail("no tensor")


@pytest.mark.parametrize("times", [True, False])
def test_metadata_that_are_not_the_manifests(d, made, times):
    """Also in a copy whose files are all new: nobody has saved there again."""
    c = Copy(d, made, times)
    c.flip(".metadata", 400)
    c.refused("checkpoint_damaged")


def test_a_manifest_that_is_not_what_was_written(d, made):
    c = Copy(d, made)
    text = (c.dir / ".dcpd.json").read_bytes()
    digest = json.loads(text)["files"][0]["items"][0][3].encode()
    (c.dir / ".dcpd.json").write_bytes(text.replace(digest, digest[::-1]))
    c.refused("checkpoint_damaged", file=".dcpd.json")


@pytest.mark.parametrize("times", [True, False])
def test_metadata_of_another_save(d, made, times):
    """Files whose content is the manifest's: a bit of the save's ID was hit, or two checkpoints' metadata were exchanged."""
    c = Copy(d, made, times)
    was = (c.dir / ".metadata").read_bytes()
    at = was.find(json.loads((c.dir / ".dcpd.json").read_bytes())["metadata"]["save_id"].encode())
    (c.dir / ".metadata").write_bytes(was[:at] + (b"0" if was[at:at + 1] != b"0" else b"1") + was[at + 1:])
    c.refused("checkpoint_damaged")
    sd, name = lib.fresh(), f"trust/{lib.fresh()}"
    d.put(sd, [lib.image(dict(reversed(TENSORS.items())), VALUES)])
    d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": name})
    d.drop(sd)
    shutil.copyfile(d.storages["main"] / name / ".metadata", c.dir / ".metadata")
    c.refused("checkpoint_damaged")


def test_pytorch_has_saved_the_same_over_it(d, made):
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    c = Copy(d, made)
    state = {k: torch.frombuffer(bytearray(t[2]), dtype=torch.uint8 if t[0] == "U8" else torch.float32).reshape(t[1])
             for k, t in TENSORS.items()}
    dcp.save({**state, "lr": 0.01, "name": "a" * 40}, checkpoint_id=str(c.dir), no_dist=True)
    assert [w["code"] for w in c.load()[0]["result"]["warnings"]] == ["manifest_outdated"]


def test_pytorch_has_saved_over_it(d, made):
    """Every file that the manifest lists is another one, and .metadata is of another save: read as PyTorch's, with a warning."""
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    c = Copy(d, made)
    dcp.save({"w": torch.ones(4, 4), "lr": 0.5}, checkpoint_id=str(c.dir), no_dist=True)
    assert (c.dir / ".dcpd.json").exists()
    j, image = c.load()
    r = j["result"]
    assert [w["code"] for w in r["warnings"]] == ["manifest_outdated"]
    assert [u["file"] for u in r["unverified"]] == [".metadata"] and r["unverified_bytes"] == (c.dir / ".metadata").stat().st_size
    assert image.values["lr"] == {"json": 0.5} and r["verified_bytes"] >= 64
    assert c.verify()["result"]["warnings"] == r["warnings"]


def test_only_some_files_were_replaced(d, made):
    """One file that is still the one that the manifest tells of makes it damage."""
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    sd, name = lib.fresh(), f"trust/{lib.fresh()}"
    parts = [lib.image({"w": ("F32", [2, 4], bytes(32))}, {"tensors": {"w": {"fqn": "w", "global_shape": [4, 4], "offsets": [2 * r, 0]}}})
             for r in range(2)]
    d.put(sd, parts)
    d.api.run("save", source={"state_dict": sd}, target={"storage": "main", "name": name})
    c = Copy(d, d.storages["main"] / name)
    dcp.save({"w": torch.ones(4, 4)}, checkpoint_id=str(c.dir), no_dist=True)
    assert (c.dir / "__1_0.distcp").exists()
    c.refused("checkpoint_damaged")


def test_all_damage_is_listed(d, made):
    c = Copy(d, made)
    places = {f: c.items()[f] for f in ("w", "s", "big", "lr")}
    file, at = payload_of(c, "lr", struct.pack(">d", 0.01))
    row, big = payload_of(c, "w", struct.pack("<3f", 100, 101, 102))[1], payload_of(c, "big", bytes(range(256)))[1]
    for where in (at, places["s"][1] + 40, row, big + (5 << 20)):
        c.flip(file, where)
    e = c.verify()["error"]
    assert e["code"] == "checkpoint_damaged" and e["damage_count"] == 4
    assert {(x["fqn"], x["part"]) for x in e["damage"]} == {("lr", "value"), ("s", "head"), ("w", "payload"), ("big", "payload")}
    c.flip(file, places["big"][1] + 10)  # its head too: one does not hide the other
    both = c.verify()["error"]
    assert sorted(x["part"] for x in both["damage"] if x["fqn"] == "big") == ["head", "payload"] and both["damage_count"] == 5
    x = next(x for x in e["damage"] if x["fqn"] == "big")
    assert (x["file"], x["rank"]) == (places["big"][0], 0) and x["offset"] <= big + (5 << 20) < x["offset"] + x["bytes"] <= big + (9 << 20)
    os.truncate(c.dir / file, places["big"][1] + 100)
    e = c.verify()["error"]
    assert ("big", "file") in {(x["fqn"], x["part"]) for x in e["damage"]} and e["damage_count"] >= 3
    (c.dir / file).unlink()
    e = c.verify()["error"]
    assert {x["part"] for x in e["damage"]} == {"file"} and {x["fqn"] for x in e["damage"]} == set(TENSORS) | set(VALUES["values"])


@pytest.mark.parametrize("level", ["structure", "digest"])
def test_damage_of_a_rank_local_checkpoint_is_listed_once(d, level):
    c = Copy(d, d.storages["golden"] / "torch-2.15.0/rank_local/checkpoint")
    (c.dir / "__0_0.distcp").unlink()
    e = c.verify(level)["error"]
    places = [(x["file"], x["offset"]) for x in e["damage"]]
    assert e["damage_count"] == len(places) == len(set(places)) > 0 and {f for f, _ in places} == {"__0_0.distcp"}


def test_padding_is_no_data(d, made):
    """Zeros between items are told from items."""
    c = Copy(d, made)
    ends = sorted((o + n, f) for f, o, n in c.items().values())
    end, file = next((e, f) for e, f in ends if (c.dir / f).read_bytes()[e:e + 1] == b"\0" and e % 64)
    c.flip(file, end)
    j = c.verify()
    assert j["state"] == "succeeded" and j["result"]["padding_damage"] == 1, j
    assert [(x["file"], x["offset"], x["bytes"], x["part"]) for x in j["result"]["padding"]] == [(file, end, 1, "padding")]
    assert c.load()[1] is not None


def test_slices(d, made):
    """By whole digest blocks: what lies in another one is not looked at."""
    c = Copy(d, made)
    want = TENSORS["big"][2]
    at = payload_of(c, "big", bytes(range(256)))[1]
    a = c.slice("big", "100:200")
    assert a.body == want[100:200] and a.headers["Dcpd-Unverified-Bytes"] == "0"
    c.flip(c.items()["big"][0], at + 150)
    p = c.slice("big", "100:140").problem("digest_mismatch")
    assert p["fqn"] == "big" and p["file"] == c.items()["big"][0]
    assert c.slice("big", f"{8 << 20}:{9 << 20}").body == want[8 << 20:]
    a = c.slice("big", "100:140", verify="none")
    assert a.body == want[100:140] and int(a.headers["Dcpd-Unverified-Bytes"]) >= 40
    c.slice("big", "100:140", verify="perhaps").problem("invalid_request")


def test_slices_of_pytorchs(d):
    """A whole chunk has one CRC32. Nothing protects the mapping of names to bytes: those of .metadata are counted."""
    c = lib_crafted.Crafted(d.storages["main"], GOLDEN)
    t = d.api.get(d.api.storage_path("main", c.name, "/tensors")).ok(200)
    assert t["unverified"][0]["file"] == ".metadata" and t["unverified_bytes"] == c.meta.stat().st_size
    w = max(t["tensors"], key=lambda x: x["bytes"])
    path = d.api.storage_path("main", c.name, f"/tensors/{w['fqn']}?slice=0:1")
    a = d.api.get(path)
    assert a.status == 200 and a.headers["Dcpd-Unverified-Bytes"] == str(c.meta.stat().st_size)
    data = bytearray((c.dir / w["chunks"][0]["file"]).read_bytes())
    at = data.find(a.body, w["chunks"][0]["offset"])
    data[at + w["bytes"] - 1] ^= 1
    (c.dir / w["chunks"][0]["file"]).write_bytes(data)
    assert d.api.get(path).problem("digest_mismatch")["fqn"] == w["fqn"]


def test_nothing_to_compare_with_is_said(d):
    """Archives without CRC32s: counted and named by every path, and an item each for verify."""
    c = Copy(d, d.storages["golden"] / "torch-2.15.0/crc32_off/checkpoint")
    names = set(c.items())
    for r in (c.load()[0]["result"], c.verify()["result"],
              d.api.run("reshard", source=c.ref, target={"storage": "main", "name": f"trust/{lib.fresh()}"})["result"]):
        assert r["unverified_bytes"] > 0 and {u["fqn"] for u in r["unverified"]} == names | {None}, r
        assert [w["code"] for w in r["warnings"]] == ["unverified"]
        assert sum(u["bytes"] for u in r["unverified"]) == r["unverified_bytes"] and all(u["file"] for u in r["unverified"])
    assert c.verify()["result"]["unverifiable"] == len(names)
    r = d.api.run("load", source=c.ref, target={"state_dict": lib.fresh(), "world_size": 1}, options={"verify": "none"})["result"]
    assert r["verified_bytes"] == 0 and "warnings" not in r


def test_it_was_not_looked_at(d, made):
    """`verify: none` is the way around, and says so."""
    c = Copy(d, made)
    file, at = payload_of(c, "w", struct.pack("<3f", 100, 101, 102))
    c.flip(file, at)
    r = d.api.run("load", source=c.ref, target={"state_dict": lib.fresh(), "world_size": 1}, options={"verify": "none"})["result"]
    assert r["verified_bytes"] == 0 and r["unverified_bytes"] >= sum(len(t[2]) for t in TENSORS.values())
    assert pathlib.Path(c.dir / file).exists()


@pytest.mark.parametrize("format", [None, "dcp", "safetensors"])
def test_without_checks_all_is_unverified(d, made, format):
    """Values too, and by whatever job."""
    c = Copy(d, made)
    kind, target = ("reshard", {"storage": "main", "name": f"trust/{lib.fresh()}", "format": format}) if format else \
        ("load", {"state_dict": lib.fresh(), "world_size": 1})
    r = d.api.run(kind, source=c.ref, target=target, options={"verify": "none"})["result"]
    assert r["verified_bytes"] == 0 and {u["fqn"] for u in r["unverified"]} == set(TENSORS) | set(VALUES["values"])
    assert r["unverified_bytes"] == sum(u["bytes"] for u in r["unverified"]) and "warnings" not in r
