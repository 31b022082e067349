"""A sealed generation as bytes: each rank's image over HTTP, by ranges, with digests, and a folder of images as a checkpoint."""
import json
import socket
import sys

import package
import pytest

import dcpd as lib

BLOCK = 4 << 20


@pytest.fixture(scope="module")
def d(tmp_path_factory):
    d = lib.Daemon(tmp_path_factory.mktemp("images"), storages=("main",))
    yield d
    d.discard()


def images(world=2, rows=4, seed=1):
    """Row-wise shards of "w", and a value."""
    whole = bytes((seed + i) % 251 for i in range(world * rows * 8))
    step = rows * 8
    return [lib.image({"w": ("U8", [rows, 8], whole[r * step : (r + 1) * step])},
                      {"tensors": {"w": {"fqn": "w", "global_shape": [world * rows, 8], "offsets": [r * rows, 0]}},
                       "values": {"step": {"json": seed}}}) for r in range(world)]


def get(d, name, rank, query="", **headers):
    return d.api.get(f"/v1/state-dicts/{name}/ranks/{rank}/image{query}", headers=headers)


def test_an_image_comes_as_it_lies_in_memory(d):
    sd, data = lib.fresh(), images()
    d.put(sd, data, generation=3)
    for rank in range(2):
        got = get(d, sd, rank)
        assert got.status == 200 and got.body == data[rank]
        assert got.headers["Content-Type"] == "application/x-safetensors" and got.headers["Dcpd-Generation"] == "3"
    tag = got.headers["ETag"]
    assert get(d, sd, 1, "?generation=3", **{"If-None-Match": tag}).status == 304
    part = get(d, sd, 1, Range="bytes=5-20")
    assert part.status == 206 and part.body == data[1][5:21] and part.headers["Content-Range"] == f"bytes 5-20/{len(data[1])}"
    assert get(d, sd, 1, **{"Range": "bytes=5-20", "If-Range": '"another"'}).body == data[1]
    get(d, sd, 1, Range=f"bytes={len(data[1])}-").problem("range_invalid", status=416)
    head = d.api.request("HEAD", f"/v1/state-dicts/{sd}/ranks/0/image")
    assert head.status == 200 and head.body == b"" and head.headers["Content-Length"] == str(len(data[0]))
    d.put(sd, images(seed=2), generation=4, create=False)
    assert get(d, sd, 1, "?generation=3").headers["ETag"] == tag != get(d, sd, 1).headers["ETag"]
    get(d, sd, 0, "?generation=9").problem("not_sealed", status=409)
    get(d, sd, 2).problem("not_found")
    get(d, "none", 0).problem("not_found")
    get(d, sd, 0, "?generation=x").problem("invalid_request")
    get(d, sd, 0, "?wait=1s").problem("unknown_field", "invalid_request")
    d.drop(sd)


def test_a_slot_that_is_being_read_is_not_handed_out(d):
    """The client has asked for more than fits the sockets' buffers, and reads none of it."""
    sd, data = lib.fresh(), lib.image({"w": ("U8", [64 << 20], bytes(64 << 20))})
    d.put(sd, [data], generation=1, slots=1)
    with socket.socket(socket.AF_UNIX) as c:
        c.connect(str(d.socket))
        c.sendall(f"GET /v1/state-dicts/{sd}/ranks/0/image HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        first = c.recv(100)
        assert first.startswith(b"HTTP/1.1 200")
        d.api.post(f"/v1/state-dicts/{sd}/ranks/0:release", {"generation": 1}).ok(200, 204)
        d.api.post(f"/v1/state-dicts/{sd}/ranks/0:reserve", {"bytes": 4096, "generation": 2}).problem("slots_busy")
        d.api.delete(f"/v1/state-dicts/{sd}").problem("state_dict_busy")
        d.api.get("/livez").ok(200)  # the loop goes on meanwhile
        rest = b"".join(iter(lambda: c.recv(1 << 20), b""))
    assert (first + rest).endswith(data[-1000:]) and len(first + rest) > len(data)
    lib.wait_for(lambda: d.api.post(f"/v1/state-dicts/{sd}/ranks/0:reserve", {"bytes": 4096, "generation": 2}).status == 200)
    d.drop(sd)


def test_digests_are_of_each_tensor_by_blocks(d):
    """That they are right, the loads below say, and the nodes of a cluster."""
    sd = lib.fresh()
    big = bytes(range(256)) * (BLOCK * 5 // 2 // 256)
    data = [lib.image({"big": ("U8", [len(big)], big), "empty": ("F32", [0], b""), "one": ("F32", [], b"\0\0\x80?")})]
    d.put(sd, data, generation=5)
    got = d.api.get(f"/v1/state-dicts/{sd}/digests")
    doc = got.ok(200)
    assert got.headers["ETag"] == get(d, sd, 0).headers["ETag"] and got.headers["Dcpd-Generation"] == "5"
    assert d.api.get(f"/v1/state-dicts/{sd}/digests", headers={"If-None-Match": got.headers["ETag"]}).status == 304
    assert doc["generation"] == 5 and doc["world_size"] == 1
    (file,) = doc["files"]
    assert file["name"] == "dcpd-rank-00000-of-00001.safetensors" and file["bytes"] == len(data[0])
    header, first, *rest = file["items"]
    assert header[0] == 0 and first[:2] == [header[1], len(big)] and [i[1] for i in rest] == [0, 4], "filler has none"
    assert first[4][::2] == [BLOCK, 2 * BLOCK, len(big)] and all(len(digest) == 32 for digest in first[4][1::2])
    assert all(item[-1] is True for item in file["items"])
    d.api.get(f"/v1/state-dicts/{sd}/digests?generation=6").problem("not_sealed")
    d.api.get("/v1/state-dicts/none/digests").problem("not_found")
    d.drop(sd)


def test_dcpctl_writes_images(d, tmp_path):
    sd, data = lib.fresh(), images(seed=4)
    d.put(sd, data, generation=2)
    d.put(sd, images(seed=9), generation=3, create=False)
    assert d.ctl("image", f"shm:{sd}", tmp_path / "one.safetensors", "--rank", "1", "--generation", "2").returncode == 0
    assert (tmp_path / "one.safetensors").read_bytes() == data[1]
    folder = d.storages["main"] / "all"
    assert d.ctl("image", f"shm:{sd}", folder).returncode == 0
    assert sorted(p.name for p in folder.iterdir()) == [".dcpd.json", *(f"dcpd-rank-0000{r}-of-00002.safetensors" for r in (0, 1))]
    assert json.loads(d.ctl("diff", "main:all", f"shm:{sd}", "--json").stdout)["result"]["equal"]
    for args in (("--rank", "2"), ("--generation", "7"), ("--rank", "x")):
        failed = d.ctl("image", f"shm:{sd}", tmp_path / "none", *args)
        assert failed.returncode != 0 and not list(tmp_path.glob("none*"))
    assert d.ctl("image", f"shm:{sd}").returncode == 2
    d.drop(sd)


def test_the_python_package_reads_images(d, tmp_path, monkeypatch):
    sd, data = lib.fresh(), images(seed=3)
    d.put(sd, data, generation=2)
    url = f"unix://{d.socket}"
    with package.daemon(url) as dcpd, dcpd.connect(url) as c:
        monkeypatch.setattr(sys.modules[type(c).__module__], "IMAGE_PIECE", 1000)
        assert c.state_dicts.image(sd, 0) == data[0]
        assert c.state_dicts.image(sd, 1, 2, to=tmp_path / "one") == b"" and (tmp_path / "one").read_bytes() == data[1]
        assert c.state_dicts.digests(sd)["generation"] == 2
        with pytest.raises(LookupError):
            c.state_dicts.image("none", 0, to=tmp_path / "none")
    assert [p.name for p in tmp_path.iterdir()] == ["one"]
    d.drop(sd)


def test_a_folder_of_images_is_a_checkpoint(d):
    sd, data = lib.fresh(), images(seed=7)
    d.put(sd, data, generation=2)
    folder = d.storages["main"] / "images"
    folder.mkdir()
    for rank, one in enumerate(data):
        (folder / f"dcpd-rank-{rank:05}-of-00002.safetensors").write_bytes(get(d, sd, rank).body)
    assert d.api.get("/v1/checkpoints/main/images").ok(200)["format"] == "image"
    done = d.api.run("load", source={"storage": "main", "name": "images"}, target={"state_dict": sd + "-l"})["result"]
    assert done["unverified_bytes"] > 0, "nothing says what they should hold"
    (folder / ".dcpd.json").write_bytes(d.api.get(f"/v1/state-dicts/{sd}/digests").body)
    done = d.api.run("load", source={"storage": "main", "name": "images"},
                     target={"state_dict": sd + "-c", "world_size": 4, "layout": [{"match": "*", "placements": ["Shard(1)"]}]})["result"]
    assert done["unverified_bytes"] == 0 and done["verified_bytes"] > 0 and done["values"] == 1
    assert {i.values["step"]["json"] for i in d.images(sd + "-c") if i.values} == {7}
    assert json.loads(d.ctl("diff", "main:images", f"shm:{sd}-c", "--json").stdout)["result"]["equal"]
    path = folder / "dcpd-rank-00001-of-00002.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:4100] + bytes([whole[4100] ^ 1]) + whole[4101:])
    d.api.fails("load", "digest_mismatch", source={"storage": "main", "name": "images"}, target={"state_dict": sd + "-d"})
    path.unlink()
    d.api.fails("load", "checkpoint_incomplete", source={"storage": "main", "name": "images"}, target={"state_dict": sd + "-d"})
    d.drop(sd, sd + "-c", sd + "-l")
