"""The ready sets of conversion rules against Megatron-Core's layouts, written out with torch; there and back is the same, bit for bit."""
import json
import pathlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transform_cases as cases
from lib_interop import assemble

import dcpd as lib

HERE = {"storage": "main"}
SETS = pathlib.Path(__file__).resolve().parents[2] / "api/transforms"
HEADS, GROUPS, HD, HIDDEN, FFN, VOCAB = 8, 2, 6, 40, 24, 50
count = iter(range(1 << 30))


def new(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(next(count))).to(torch.bfloat16)


def grouped(q, k, v):
    """ParallelAttention's linear_qkv: for each group its query heads, its key, its value (mcore's get_query_key_value_tensors)."""
    rows = []
    for g in range(GROUPS):
        each = HEADS // GROUPS * HD
        rows += [q[g * each:(g + 1) * each], k[g * HD:(g + 1) * HD], v[g * HD:(g + 1) * HD]]
    return torch.cat(rows)


def attention(hf, mg, i, bias=False, norms=False):
    a, b = f"model.layers.{i}.self_attn", f"decoder.layers.{i}.self_attention"
    for kind, more in (("weight", (HIDDEN,)), *([("bias", ())] if bias else [])):
        parts = [new(n * HD, *more) for n in (HEADS, GROUPS, GROUPS)]
        hf |= {f"{a}.{x}_proj.{kind}": t for x, t in zip("qkv", parts, strict=True)}
        mg[f"{b}.linear_qkv.{kind}"] = grouped(*parts)
    hf[f"{a}.o_proj.weight"] = mg[f"{b}.linear_proj.weight"] = new(HIDDEN, HEADS * HD)
    hf[f"model.layers.{i}.input_layernorm.weight"] = mg[f"{b}.linear_qkv.layer_norm_weight"] = new(HIDDEN)
    for x in "qk" if norms else "":
        hf[f"{a}.{x}_norm.weight"] = mg[f"{b}.{x}_layernorm.weight"] = new(HD)


def top(hf, mg, head=True):
    hf["model.embed_tokens.weight"] = mg["embedding.word_embeddings.weight"] = new(VOCAB, HIDDEN)
    hf["model.norm.weight"] = mg["decoder.final_layernorm.weight"] = new(HIDDEN)
    if head:
        hf["lm_head.weight"] = mg["output_layer.weight"] = new(VOCAB, HIDDEN)


def llama(bias=False, norms=False, head=True):
    hf, mg = {}, {}
    for i in (0, 1, 10):
        attention(hf, mg, i, bias, norms)
        a, b = f"model.layers.{i}", f"decoder.layers.{i}.mlp"
        gate, up = new(FFN, HIDDEN), new(FFN, HIDDEN)
        hf |= {f"{a}.mlp.gate_proj.weight": gate, f"{a}.mlp.up_proj.weight": up}
        mg[f"{b}.linear_fc1.weight"] = torch.cat([gate, up])
        hf[f"{a}.mlp.down_proj.weight"] = mg[f"{b}.linear_fc2.weight"] = new(HIDDEN, FFN)
        hf[f"{a}.post_attention_layernorm.weight"] = mg[f"{b}.linear_fc1.layer_norm_weight"] = new(HIDDEN)
    top(hf, mg, head)
    return hf, mg


def mixtral():
    hf, mg = {}, {}
    for i in range(2):
        attention(hf, mg, i)
        a, b = f"model.layers.{i}.block_sparse_moe", f"decoder.layers.{i}.mlp"
        hf[f"{a}.gate.weight"] = mg[f"{b}.router.weight"] = new(11, HIDDEN)
        hf[f"model.layers.{i}.post_attention_layernorm.weight"] = mg[f"decoder.layers.{i}.pre_mlp_layernorm.weight"] = new(HIDDEN)
        for e in range(11):
            w1, w3 = new(FFN, HIDDEN), new(FFN, HIDDEN)
            hf |= {f"{a}.experts.{e}.w1.weight": w1, f"{a}.experts.{e}.w3.weight": w3}
            mg[f"{b}.experts.local_experts.{e}.linear_fc1.weight"] = torch.cat([w1, w3])
            hf[f"{a}.experts.{e}.w2.weight"] = mg[f"{b}.experts.local_experts.{e}.linear_fc2.weight"] = new(HIDDEN, FFN)
    top(hf, mg)
    return hf, mg


def gpt2():
    hf, mg = {}, {}
    width = HEADS * HD
    for i in range(2):
        a, b = f"transformer.h.{i}", f"decoder.layers.{i}"
        for kind in ("weight", "bias"):
            hf[f"{a}.ln_1.{kind}"] = mg[f"{b}.self_attention.linear_qkv.layer_norm_{kind}"] = new(width)
            hf[f"{a}.ln_2.{kind}"] = mg[f"{b}.mlp.linear_fc1.layer_norm_{kind}"] = new(width)
            c_attn = new(width, 3 * width) if kind == "weight" else new(3 * width)
            hf[f"{a}.attn.c_attn.{kind}"] = c_attn
            q, k, v = (x.chunk(HEADS) for x in (c_attn.t() if kind == "weight" else c_attn).chunk(3))
            mg[f"{b}.self_attention.linear_qkv.{kind}"] = torch.cat([x for h in range(HEADS) for x in (q[h], k[h], v[h])])
            for x, y, shape in (("attn.c_proj", "self_attention.linear_proj", (width, width)), ("mlp.c_fc", "mlp.linear_fc1", (width, FFN)),
                                ("mlp.c_proj", "mlp.linear_fc2", (FFN, width))):
                t = new(*shape) if kind == "weight" else new(shape[1])
                hf[f"{a}.{x}.{kind}"] = t
                mg[f"{b}.{y}.{kind}"] = t.t() if kind == "weight" else t
    hf["transformer.wte.weight"] = mg["embedding.word_embeddings.weight"] = new(VOCAB, width)
    hf["transformer.wpe.weight"] = mg["embedding.position_embeddings.weight"] = new(16, width)
    for kind in ("weight", "bias"):
        hf[f"transformer.ln_f.{kind}"] = mg[f"decoder.final_layernorm.{kind}"] = new(width)
    return hf, mg


FAMILIES = {"llama": llama, "qwen": lambda: llama(bias=True, norms=True, head=False), "mixtral": mixtral, "gpt2": gpt2}


def read(d, name, like):
    got = {k: torch.empty_like(v, memory_format=torch.contiguous_format) for k, v in like.items()}
    reader = dcp.FileSystemReader(str(d.storages["main"] / name))
    assert set(reader.read_metadata().state_dict_metadata) == set(like)
    dcp.load(got, storage_reader=reader, no_dist=True)
    return got


@pytest.mark.parametrize("family", FAMILIES)
def test_to_megatron_and_back(d, family):
    hf, mg = FAMILIES[family]()
    name = lib.fresh()
    dcp.save(hf, storage_writer=dcp.FileSystemWriter(str(d.storages["main"] / name)), no_dist=True)
    names = ["--set", f"heads={HEADS}"] + (["--set", f"groups={GROUPS}"] if family != "gpt2" else [])
    cut = ["--world-size", "3", "--layout", "?*weight=Shard(1)@3"]
    out = d.ctl("reshard", f"main:{name}", f"main:{name}-mg", "--transform", f"{family}-hf-to-megatron", *names, *cut)
    assert out.returncode == 0, out.stderr
    cases.same(read(d, name + "-mg", mg), mg)
    out = d.ctl("reshard", f"main:{name}-mg", f"main:{name}-hf", "--transform", f"{family}-megatron-to-hf", *names, "--world-size", "2")
    assert out.returncode == 0, out.stderr
    cases.same(read(d, name + "-hf", hf), hf)
    sd = lib.fresh()
    out = d.ctl("load", f"main:{name}", f"shm:{sd}", "--transform", f"{family}-hf-to-megatron", *names, *cut)
    assert out.returncode == 0, out.stderr
    got = assemble(d.images(sd))
    assert got == {k: (list(v.shape), cases.raw(v).numpy().tobytes()) for k, v in mg.items()}
    d.drop(sd)


def test_the_sets_are_served_and_documented(d):
    listed = {s["name"]: s for s in d.api.get("/v1/transforms").ok()["transforms"]}
    files = {p.stem: json.loads(p.read_text()) for p in SETS.glob("*.json")}
    assert listed.keys() == files.keys() and len(files) == 9
    manual = (SETS.parent / "transforms.md").read_text()
    for name, content in files.items():
        assert d.api.get(f"/v1/transforms/{name}").ok() == content
        assert {k: v for k, v in content.items() if k != "transform"} == {k: v for k, v in listed[name].items() if k != "name"}
        assert f"`{name}`" in manual
    d.api.get("/v1/transforms/none").problem("not_found")
    out = d.ctl("transforms")
    assert all(name in out.stdout for name in files)
    assert json.loads(d.ctl("transforms", "gpt2-hf-to-megatron").stdout) == files["gpt2-hf-to-megatron"]


def test_files_of_rules(d, tmp_path):
    name = lib.fresh()
    w = torch.randn(5, 4)
    dcp.save({"w": w}, storage_writer=dcp.FileSystemWriter(str(d.storages["main"] / name)), no_dist=True)
    (tmp_path / "a.json").write_text('[{"match":"w","pad":{"dim":0,"to":"{vocab}"}}]')
    (tmp_path / "b.json").write_text('{"transform":[{"match":"w","permute":[1,0]}]}')
    args = ["--transform", tmp_path / "a.json", "--transform", str(tmp_path / "b.json"), "--set", "vocab=8"]
    out = d.ctl("reshard", f"main:{name}", f"main:{name}-t", *args)
    assert out.returncode == 0, out.stderr
    want = {"w": torch.cat([w, torch.zeros(3, 4)]).t()}
    cases.same(read(d, name + "-t", want), want)
    for kind, to in (("reshard", f"main:{name}-u"), ("load", f"shm:{name}")):
        plan = json.loads(d.ctl(kind, f"main:{name}", to, "--dry-run", *args).stdout)
        assert plan["transform"]["after"] == [{"fqn": "w", "shape": [4, 8], "dtype": "float32", "from": ["w"]}]
    for wrong, says in ((["--transform", str(tmp_path / "none.json")], "none.json"), (["--transform", "none"], "no ready set"),
                        (["--set", "x"], "NAME=N"), ([*args[:4]], "--set vocab=N")):
        out = d.ctl("reshard", f"main:{name}", f"main:{name}-u", *wrong)
        assert out.returncode != 0 and says in out.stderr, out.stderr
