"""Conversion rules through the package: rules, ready sets by name and files, in one list."""
import json

import harness as lib
import pytest
import torch

import dcpd


def test_rules_names_and_files_in_one_list(at, tmp_path):
    name = lib.fresh()
    qkv = {f"model.layers.0.self_attn.{x}_proj.weight": torch.randn(rows, 6) for x, rows in (("q", 8), ("k", 4), ("v", 4))}
    dcpd.save(qkv, f"main:{name}")
    client = dcpd.connect()
    assert {"llama-hf-to-megatron", "gpt2-megatron-to-hf"} <= {s["name"] for s in client.transforms.list()}
    there = [r | {"optional": True} for r in client.transforms.get("llama-hf-to-megatron")["transform"]]
    file = tmp_path / "more.json"
    file.write_text(json.dumps([{"match": "linear_qkv", "dtype": "bfloat16"}]))
    pad = {"match": "qkv", "pad": {"dim": 0, "to": "{rows}"}}
    more = {"transform": [there, file, pad], "vars": {"heads": 4, "groups": 2, "rows": 20}}
    plan = client.jobs.plan("reshard", source=f"main:{name}", target=f"main:{name}-mg", **more)
    assert [(r["shape"], r["dtype"]) for r in plan["transform"]["after"]] == [([20, 6], "bfloat16")]
    client.jobs.run("reshard", source=f"main:{name}", target=f"main:{name}-mg", **more)
    q, k, v = qkv.values()
    want = torch.cat([q[:4], k[:2], v[:2], q[4:], k[2:], v[2:], torch.zeros(4, 6)]).bfloat16()
    got = dcpd.load(f"main:{name}-mg")
    assert list(got) and torch.equal(dcpd.open(f"main:{name}-mg")["decoder.layers.0.self_attention.linear_qkv.weight"].read(), want)
    with pytest.raises(dcpd.errors.DcpdError, match="no ready set"):
        client.jobs.plan("reshard", source=f"main:{name}", target=f"main:{name}-x", transform="none")
    with pytest.raises(dcpd.errors.DcpdError, match="matches no name"):  # embeddings are not there
        client.jobs.run("reshard", source=f"main:{name}", target=f"main:{name}-x", transform="llama-hf-to-megatron",
                        vars={"heads": 4, "groups": 2})


def test_load_converts_on_the_way(at, tmp_path):
    """New tensors, keys of what the rules make, and a state dict in place, with a file of rules and a number for them."""
    name = lib.fresh()
    w = torch.randn(12, 6)
    dcpd.save({"net.w": w, "net.b": torch.arange(6.), "step": 7}, f"main:{name}")
    file = tmp_path / "rules.json"
    cut = {"dim": 0, "sizes": ["{rows}", "{dim0-rows}"], "into": ["net.q", "net.kv"]}
    file.write_text(json.dumps([{"match": r"^net\.w$", "split": cut}]))
    rules = {"transform": [file, {"match": r"^net\.(\w+)$", "rename": "model.$1"}, {"match": "kv", "permute": [1, 0]},
                           {"match": "q$", "dtype": "bfloat16"}], "vars": {"rows": 4}}
    got = dcpd.load(f"main:{name}", **rules)
    want = {"model.q": w[:4].bfloat16(), "model.kv": w[4:].t().contiguous(), "model.b": torch.arange(6.)}
    assert got.pop("step") == 7 and got.keys() == want.keys()
    assert all(torch.equal(got[k], v) and got[k].dtype == v.dtype for k, v in want.items())
    part = dcpd.load(f"main:{name}", keys=["model.kv"], **rules)
    assert list(part) == ["model.kv"] and torch.equal(part["model.kv"], want["model.kv"])
    into = {**{k: torch.ones_like(v, dtype=torch.float32) for k, v in want.items()}, "step": 0}
    dcpd.load(f"main:{name}", into=into, **rules)
    assert into["step"] == 7 and all(torch.equal(into[k], v.float()) for k, v in want.items())
    with pytest.raises(dcpd.errors.MissingKey):
        dcpd.load(f"main:{name}", into={"net.w": torch.ones(12, 6)}, **rules)
    with pytest.raises(dcpd.errors.DcpdError, match="matches no name"):
        dcpd.load(f"main:{name}", transform={"match": "none", "drop": True})
