"""DeepSpeed's checkpoints as sources: ZeRO stages 1 to 3 and universal ones, as tests/lib/zero_files.py writes them."""
import random
import shutil

import dcpd as lib
import pytest
import torch
import zero_files

HERE = {"storage": "main"}


def model(seed=0):
    g = torch.Generator().manual_seed(seed)
    groups = [{"emb": torch.randn(11, 6, generator=g), "cube": torch.randn(2, 3, 5, generator=g),
               "thin": torch.randn(1, 9, 1, generator=g)},
              {"bias": torch.randn(7, generator=g), "one": torch.randn(1, generator=g), "layers.0.norm": torch.randn(13, generator=g)}]
    rest = {"frozen": {"f.weight": torch.randn(5, 7, generator=g).to(torch.bfloat16), "f.bias": torch.randn(3, generator=g),
                       "f.none": torch.empty(0, 4, dtype=torch.float16)},
            "buffers": {"mean": torch.randn(4, generator=g), "steps": torch.arange(5), "grid": torch.randn(3, 2, generator=g).t()},
            "shared": {"head": "emb"}}
    return groups, rest


def resharded(d, name, **more):
    out = f"{lib.fresh()}.pt"
    done = d.api.run("reshard", source={**HERE, "name": name}, target={**HERE, "name": out, "format": "torch"}, **more)["result"]
    assert done["unverified_bytes"] == 0 and done["verified_bytes"] > 0
    return torch.load(d.storages["main"] / out, weights_only=True, mmap=True)


def flat(tree, below=""):
    """FQN → tensor."""
    out = {}
    for k, v in tree.items():
        if isinstance(v, dict):
            out.update(flat(v, f"{below}{k}."))
        elif isinstance(v, torch.Tensor):
            out[below + k] = v
    return out


def same(got, want):
    got = {k: v for k, v in got.items() if k != "table"}
    assert got.keys() == want.keys()
    for k, v in want.items():
        assert got[k].dtype == v.dtype and torch.equal(got[k], v), k


def check(d, name, want, shown):
    got = d.api.get(d.api.storage_path("main", name)).ok()
    assert (got["name"], got["format"], got["world_size"]) == shown and got["tensors"] == len(want) + 1
    tree = resharded(d, name)
    same(flat(tree), want)
    assert torch.equal(tree["table"], torch.arange(6).reshape(2, 3).t())
    assert (tree["epoch"], tree["global_steps"], tree["lr_scheduler"]) == (3, zero_files.STEP, {"last_batch_iteration": zero_files.STEP})
    assert tree["optim"]["param_groups"] == [{"lr": 0.1, "betas": (0.9, 0.95)}, {"lr": 0.2, "betas": (0.9, 0.95)}]
    assert "module" not in tree and "param_shapes" not in tree
    done = d.api.run("verify", source={**HERE, "name": name}, level="digest")["result"]
    assert done["unverified_bytes"] == 0
    return tree


@pytest.mark.parametrize("stage, world, alignment", [(1, 3, 1), (2, 1, 1), (2, 4, 1), (2, 3, 16), (3, 1, 1), (3, 4, 1), (3, 5, 1)])
def test_stages(d, stage, world, alignment):
    """Groups, padding between and behind parameters, ranks that hold nothing but padding; views, frozen and shared parameters, buffers."""
    name, (groups, rest) = lib.fresh(), model()
    zero_files.write(d.storages["main"] / name, stage, world, groups, **rest, alignment=alignment)
    check(d, name, zero_files.expected(groups, **rest), (f"{name}/global_step{zero_files.STEP}", "zero", world))
    assert [c["format"] for c in d.api.get(f"/v1/checkpoints/main?prefix={name}").ok()["checkpoints"]] == ["zero"]


@pytest.mark.parametrize("stage", [2, 3])
def test_universal(d, stage):
    """Of stage 2, of stage 3 with tensors that are flat; equal to the checkpoint that it was made of, values too."""
    name, (groups, rest) = lib.fresh(), model()
    zero_files.write(d.storages["main"] / name, stage, 3, groups, **rest)
    zero_files.write_universal(d.storages["main"] / f"{name}u", stage, 3, groups, **rest)
    check(d, f"{name}u", zero_files.expected(groups, **rest), (f"{name}u/global_step{zero_files.STEP}_universal", "zero-universal",
                                                               3 if stage == 3 else 1))
    shown = d.api.get(d.api.storage_path("main", f"{name}u")).ok()
    assert shown["bytes"] == sum(f.stat().st_size for f in (d.storages["main"] / shown["name"]).rglob("*.pt"))
    files = d.api.get(d.api.storage_path("main", f"{name}u", "/files")).ok()["files"]
    assert "zero/layers.0.norm/exp_avg.pt" in {f["name"] for f in files} and len(files) == shown["files"]
    assert d.api.run("diff", a={**HERE, "name": name}, b={**HERE, "name": f"{name}u"})["result"]["equal"]


def test_a_verdict_is_about_the_step(d):
    """Whether a job is asked for the training's folder or for the step: records of both, and loads by either name, tell the same."""
    name, (groups, rest) = lib.fresh(), model()
    folder = d.storages["main"] / name
    step = zero_files.write(folder, 2, 1, groups, **rest)
    names = (name, f"{name}/{step.name}")
    for asked in names:
        job = d.api.run("verify", source={**HERE, "name": asked})["id"]
        assert [d.api.get(d.api.storage_path("main", n)).ok()["verified"]["job"] for n in names] == [job, job]
    assert d.api.get(f"/v1/checkpoints/main?prefix={name}").ok()["checkpoints"][0]["verified"]["job"] == job
    states = next(step.glob("*optim_states.pt"))
    data, offset = bytearray(states.read_bytes()), states.read_bytes().index(groups[0]["cube"].numpy().tobytes())
    data[offset] ^= 1
    states.write_bytes(data)
    d.api.fails("verify", "checkpoint_damaged", source={**HERE, "name": name})
    for asked in names:
        result = d.api.run("stats", source={**HERE, "name": asked}, options={"verify": "none"}, exclude=["cube"])["result"]
        assert "checkpoint_damaged_known" in {w["code"] for w in result["warnings"]}


@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_read_is_compared(d, stage):
    """The CRC32 of a flat tensor is put together of the parameters that are read of it and of the paddings between them, shared ones
    once: copied, loaded, counted, compared, merged, sliced. A byte that is another is refused, also one that belongs to no parameter."""
    name, (groups, rest) = lib.fresh(), model()
    groups[0]["big"] = torch.randn(700, 1001, generator=torch.Generator().manual_seed(3))
    step = zero_files.write(d.storages["main"] / name, stage, 3, groups, **rest)
    source, bytes_of_it = {**HERE, "name": name}, groups[0]["big"].nbytes
    jobs = {"reshard": {"source": source, "target": {**HERE, "name": f"{name}-hf", "format": "safetensors"}},
            "load": {"source": source, "target": {"state_dict": name, "world_size": 2,
                                                  "layout": [{"match": "big", "placements": ["Shard(1)"], "mesh": [2]}]}},
            "stats": {"source": source}, "diff": {"a": source, "b": {**HERE, "name": f"{name}-hf"}},
            "merge": {"sources": [source, source], "target": {**HERE, "name": f"{name}-mean"}}}
    for kind, fields in jobs.items():
        result = d.api.run(kind, **fields)["result"]
        assert result["unverified_bytes"] == 0, [(u["fqn"], u["file"][-30:], u["offset"], u["bytes"]) for u in result["unverified"]]
        assert result["verified_bytes"] >= 3 * bytes_of_it, (kind, result)
    ruled = d.api.run("load", source=source, target={"state_dict": f"{name}-ruled", "world_size": 1}, transform=[
        {"match": "^big", "permute": [1, 0]}])["result"]
    assert ruled["unverified_bytes"] == 0 and ruled["verified_bytes"] >= 3 * bytes_of_it
    part = {"include": ["emb", "head"], "options": {"overwrite": True}}
    result = d.api.run("reshard", source=source, target={**HERE, "name": f"{name}-part"}, **part)["result"]
    assert {u["fqn"] for u in result["unverified"]} == {"emb", "head"} and result["unverified_bytes"] == 2 * groups[0]["emb"].nbytes
    for fqn, unverified in ("big", 0), ("emb", 24):
        r = d.api.get(d.api.storage_path("main", name, f"/tensors/{fqn}?slice=0:2,0:3&format=raw"))
        assert r.body == groups[0][fqn][:2, :3].contiguous().numpy().tobytes() and int(r.headers["Dcpd-Unverified-Bytes"]) >= unverified
        assert fqn == "emb" or r.headers["Dcpd-Unverified-Bytes"] == "0"
    states = max(step.glob("*optim_states.pt"))
    whole = states.read_bytes()
    share = zero_files.shares(groups[0]["big"], 3)[2] if stage == 3 else groups[0]["big"].flatten()[-1000:]
    at = whole.index(share.numpy().tobytes()) + (share.nbytes - 4 if stage == 3 else 7)
    states.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1:])
    for kind, fields in jobs.items():
        if "target" in fields:
            fields["target"]["state_dict" if kind == "load" else "name"] = f"{name}-again"
        error = d.api.fails(kind, "digest_mismatch", **fields)
        assert error["file"].endswith(states.name) and error["fqn"] in {k for g in groups for k in g} | {"head"} and error["offset"] <= at
    assert not (d.storages["main"] / f"{name}-again").exists()


def test_steps_that_are_numbers(d):
    """Optimizers that keep the step as an int, and one that has kept nothing yet."""
    name, (groups, rest) = lib.fresh(), model()
    zero_files.write_universal(d.storages["main"] / name, 2, 1, groups, **rest, step=12)
    tree = resharded(d, name)
    assert tree["optim"]["step"]["cube"] == 12
    for stage in (2, 3):
        zero_files.write(d.storages["main"] / f"{name}-{stage}", stage, 2, groups, **rest, moments=False)
        same(flat(resharded(d, f"{name}-{stage}")), zero_files.expected(groups, **rest, moments=False))
    zero_files.write(d.storages["main"] / f"{name}-e", 1, 3, groups, **rest, elastic=True)
    tree = flat(resharded(d, f"{name}-e"))
    same({k: v for k, v in tree.items()}, zero_files.expected(groups, **rest))


def test_as_any_source(d):
    """A step by its own name; slices, statistics, a layout, rules, a load, a merge, inspection."""
    name, (groups, rest) = lib.fresh(), model()
    step = zero_files.write(d.storages["main"] / name, 3, 4, groups, **rest)
    source = {**HERE, "name": f"{name}/{step.name}"}
    cube = groups[0]["cube"]
    r = d.api.get(d.api.storage_path("main", name, "/tensors/optim.exp_avg.cube?slice=0:2,1,2:4&format=raw"))
    assert r.body == zero_files.moment("exp_avg", cube)[:, 1, 2:4].contiguous().numpy().tobytes()
    assert d.api.run("stats", source=source)["result"]["tensors"] == len(zero_files.expected(groups, **rest)) + 1
    d.api.run("reshard", source=source, target={**HERE, "name": name + "-half", "format": "safetensors"},
              transform=[{"match": r"optim\..*", "drop": True}])
    found = d.api.get(d.api.storage_path("main", name + "-half", "/tensors")).ok()["tensors"]
    assert {t["fqn"] for t in found} >= {"emb", "head", "cube"} and not any(t["fqn"].startswith("optim") for t in found)
    d.api.run("load", source=source, target={"state_dict": name, "world_size": 3, "layout": [{"match": "emb", "placements": ["Shard(1)"],
                                                                                           "mesh": [3]}]})
    d.api.run("save", source={"state_dict": name}, target={**HERE, "name": name + "-saved"})
    got = d.api.get(d.api.storage_path("main", name + "-saved", "/tensors/emb?format=raw"))
    assert got.body == groups[0]["emb"].numpy().tobytes()
    d.api.run("merge", sources=[source, {**HERE, "name": name}], target={**HERE, "name": name + "-mean"})
    got = d.api.get(d.api.storage_path("main", name + "-mean", "/tensors/cube?format=raw"))
    assert got.body == cube.numpy().tobytes()
    assert d.api.run("inspect", source=source)["result"]["safe"]


def test_steps_of_a_run(d):
    """`latest` leads; without it the last step by number; a step that is not there is an error, a path no way out."""
    name, (groups, rest) = lib.fresh(), model()
    folder = d.storages["main"] / name
    step = zero_files.write(folder, 2, 1, groups)
    shutil.copytree(step, folder / "global_step10")
    shown = lambda: d.api.get(d.api.storage_path("main", name)).ok()["name"]
    assert shown().endswith("global_step7")
    (folder / "latest").unlink()
    assert shown().endswith("global_step10")
    for text, code in (("global_step11\n", "checkpoint_incomplete"), ("../x", "format_metadata"), ("", "format_metadata"),
                       ("x" * 300, "format_metadata")):
        (folder / "latest").write_text(text)
        problem = d.api.get(d.api.storage_path("main", name)).problem(code)
        assert problem["file"] == "latest" and not problem["detail"].startswith("it "), problem
    (folder / "latest").unlink()
    shutil.rmtree(folder / "global_step10")
    (folder / "latest").write_text("global_step7\n")
    listed = [c["name"] for c in d.api.get(f"/v1/checkpoints/main?prefix={name}").ok()["checkpoints"]]
    assert listed == [f"{name}/global_step7"]
    d.api.fails("delete", "not_a_checkpoint", target={**HERE, "name": name})
    assert step.exists()


def change(path, edit):
    state = torch.load(path, weights_only=True)
    edit(state)
    torch.save(state, path)


def shape(name, size, group=0):
    return lambda s: s["param_shapes"][group].__setitem__(name, torch.Size(size))


def optim(edit):
    return lambda s: edit(s["optimizer_state_dict"])


@pytest.mark.parametrize("stage, file, edit, code, text, fqn", [
    (2, "mp_rank_00_model", shape("cube", [2, 3, 50]), "format_metadata", "group 0", "thin"),
    (2, "mp_rank_00_model", shape("cube", [2 ** 40, 2 ** 40, 3]), "limit_exceeded", "", "cube"),
    (2, "mp_rank_00_model", shape("cube", [2 ** 62]), "format_metadata", "group 0", "thin"),
    (2, "mp_rank_00_model", shape("cube", [-3]), "format_metadata", "dim 0", "cube"),
    (2, "mp_rank_00_model", lambda s: s["param_shapes"].pop(), "format_metadata", "6 numbers", None),
    (2, "mp_rank_00_model", lambda s: s["param_shapes"][1].__setitem__("cube", torch.Size([1])), "format_metadata", "two shapes", "cube"),
    (2, "mp_rank_00_model", lambda s: s.pop("param_shapes"), "format_metadata", "no param_shapes", None),
    (2, "mp_rank_00_model", lambda s: s["shared_params"].update(x="nobody"), "format_metadata", "nobody", "x"),
    (2, "mp_rank_00_model", lambda s: s["frozen_param_shapes"].update({"f.bias": torch.Size([4])}), "format_metadata", "frozen", "f.bias"),
    (3, "rank_0_mp_rank_00_model", shape("cube", [2, 3, 6]), "format_metadata", "rank 0", "layers.0.norm"),
    (3, "rank_1_mp_rank_00_model", lambda s: s["frozen_param_fragments"].pop("f.bias"), "checkpoint_incomplete", "2 of the 3", "f.bias"),
    (2, "rank_1_mp_rank_00_optim", optim(lambda o: o.update(partition_count=[3, 3])), "checkpoint_incomplete", "3 ranks", None),
    (2, "rank_1_mp_rank_00_optim", optim(lambda o: o.update(partition_count=[1, 1])), "format_metadata", "another save", None),
    (2, "rank_1_mp_rank_00_optim", optim(lambda o: o.update(partition_count=[2, 1])), "format_unsupported", "expert", None),
    (2, "rank_0_mp_rank_00_optim", optim(lambda o: o.update(zero_stage=3)), "format_metadata", "stage 3", None),
    (2, "rank_0_mp_rank_00_optim", optim(lambda o: o.pop("zero_stage")), "format_metadata", "zero_stage", None),
    (2, "rank_0_mp_rank_00_optim", optim(lambda o: o["param_alignment_paddings"][0].pop()), "format_metadata", "5 numbers", None),
    (2, "rank_0_mp_rank_00_optim", optim(lambda o: o["param_alignment_paddings"][0].__setitem__(0, 2 ** 62)), "format_metadata", "group 0",
     "thin"),
    (2, "rank_1_mp_rank_00_optim", optim(lambda o: o["single_partition_of_fp32_groups"].pop()), "format_metadata", "1 groups", None),
    (2, "rank_1_mp_rank_00_optim", optim(lambda o: o["base_optimizer_state"]["state"].pop(0)), "checkpoint_incomplete", "exp_avg", "emb"),
    (3, "rank_1_mp_rank_00_optim", optim(lambda o: o["fp32_flat_groups"].__setitem__(0, torch.ones(9))), "format_metadata", "rank 1",
     "layers.0.norm"),
    (3, "rank_1_mp_rank_00_optim", optim(lambda o: o["fp32_flat_groups"].__setitem__(0, o["fp32_flat_groups"][0].double())),
     "format_metadata", "float64", "emb"),
])
def test_what_does_not_add_up(d, stage, file, edit, code, text, fqn):
    """Each is an error that names the file and, where there is one, the parameter; none is a crash, or a tensor with holes."""
    name, (groups, rest) = lib.fresh(), model()
    step = zero_files.write(d.storages["main"] / name, stage, 2, groups, **rest)
    [path] = [p for p in step.iterdir() if file in p.name]
    change(path, edit)
    error = d.api.fails("reshard", code, source={**HERE, "name": name}, target={**HERE, "name": f"{name}-no"})
    assert text in error["detail"] and error.get("fqn") == fqn and error["file"].endswith("_states.pt"), error


def test_files_that_are_missing_or_too_many(d):
    name, (groups, rest) = lib.fresh(), model()
    step = zero_files.write(d.storages["main"] / name, 3, 3, groups, **rest)
    fails = lambda code: d.api.fails("reshard", code, source={**HERE, "name": name}, target={**HERE, "name": f"{name}-no"})
    for gone, rank in (("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", 1), ("bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt", 2),
                       ("zero_pp_rank_0_mp_rank_00_model_states.pt", 0)):
        shutil.move(step / gone, step.parent / "away")
        assert fails("checkpoint_incomplete")["rank"] == rank
        shutil.move(step.parent / "away", step / gone)
    for extra, code, text in (("zero_pp_rank_0_mp_rank_01_model_states.pt", "format_unsupported", "ds_to_universal"),
                              ("layer_00-model_00-model_states.pt", "format_unsupported", "ds_to_universal"),
                              ("zero_pp_rank_1_mp_rank_00_optim_states.pt", "format_metadata", "two files")):
        shutil.copy(step / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", step / extra)
        error = fails(code)
        assert text in error["detail"] and error["file"] == extra
        (step / extra).unlink()
    for p in step.glob("*optim_states.pt"):
        p.unlink()
    assert "name the file itself" in fails("checkpoint_incomplete")["detail"]
    one = {**HERE, "name": f"{name}/{step.name}/zero_pp_rank_0_mp_rank_00_model_states.pt"}
    d.api.run("reshard", source=one, target={**HERE, "name": f"{name}-file"})
    universal = zero_files.write_universal(d.storages["main"] / f"{name}u", 3, 1, groups)
    (universal / "zero" / "cube" / "fp32.pt").unlink()
    error = d.api.fails("reshard", "checkpoint_incomplete", source={**HERE, "name": f"{name}u"}, target={**HERE, "name": f"{name}-no"})
    assert error["fqn"] == "cube" and "zero/cube/fp32.pt" in error["detail"]
    torch.save(torch.ones(5), universal / "zero" / "cube" / "fp32.pt")
    error = d.api.fails("reshard", "format_metadata", source={**HERE, "name": f"{name}u"}, target={**HERE, "name": f"{name}-no"})
    assert error["fqn"] == "cube" and error["file"] == "zero/cube/fp32.pt"
