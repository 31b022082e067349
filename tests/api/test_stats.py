"""Statistics as a job: what is selected, what is checked while it is read, what is kept for the next time, and dcpctl. The figures
themselves are compared with PyTorch's in interop/test_tensor_stats.py."""
import json
import stat
import struct

import dcpd as lib

HERE = {"storage": "main"}


def floats(*values):
    return ("F32", [len(values)], struct.pack(f"<{len(values)}f", *values))


def saved(d, entries, **more):
    sd, ref = lib.fresh(), {**HERE, "name": lib.fresh()}
    d.put(sd, [lib.image(entries)])
    d.api.run("save", source={"state_dict": sd}, target=ref, **more)
    d.drop(sd)
    return ref


def fqns(job):
    return [t["fqn"] for t in job["result"]["statistics"]]


def test_selects(d):
    ref = saved(d, {f"model.{x}": floats(1, 2) for x in "abc"} | {"optim.a": floats(3)})
    assert fqns(d.api.run("stats", source=ref)) == ["model.a", "model.b", "model.c", "optim.a"]
    assert fqns(d.api.run("stats", source=ref, include=["*.a"], exclude=["optim.*"])) == ["model.a"]
    assert d.api.fails("stats", "not_found", source=ref, include=["nope*"])["code"] == "not_found"
    d.api.fails("stats", "not_found", source={**HERE, "name": "nope"})
    plan = d.api.post("/v1/jobs?dry_run=true", {"kind": "stats", "source": ref}).ok(200)
    assert plan["tensors"] == 4 and "statistics" not in plan
    d.api.post("/v1/jobs", {"kind": "stats", "source": ref, "rename": []}).problem("unknown_field")


def test_the_same_bytes_are_not_read_again(d):
    """By digest: wherever they lie, in another checkpoint too; and not where digests are not looked at, or there are none."""
    big = ("F32", [300_000], struct.pack("<300000f", *range(300_000)))
    ref = saved(d, {"frozen": big, "trained": floats(1, 2, 3)})
    first = d.api.run("stats", source=ref)["result"]
    assert first["cached"] == 0 and first["verified_bytes"] >= 1_200_000 and first["unverified_bytes"] == 0
    again = d.api.run("stats", source=ref)["result"]
    assert again["cached"] == 2 and again["read_bytes"] == 0 and again["statistics"] == first["statistics"]
    step = saved(d, {"frozen": big, "trained": floats(1, 2, 4)})
    other = d.api.run("stats", source=step)["result"]
    assert other["cached"] == 1 and other["read_bytes"] < 100_000
    by_name = [{t["fqn"]: t for t in x["statistics"]} for x in (first, other)]
    assert by_name[0]["frozen"] == by_name[1]["frozen"] and by_name[0]["trained"] != by_name[1]["trained"]
    assert d.api.run("stats", source=ref, options={"verify": "none"})["result"]["cached"] == 0


def test_a_restart_forgets_nothing(spawn):
    """Figures outlive gangs and daemons, killed or not; what is damaged of them is counted again, and never answered."""
    d = spawn()
    ref = saved(d, {f"t{i}": floats(*range(i, 3000 + i)) for i in range(4)})
    first = d.api.run("stats", source=ref)["result"]
    assert first["cached"] == 0
    kept = d.state / "stats.cache"
    whole = kept.read_bytes()

    def again():
        d.kill()
        d.start()
        result = d.api.run("stats", source=ref)["result"]
        assert result["statistics"] == first["statistics"]
        return result
    warm = again()
    assert warm["cached"] == 4 and warm["read_bytes"] == 0 and kept.read_bytes() == whole
    for damaged, cached in (whole[:-1], 3), (whole[:len(whole) // 2 - 1] + b"\0" + whole[len(whole) // 2:], 1), (b"x" * 5000, 0), (b"", 0):
        kept.write_bytes(damaged)
        result = again()
        assert result["cached"] >= cached and (result["cached"] < 4 or kept.read_bytes() == whole)
        assert again()["cached"] == 4 and len(kept.read_bytes()) == len(whole)
    kept.unlink()
    assert again()["cached"] == 0 and stat.S_IMODE(kept.stat().st_mode) == 0o600


def test_damage_is_an_error(d):
    ref = saved(d, {"a": ("U8", [100_000], bytes(100_000)), "b": floats(1)})
    where = d.storages["main"] / ref["name"] / "__0_0.distcp"
    with open(where, "r+b") as f:
        f.seek(50_000)
        f.write(b"\1")
    p = d.api.fails("stats", "digest_mismatch", source=ref)
    assert p["fqn"] == "a" and p["file"] == "__0_0.distcp"
    assert fqns(d.api.run("stats", source=ref, include=["b"])) == ["b"]
    got = d.api.run("stats", source=ref, options={"verify": "none"})["result"]
    assert got["unverified_bytes"] >= 100_000 and got["verified_bytes"] == 0


def test_dcpctl(d):
    nan, inf = float("nan"), float("inf")
    ref = saved(d, {"model.w": floats(1, -2, 0, nan), "model.v": floats(inf, 2), "z": ("C64", [1], struct.pack("<2f", 3, 4)),
                    "optim.n": ("I64", [2], struct.pack("<2q", 7, -9))})
    r = d.ctl("stats", f"main:{ref['name']}", "--tensors", "model.*", "--tensors", "[z]", "--tensors", "optim.n")
    assert r.returncode == 0, r.stderr
    rows = {line.split()[0]: line.split() for line in r.stdout.splitlines()}
    assert rows["TENSOR"] == ["TENSOR", "DTYPE", "SHAPE", "MIN", "MAX", "MEAN", "NORM", "ZEROS", "NAN", "INF"]
    assert rows["model.w"] == ["model.w", "float32", "[4]", "-2.0", "1.0", "-0.333333", "2.23607", "1", "1", "0"]
    assert rows["model.v"] == ["model.v", "float32", "[2]", "2.0", "2.0", "2.0", "2.0", "0", "0", "1"]
    assert rows["optim.n"] == ["optim.n", "int64", "[2]", "-9", "7", "-1.0", "11.4018", "0", "0", "0"] and "z" not in rows
    r = d.ctl("stats", f"main:{ref['name']}", "--tensors", "z", "--json")
    one = json.loads(r.stdout)["result"]["statistics"][0]
    assert (one["mean"], one["norm"], one["histogram"]) == ([3, 4], 5, [[2, 0, 1]]) and "min" not in one
    assert d.ctl("stats", f"main:{ref['name']}", "--tensors", "nope").returncode == 6
    assert d.ctl("stats").returncode == 2


def test_cancelled(d):
    """A large one ends when it is told to."""
    ref = saved(d, {"a": ("U8", [64 << 20], bytes(64 << 20))})
    job = d.api.submit("stats", source=ref, options={"pace": "background", "verify": "none"})
    d.api.post(f"/v1/jobs/{job['id'] if isinstance(job, dict) else job}:cancel")
    assert d.api.wait(job)["state"] in ("cancelled", "succeeded")
