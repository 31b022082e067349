"""A sealed slot without a valid image is marked soon after the seal, off the trainer's path; a save of it says whose image it is."""
import json
import os
import signal
import struct
import time

import pytest

import dcpd as lib

GOOD = lib.image({"w": ("F32", [4, 4], bytes(64))})


def cut_short(data):
    head = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    head["w"]["data_offsets"][1] += 4096  # more bytes than its shape has
    text = json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + data[-64:]


BAD = {"noise": os.urandom(4096), "zeroes": bytes(4096), "a header beyond the end": struct.pack("<Q", 1 << 40) + bytes(4088),
       "no JSON": struct.pack("<Q", 100) + b"x" * 4088, "sizes that lie": cut_short(GOOD)}


def slots(d, sd):
    """{(rank, generation): slot} of those that hold something."""
    ranks = d.api.get(f"/v1/state-dicts/{sd}").ok(200)["ranks"]
    return {(r["rank"], s["generation"]): s for r in ranks for s in r["slots"] if "generation" in s}


def marked(d, sd, rank, generation, seconds=5):
    return lib.wait_for(lambda: slots(d, sd)[rank, generation].get("problem"), seconds, "the slot is marked")


def put(d, sd, rank, data, generation):
    s = d.reserve(sd, rank, len(data), generation)
    lib.write_segment(s["segment"], data)
    d.seal(sd, rank, generation, len(data))


@pytest.mark.parametrize("what", BAD)
def test_a_garbage_image_is_marked_soon(d, what):
    sd = lib.fresh()
    d.create(sd, 2)
    put(d, sd, 1, BAD[what], 7)
    p = lib.check_problem(marked(d, sd, 1, 7), "format_image", "format_safetensors", "checkpoint_damaged")
    assert p["rank"] == 1 and p["detail"], p
    put(d, sd, 0, GOOD, 7)
    time.sleep(0.5)
    assert "problem" not in slots(d, sd)[0, 7], "of rank 1, not of rank 0"
    shown = d.ctl("show", f"shm:{sd}")
    assert shown.returncode == 0 and p["code"] in shown.stdout, shown
    d.drop(sd)


@pytest.mark.parametrize("what", BAD)
def test_a_save_names_state_dict_rank_and_generation(d, what):
    sd = lib.fresh()
    d.put(sd, [GOOD, BAD[what]], generation=41)
    target = {"storage": "main", "name": lib.fresh()}
    p = d.api.fails("save", "format_image", "format_safetensors", source={"state_dict": sd}, target=target)
    assert p["rank"] == 1 and sd in p["detail"] and "generation 41" in p["detail"] and "rank 1" in p["detail"], p
    d.drop(sd)


def test_good_images_are_not_marked_and_a_new_one_takes_the_mark_away(d):
    sd = lib.fresh()
    d.create(sd, 1, 1)
    put(d, sd, 0, BAD["noise"], 1)
    marked(d, sd, 0, 1)
    d.api.post(f"/v1/state-dicts/{sd}/ranks/0:release", {"generation": 1}).ok(204)
    put(d, sd, 0, GOOD, 2)
    time.sleep(0.7)
    assert "problem" not in slots(d, sd)[0, 2]
    d.drop(sd)


def lookers(d):
    """Pids of the look-up workers that have no storage: they read segments."""
    return d.pids("lookup", lambda w: not w["storages"])


def test_the_seal_does_not_wait_for_the_look(d):
    """With the worker that reads headers stopped, a seal and a save are answered, and the mark comes when it goes on."""
    sd = lib.fresh()
    d.create(sd)
    put(d, sd, 0, BAD["noise"], 1)
    marked(d, sd, 0, 1)
    pids = lookers(d)
    assert pids
    with lib.stopped(*pids):
        put(d, sd, 0, BAD["zeroes"], 2)
        target = {"storage": "main", "name": lib.fresh()}
        p = d.api.fails("save", "format_image", "format_safetensors", source={"state_dict": sd}, target=target)
        assert "generation 2" in p["detail"], p
        assert "problem" not in slots(d, sd)[0, 2]
    marked(d, sd, 0, 2)
    d.drop(sd)


def test_a_slot_that_was_released_before_the_answer_is_not_marked(d):
    """The look that was under way answers for a generation that the slot no longer holds."""
    sd, bad = lib.fresh(), bytes(len(GOOD))  # of one size: all three are in the same segment
    d.create(sd, 1, 1)
    put(d, sd, 0, bad, 1)
    marked(d, sd, 0, 1)
    pids = lookers(d)
    d.api.post(f"/v1/state-dicts/{sd}/ranks/0:release", {"generation": 1}).ok(204)
    with lib.stopped(*pids):
        put(d, sd, 0, bad, 2)
        time.sleep(0.3)  # the question is on its way
        d.api.post(f"/v1/state-dicts/{sd}/ranks/0:release", {"generation": 2}).ok(204)
        s = d.reserve(sd, 0, len(GOOD), 3)
    time.sleep(0.3)
    lib.write_segment(s["segment"], GOOD)
    d.seal(sd, 0, 3, len(GOOD))
    time.sleep(0.7)
    assert "problem" not in slots(d, sd)[0, 3]
    d.drop(sd)


def test_a_worker_that_dies_of_an_image_is_not_started_for_ever(d):
    """The question is asked once more, then given up; later seals are looked at again."""
    sd = lib.fresh()
    d.create(sd)
    put(d, sd, 0, BAD["noise"], 1)
    marked(d, sd, 0, 1)
    pids = lookers(d)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    put(d, sd, 0, BAD["zeroes"], 2)
    marked(d, sd, 0, 2)
    assert set(lookers(d)).isdisjoint(pids)
    d.drop(sd)


def test_many_ranks_are_looked_at_together(d):
    """300 ranks that seal at once take two looks, and each bad one is marked."""
    sd, world = lib.fresh(), 300
    d.create(sd, world)
    for r in range(world):
        put(d, sd, r, BAD["noise"] if r % 7 == 3 else GOOD, 5)
    bad = {r for r in range(world) if r % 7 == 3}
    lib.wait_for(lambda: {r for (r, _), s in slots(d, sd).items() if "problem" in s} == bad, 20, "all that are bad")
    assert all(s["problem"]["rank"] == r for (r, _), s in slots(d, sd).items() if r in bad)
    d.drop(sd)


def test_it_is_found_again_after_a_restart(spawn):
    d = spawn()
    d.put("train", [GOOD, BAD["zeroes"]], generation=3)
    marked(d, "train", 1, 3)
    d.kill()
    d.start()
    assert marked(d, "train", 1, 3)["rank"] == 1
    assert "problem" not in slots(d, "train")[0, 3]


def test_deleted_while_it_is_looked_at(d):
    """The answer finds no state dict: no mark, no leak (the fixture looks for leaks)."""
    for _ in range(20):
        sd = lib.fresh()
        d.create(sd)
        put(d, sd, 0, BAD["noise"], 1)
        d.drop(sd)
