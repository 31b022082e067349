"""Steps of a training are planned once: what is the same is recognised, what is not is planned again; the bytes are the step's own."""
import json
import struct

import pytest

import dcpd as lib
from gang import Gang, Segments, at, done


@pytest.fixture
def gang(roots):
    with Gang(2, roots) as g:
        yield g


def step(n, world=2, names=("w", "v"), dtype="F32", rows=8, values=None, paths=None, extra=None):
    """Rows of each tensor over the ranks, bytes that tell the step; values of the step."""
    images = []
    for r in range(world):
        tensors = {k: (dtype, (rows // world, 4), bytes((n * 7 + r * 31 + i) % 256 for i in range(rows // world * 16)))
                   for k in names}
        listed = {k: {"fqn": k, "global_shape": [rows, 4], "offsets": [r * (rows // world), 0]} for k in names}
        tensors["same"] = ("U8", (3,), b"abc")
        images.append(lib.image(tensors, {"tensors": listed, "values": {"step": {"json": n}, "lr": {"json": n / 8}, **(values or {})},
                                          **({"paths": paths} if paths else {}), **(extra or {})}))
    return images


def save(gang, images, name, spec=None, **options):
    s = Segments(images)
    try:
        return gang.job("save", {"source": {"state_dict": "train", "generation": 1}, "target": at(name), "options": options,
                                 **(spec or {})}, {"train": s})
    finally:
        s.close()


def check(gang, images, name):
    """What was saved is what the segments had, values too; and the checkpoint is whole."""
    s = Segments(images)
    r = done(gang.job("diff", {"a": at(name), "b": {"state_dict": "t"}}, {"t": s}))
    s.close()
    assert r["equal"], r
    v = done(gang.job("verify", {"source": at(name), "level": "values"}))
    assert v["unverifiable"] == 0 and v["verified_bytes"] > 0


def test_further_steps_are_not_planned_again(gang):
    for n in range(1, 7):
        images = step(n)
        r = done(save(gang, images, f"same/{n}"))
        assert r["plan_reused"] is (n > 1) and r["tensors"] == 3 and r["values"] == 2 and r["divergent"] == []
        check(gang, images, f"same/{n}")


def test_a_value_that_takes_more_room(gang):
    text = {"name": {"json": "a" * 10}}
    done(save(gang, step(1, values=text), "room/1"))
    for n, value, reused in ((2, "b" * 10, True), (3, "b" * 500, False), (4, "c" * 500, True), (5, "c", False)):
        images = step(n, values={"name": {"json": value}})
        assert done(save(gang, images, f"room/{n}"))["plan_reused"] is reused, n
        check(gang, images, f"room/{n}")


@pytest.mark.parametrize("name, other", [
    ("names", {"names": ("w", "u")}), ("more", {"names": ("w", "v", "z")}), ("dtype", {"dtype": "I32"}), ("shape", {"rows": 16}),
    ("world", {"world": 4}), ("values", {"values": {"epoch": {"json": 1}}}), ("kind", {"values": {"lr": {"bytes": "AAEC"}}}),
    ("paths", {"paths": {"w": ["m", "w"]}}), ("value_path", {"paths": {"lr": ["optim", "lr"]}}),
    ("nested", {"values": {"lr": {"json": {"x": 1}}}}),
])
def test_what_matters_is_planned_again(gang, name, other):
    done(save(gang, step(1), f"other/{name}1"))
    images = step(2, **other)
    assert done(save(gang, images, f"other/{name}2"))["plan_reused"] is False
    check(gang, images, f"other/{name}2")
    images = step(3, **other)
    assert done(save(gang, images, f"other/{name}3"))["plan_reused"] is True
    check(gang, images, f"other/{name}3")


@pytest.mark.parametrize("name, spec, options", [
    ("include", {"include": ["w"]}, {}), ("rename", {"rename": [["^w$", "x"]]}, {}), ("cast", {"dtype": [["w", "float16"]]}, {}),
    ("files", {}, {"files_per_rank": 2}), ("dedup", {}, {"dedup": "lowest_rank"}), ("flat", {}, {"flatten_state_dict": False}),
])
def test_other_requests_are_planned_again(gang, name, spec, options):
    done(save(gang, step(1), f"rq/{name}1"))
    first = done(save(gang, step(1), f"rq/{name}2", spec, **options))
    again = done(save(gang, step(2), f"rq/{name}3", spec, **options))
    assert (first["plan_reused"], again["plan_reused"]) == (False, True)
    assert first["tensors"] == again["tensors"] and first["bytes"] == again["bytes"] and first.get("cast") == again.get("cast")
    assert done(gang.job("verify", {"source": at(f"rq/{name}3"), "level": "values"}))["unverifiable"] == 0
    d = done(gang.job("diff", {"a": at(f"rq/{name}2"), "b": at(f"rq/{name}3")}))
    assert all(x["what"] in ("values", "value") for x in d["differences"]), d


def test_renamed_and_selected_values_are_the_steps_own(gang):
    spec = {"rename": [["^step$", "trainer.step"]], "exclude": ["lr"]}
    for n in (1, 2):
        r = done(save(gang, step(n), f"sel/{n}", spec))
        assert r["plan_reused"] is (n == 2) and r["values"] == 1
    done(gang.job("load", {"source": at("sel/2"), "target": {"state_dict": "x", "world_size": 1}}))
    assert lib.Image(gang.made.read(0)).values == {"trainer.step": {"json": 2}}
    gang.made.close()


def test_values_and_replicas_that_differ_are_seen_in_later_steps(gang):
    done(save(gang, step(1), "div/1"))
    images = step(2)
    images[1] = lib.image({**lib.Image(images[1]).entries, "same": ("U8", (3,), b"abX")},
                          {**lib.Image(images[1]).dcpd, "values": {"step": {"json": 3}, "lr": {"json": 0.25}}})
    r = done(save(gang, images, "div/2"))
    assert r["plan_reused"] and {x["fqn"]: x["ranks"] for x in r["divergent"]} == {"step": [0, 1], "same": r["divergent"][-1]["ranks"]}
    done(save(gang, step(3), "div/3", on_divergence="fail"))
    for fail in ("same", "step"):
        bad = images if fail == "step" else [images[0], lib.image({**lib.Image(step(2)[1]).entries, "same": ("U8", (3,), b"abX")},
                                                                  lib.Image(step(2)[1]).dcpd)]
        end = save(gang, bad, "div/no", on_divergence="fail")
        assert end.kind == "FAILED" and end.body["code"] == "divergent" and end.body["fqn"] == fail, end.body
    images = step(4)
    again = save(gang, images, "div/4", on_divergence="fail")
    assert done(again)["plan_reused"] is False, "a job that failed leaves no plan behind"
    check(gang, images, "div/4")
    assert done(save(gang, step(5), "div/5", on_divergence="fail"))["plan_reused"] is True


def test_a_dry_run_between(gang):
    done(save(gang, step(1), "dry/1"))
    s = Segments(step(2))
    plan = gang.job("save", {"source": {"state_dict": "train"}, "target": at("dry/no"), "options": {}}, {"train": s}, dry_run=True)
    s.close()
    assert plan.kind == "DONE" and plan.body["plan"]["chunks"] == 5
    assert done(save(gang, step(3), "dry/3"))["plan_reused"] is True


def test_an_existing_name_is_refused_and_the_plan_not_kept(gang):
    done(save(gang, step(1), "ex/1"))
    assert save(gang, step(2), "ex/1").body["code"] == "checkpoint_exists"
    images = step(3)
    assert done(save(gang, images, "ex/1", overwrite=True))["checkpoint"] == at("ex/1")
    check(gang, images, "ex/1")


def test_several_trainings_in_turn(gang):
    kinds = [{"names": (f"t{i}", "w")} for i in range(6)]
    for n in range(1, 4):
        for i, k in enumerate(kinds):
            images = step(n, **k)
            s = Segments(images)
            done(gang.job("save", {"source": {"state_dict": f"sd{i}"}, "target": at(f"turn/{i}-{n}"), "options": {}}, {f"sd{i}": s}))
            s.close()
            check(gang, images, f"turn/{i}-{n}")


def swap(image, old, new):
    assert len(old) == len(new) and old in image
    return image.replace(old, new)


@pytest.mark.parametrize("name, old, new", [
    ("offsets", b'\\"offsets\\":[4,0]', b'\\"offsets\\":[3,0]'),
    ("shape", b'"shape":[4,4]', b'"shape":[2,8]'),
])
def test_a_header_that_was_changed_is_read_again(gang, name, old, new):
    def compact(image):
        n = struct.unpack("<Q", image[:8])[0]
        head = json.loads(image[8:8 + n])
        head["__metadata__"]["dcpd"] = json.dumps(json.loads(head["__metadata__"]["dcpd"]), separators=(",", ":"))
        text = json.dumps(head, separators=(",", ":")).encode()
        return struct.pack("<Q", n) + text + b" " * (n - len(text)) + image[8 + n:]

    good = [compact(i) for i in step(1)]
    done(save(gang, good, f"hdr/{name}1"))
    assert done(save(gang, good, f"hdr/{name}2"))["plan_reused"] is True
    bad = [good[0], swap(good[1], old, new)]
    end = save(gang, bad, f"hdr/{name}3")
    assert end.kind == "FAILED" and end.body["code"] in ("plan_invalid", "coverage_hole", "format_image"), end.body


@pytest.mark.parametrize("values", [b'{}', b'{\\"step\\":{\\"json\\":1}}}', b'{\\"step\\":5}', b'[]', b'{"}', b'{\\"lr\\":{\\"json\\":1}'])
def test_values_that_break_out_of_their_place(gang, values):
    """The rest of the header is as it was; what stands for the values is not what was there."""
    done(save(gang, step(1), f"out/{lib.fresh()}"))
    image = step(2)[0]
    n = struct.unpack("<Q", image[:8])[0]
    text = json.dumps(json.loads(image[8:8 + n]))
    a = text.index('\\"values\\": ') + len('\\"values\\": ')
    b = text.index('}}', a) + 2
    broken = text[:a].encode() + values + text[b:].encode()
    broken += b" " * (n - len(broken))
    end = save(gang, [struct.pack("<Q", len(broken)) + broken + image[8 + n:], step(2)[1]], f"out/{lib.fresh()}")
    assert (end.kind == "DONE" and not end.body["result"]["plan_reused"]) or end.body["code"] in ("format_image", "format_safetensors")


@pytest.mark.long
def test_memory_stays_bounded(gang):
    big = {f"k{i}": {"json": i} for i in range(200)}
    for n in range(30):
        done(save(gang, step(1000 + n, values=big), f"mem/{n}"))
    pid = gang.workers[0].proc.pid

    def rss():
        with open(f"/proc/{pid}/status") as f:
            return int(next(x for x in f if x.startswith("RssAnon")).split()[1])

    grown = []
    for part in range(3):  # what is used once at some time, as a thread's arena, comes in one of them
        before = rss()
        for n in range(25):
            done(save(gang, step(1100 + 25 * part + n, values=big), f"mem/more{part}-{n}"))
        grown.append(rss() - before)
    assert min(grown) < 768, f"KiB in 25 saves each: {grown}"
