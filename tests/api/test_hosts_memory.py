"""Loads of checkpoints that several hosts saved together: each host has the part that it wrote in its own memory, and its neighbours have
copies of parts."""
import pytest
from test_cluster import cluster, server  # noqa: F401
from test_neighbours import settled

import dcpd as lib

WORLD, PART = 4, 1 << 20
RANKS = [[0, 2], [1, 3]]


def image(rank, seed=1):
    """Row-wise shards of a tensor; a block of it is enough to be read by itself."""
    rows = PART // 1024
    return lib.image({"w": ("U8", [rows, 1024], bytes([seed + rank]) * PART)},
                     {"tensors": {"w": {"fqn": "w", "global_shape": [WORLD * rows, 1024], "offsets": [rank * rows, 0]}}})


def save(daemons, name, generation=1, seed=1, **options):
    """Their jobs' records, ended, and the state dict that all have."""
    hosts = {"id": lib.fresh().replace("_", "-").lower() + "-12345678", "names": ["alpha", "beta"], "ranks": RANKS, "timeout_s": 20}
    jobs = []
    for i, d in enumerate(daemons):
        d.put("train", [image(r, seed) for r in RANKS[i]], generation=generation, create=generation == 1)
        jobs.append(d.api.submit("save", source={"state_dict": "train", "generation": generation},
                                 target={"storage": "main", "name": name}, hosts={**hosts, "index": i}, options=options))
    return [d.api.wait(job) for d, job in zip(daemons, jobs)]


def load(d, name, seed=1):
    """The result of a load of what was saved."""
    target = lib.fresh()
    done = d.api.run("load", source={"storage": "main", "name": name}, target={"state_dict": target, "world_size": 1})["result"]
    assert d.images(target)[0].entries["w"][2] == b"".join(bytes([seed + r]) * PART for r in range(WORLD))
    assert done["unverified_bytes"] == 0
    d.drop(target)
    return done


@pytest.fixture
def two(spawn, tmp_path):
    return [spawn({"main": tmp_path / "shared"}) for _ in range(2)]


def test_each_host_loads_its_own_part_from_its_memory(two):
    assert [j["state"] for j in save(two, "run/step-1")] == ["succeeded"] * 2
    assert [j["state"] for j in save(two, "run/step-2", generation=2, seed=11)] == ["succeeded"] * 2
    for name, seed in (("run/step-1", 1), ("run/step-2", 11)):
        for d in two:
            found = load(d, name, seed)
            assert found["bytes_from_memory"] == 2 * PART and 2 * PART <= found["read_bytes"] < 3 * PART, (d.home, found)
    for d in two:
        d.kill()
        d.start()
        assert load(d, "run/step-2", 11)["bytes_from_memory"] == 2 * PART, "of the journal's newest saves"


def test_another_save_of_the_name_is_told_from_it(two):
    """By the manifest, before its bytes are looked at."""
    save(two, "run/step-1")
    for d in two:
        d.drop("train")
    other = [two[1], two[0]]
    save(other, "run/step-1", seed=11, overwrite=True)
    for d in two:
        assert load(d, "run/step-1", 11)["bytes_from_memory"] == 2 * PART
        d.drop("train")
        assert load(d, "run/step-1", 11)["bytes_from_memory"] == 0


@pytest.mark.long
def test_copies_of_all_parts_in_one_nodes_memory(cluster):  # noqa: F811
    a, b, c = cluster("a", "b", "c", args=("--neighbour-memory", "64MiB"))
    d = cluster("d")
    for n in (a, b, c, d):
        n.sees(a="joined", b="joined", c="joined", d="joined")
    jobs = save((a, b), "run/step-1", neighbours=2)
    assert [sorted(r["node"] for r in settled(n, j)["replicas"] if r["state"] == "held") for n, j in zip((a, b), jobs)] == \
        [["b", "c"], ["a", "c"]]
    assert load(c, "run/step-1")["bytes_from_memory"] == WORLD * PART
    assert load(a, "run/step-1")["bytes_from_memory"] == WORLD * PART, "its own part, and the copy of b's"
    a.kill()
    c.kill()
    c.start()
    for n in (b, d):
        n.sees(a="away", b="joined", c="joined", d="joined")
    import test_neighbours as tn
    for rr in tn.replicas(c):
        print(rr["name"], [[(x[2], set(x[5])) for x in i.chunks()] for i in c.images(rr["name"])])
    for _ in range(4): print({k: v for k, v in load(c, "run/step-1").items() if "bytes" in k})
    assert load(c, "run/step-1")["bytes_from_memory"] == WORLD * PART
    found = load(d, "run/step-1")
    assert found["bytes_from_neighbours"] == WORLD * PART and found["read_bytes"] < PART, "a host that comes back empty"
