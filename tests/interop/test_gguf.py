"""GGUF as a target: PyPI's gguf reads what dcpd wrote; names are those of its tensor map, blocks those of its quantisation, bit for bit;
the metadata and tokenizers are what llama.cpp's converter makes of the same files."""
import json
import pathlib
import re
import struct

import gguf
import numpy
import pytest
import torch
from gguf import quants
from safetensors.torch import save_file

import dcpd as lib
from test_one_file import HERE

BASE = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 50,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
CONFIGS = {  # real ones' keys, small numbers
    "llama": {**BASE, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 2, "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}},
    "qwen2": {**BASE, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_key_value_heads": 2, "rope_scaling": {
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    "qwen3": {**{k: v for k, v in BASE.items() if k != "rope_theta"}, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
              "num_key_value_heads": 2, "head_dim": 32,
              "rope_scaling": None, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}},
    "mixtral": {**BASE, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_key_value_heads": 2,
                "num_local_experts": 11, "num_experts_per_tok": 2},
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 128,
             "vocab_size": 50, "layer_norm_epsilon": 1e-5},
}
ARCH = {"llama": "LLAMA", "mixtral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3", "gpt2": "GPT2"}


def weights(kind, dtype=torch.bfloat16):
    c = CONFIGS[kind]
    torch.manual_seed(5)
    shapes = {}
    if kind == "gpt2":
        e = c["n_embd"]
        shapes |= {"transformer.wte.weight": (c["vocab_size"], e), "transformer.wpe.weight": (c["n_positions"], e),
                   "transformer.ln_f.weight": (e,), "transformer.ln_f.bias": (e,)}
        for i in range(c["n_layer"]):
            h = f"transformer.h.{i}."
            for name, n, m in (("attn.c_attn", e, 3 * e), ("attn.c_proj", e, e), ("mlp.c_fc", e, 4 * e), ("mlp.c_proj", 4 * e, e)):
                shapes |= {h + name + ".weight": (n, m), h + name + ".bias": (m,)}
            shapes |= {h + n + "." + x: (e,) for n in ("ln_1", "ln_2") for x in ("weight", "bias")}
            shapes[h + "attn.bias"] = (1, 1, 8, 8)
    else:
        e, f, heads, kv = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"], c["num_key_value_heads"]
        d = c.get("head_dim", e // heads)
        shapes |= {"model.embed_tokens.weight": (c["vocab_size"], e), "model.norm.weight": (e,), "lm_head.weight": (c["vocab_size"], e)}
        for i in range(c["num_hidden_layers"]):
            h = f"model.layers.{i}."
            for x, n in (("q", heads * d), ("k", kv * d), ("v", kv * d)):
                shapes[h + f"self_attn.{x}_proj.weight"] = (n, e)
                if kind in ("qwen2", "llama"):
                    shapes[h + f"self_attn.{x}_proj.bias"] = (n,)
            shapes[h + "self_attn.o_proj.weight"] = (e, heads * d)
            if kind == "qwen3":
                shapes |= {h + f"self_attn.{x}_norm.weight": (d,) for x in "qk"}
            if kind == "mixtral":
                shapes[h + "block_sparse_moe.gate.weight"] = (c["num_local_experts"], e)
                for x in range(c["num_local_experts"]):
                    shapes |= {h + f"block_sparse_moe.experts.{x}.w{w}.weight": (e, f) if w == 2 else (f, e) for w in (1, 2, 3)}
            else:
                shapes |= {h + f"mlp.{x}_proj.weight": (e, f) if x == "down" else (f, e) for x in ("gate", "up", "down")}
            shapes |= {h + n + ".weight": (e,) for n in ("input_layernorm", "post_attention_layernorm")}
    return {k: torch.randn(s).to(dtype) for k, s in shapes.items()}


def permute(w, heads):
    """LlamaModel.permute of convert_hf_to_gguf.py."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def converted(kind, state):
    """What convert_hf_to_gguf.py makes of it: names by gguf-py's map, tensors as the model's class changes them."""
    c = CONFIGS[kind]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[ARCH[kind]], 2)
    out, stacks = {}, {}
    for name, w in state.items():
        if name.endswith(".attn.bias") and kind == "gpt2":
            continue
        if kind in ("llama", "mixtral") and ".q_proj." in name:
            w = permute(w, c["num_attention_heads"])
        if kind in ("llama", "mixtral") and ".k_proj." in name:
            w = permute(w, c["num_key_value_heads"])
        if kind == "gpt2" and name.split(".")[-2] in ("c_attn", "c_proj", "c_fc") and name.endswith("weight"):
            w = w.T
        if ".experts." in name:
            head, expert, tail = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name).groups()
            stacks.setdefault(f"{head}.{tail}", {})[int(expert)] = w
            continue
        out[names.get_name(name, try_suffixes=(".weight", ".bias"))] = w
    for name, parts in stacks.items():
        out[names.get_name(name, try_suffixes=(".weight",))] = torch.stack([parts[i] for i in range(len(parts))])
    return out


def bpe():
    vocab = {t: i for i, t in enumerate(["a", "b", "c", "ab", "Ġ", "Ġa", "é"])}
    return {"version": "1.0", "added_tokens": [{"id": 40, "content": "<|bos|>", "special": True}, {"id": 41, "content": "<|end|>"},
                                               {"id": 42, "content": "extra", "special": False}],
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": (
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")}},
                {"type": "ByteLevel"}]},
            "decoder": {"type": "ByteLevel"}, "model": {"type": "BPE", "vocab": vocab, "merges": [["a", "b"], [" ", "a"]]}}


def spm(pieces):
    def field(number, data):
        return bytes([number << 3 | 2, *varint(len(data))]) + data

    def varint(n):
        return [n] if n < 128 else [n & 127 | 128, *varint(n >> 7)]

    out = b""
    for text, score, kind in pieces:
        out += field(1, field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + bytes([3 << 3, kind]))
    return out + field(2, b"\x18\x02")  # a trainer_spec, which is passed over


def put(d, kind, state=None, config=None, **files):
    folder = d.storages["main"] / lib.fresh()
    folder.mkdir()
    state = weights(kind) if state is None else state
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    if config is not None or kind:
        (folder / "config.json").write_text(json.dumps(config or CONFIGS[kind]))
    for name, data in files.items():
        path = folder / name.replace("__", ".")
        path.write_bytes(data if isinstance(data, bytes) else json.dumps(data, ensure_ascii=False).encode())
    return {**HERE, "name": folder.name}, state


def convert(d, source, name=None, **more):
    name = name or lib.fresh() + ".gguf"
    target = {**HERE, "name": name, "format": "gguf", **more.pop("target", {})}
    result = d.api.run("reshard", source=source, target=target, **more)["result"]
    path = pathlib.Path(d.storages["main"] / name)
    assert result["files"] == 1 and result["bytes"] == path.stat().st_size
    return gguf.GGUFReader(path)


def fields(r):
    return {k: v.contents() for k, v in r.fields.items() if not k.startswith("GGUF.")}


def raw(t):
    return t.contiguous().view(torch.uint8).numpy().tobytes()


def check(r, want, keeps=True):
    got = {t.name: t for t in r.tensors}
    assert sorted(got) == sorted(want)
    for name, w in want.items():
        t = got[name]
        assert t.data_offset % 32 == 0 and list(t.shape) == list(w.shape)[::-1], name
        f32 = keeps and (w.ndim <= 1 or name.endswith(("_norm.weight", "ffn_gate_inp.weight")))
        w = w.float() if f32 else w
        assert t.tensor_type.name == {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[w.dtype], name
        assert t.data.tobytes() == raw(w), name


@pytest.mark.parametrize("kind", CONFIGS)
def test_names_orders_and_bytes(d, kind):
    source, state = put(d, kind)
    r = convert(d, source)
    want = converted(kind, state)
    if kind == "llama":
        c = CONFIGS[kind]
        freqs = {t.name: t for t in r.tensors}["rope_freqs.weight"].data
        base, dim, s = c["rope_theta"], 16, c["rope_scaling"]
        plain = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
        factors = []
        for freq in plain:  # generate_extra_tensors
            wave = 2 * numpy.pi / float(freq)
            if wave < 8192 / s["high_freq_factor"]:
                factors.append(1)
            elif wave > 8192 / s["low_freq_factor"]:
                factors.append(s["factor"])
            else:
                smooth = (8192 / wave - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
                factors.append(1 / ((1 - smooth) / s["factor"] + smooth))
        assert numpy.allclose(freqs, numpy.float32(factors), rtol=1e-6)
        want["rope_freqs.weight"] = torch.from_numpy(freqs.copy())
    check(r, want)
    f, c = fields(r), CONFIGS[kind]
    arch = gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[ARCH[kind]]]
    assert f["general.architecture"] == arch and f[arch + ".block_count"] == 2 and f["general.file_type"] == 32
    assert f[arch + ".embedding_length"] == 64 and f[arch + ".attention.head_count"] == 4
    assert f[arch + ".context_length"] == c.get("max_position_embeddings", 128)
    assert f[arch + ".feed_forward_length"] == c.get("intermediate_size", 256)
    if kind == "mixtral":
        assert f["llama.expert_count"] == 11 and f["llama.expert_used_count"] == 2
    if kind == "qwen2":
        assert f["qwen2.rope.scaling.type"] == "yarn" and f["qwen2.rope.scaling.factor"] == 4.0
        assert f["qwen2.rope.scaling.original_context_length"] == 128
    if kind == "qwen3":
        assert f["qwen3.rope.freq_base"] == 1000000 and f["qwen3.attention.key_length"] == 32
    assert not any(k.startswith("tokenizer.") for k in f)


def test_from_chunks_of_ranks(d):
    """Shards of a DCP checkpoint, cut by columns and by rows within a head, are permuted on the way; another directory has the config."""
    source, state = put(d, "llama")
    name = lib.fresh()
    d.api.run("reshard", source=source, target={**HERE, "name": name, "world_size": 3, "layout": [
        {"match": "*q_proj.weight", "mesh": [3], "placements": ["Shard(1)"]}, {"match": "*", "mesh": [3], "placements": ["Shard(0)"]}]})
    r = convert(d, {**HERE, "name": name}, target={"assets": source}, dtype=[["*", "float16"]])
    freqs = {t.name: t for t in r.tensors}["rope_freqs.weight"].data
    check(r, {k: v.half() if v.ndim > 1 and not k.endswith("_norm.weight") else v for k, v in converted("llama", state).items()} |
          {"rope_freqs.weight": torch.from_numpy(freqs.copy())})
    assert fields(r)["general.file_type"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_q8_0_is_ggmls(d, dtype):
    """Blocks are those of gguf-py's reference; what has no whole blocks is float16, what llama.cpp computes in float32 stays that."""
    state = weights("qwen2", dtype)
    state["model.embed_tokens.weight"] = torch.randn(50, 64).mul(torch.logspace(-44, 30, 50)[:, None]).to(dtype)
    state["lm_head.weight"] = torch.tensor([0.5, -0.5, 1.5, 127, -2.5, 0.49999997, 126.5, -126.5]).repeat(50, 8).to(dtype)
    state["lm_head.weight"][0] = 0
    state["model.layers.1.mlp.down_proj.weight"] = torch.randn(64, 97).to(dtype)
    state["model.layers.0.mlp.up_proj.weight"] = torch.randn(3000, 640).to(dtype)
    source, state = put(d, "qwen2", state)
    plan = d.api.post("/v1/jobs?dry_run=true", {"kind": "reshard", "source": source, "dtype": [["*", "q8_0"]],
                                                "target": {**HERE, "name": "q8.gguf", "format": "gguf"}}).ok(200)
    r = convert(d, source, dtype=[["*", "q8_0"]])
    planned = {row["fqn"]: row["dtype"] for row in plan["transform"]["after"]}
    assert planned == {t.name: {"F32": "float32", "F16": "float16", "Q8_0": "q8_0"}[t.tensor_type.name] for t in r.tensors}
    own = str(dtype).removeprefix("torch.")
    assert {c["fqn"]: c["to"] for c in plan["cast"]} == {k: to for k, to in planned.items() if to != own}
    seen = set()
    for t in r.tensors:
        w = converted("qwen2", state)[t.name].float()
        seen.add(t.tensor_type.name)
        if t.tensor_type.name == "Q8_0":
            with numpy.errstate(all="ignore"):
                blocks = quants.quantize(w.numpy(), gguf.GGMLQuantizationType.Q8_0)
            assert list(t.shape) == list(w.shape)[::-1] and t.data.tobytes() == blocks.tobytes(), t.name
        else:
            w = w.half() if t.tensor_type.name == "F16" else w
            assert t.data.tobytes() == raw(w) and (t.tensor_type.name == "F16") == (w.ndim > 1), t.name
    assert seen == {"Q8_0", "F32", "F16"} and fields(r)["general.file_type"] == 7


def same_as_gguf(d, source, f, size, merges):
    """gguf-py's SpecialVocab of the same folder."""
    special = gguf.SpecialVocab(d.storages["main"] / source["name"], load_merges=merges, n_vocab=size)
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask"}
    for word, key in keys.items():
        assert f.get(f"tokenizer.ggml.{key}_token_id") == special.special_token_ids.get(word), word
    for word in ("bos", "eos"):
        assert f.get(f"tokenizer.ggml.add_{word}_token") == special.add_special_token.get(word)
    assert f.get("tokenizer.ggml.merges") == (special.merges or None)
    assert f.get("tokenizer.chat_template") == special.chat_template


def test_bpe_tokenizer(d):
    settings = {"bos_token": "<|bos|>", "eos_token": {"content": "<|end|>", "lstrip": False}, "add_bos_token": True, "pad_token": None,
                "chat_template": "{{ 'é' }}"}
    source, _ = put(d, "qwen2", config={**CONFIGS["qwen2"], "pad_token_id": 3, "unk_token_id": 99}, tokenizer__json=bpe(),
                    tokenizer_config__json=settings)
    f = fields(convert(d, source))
    assert f["tokenizer.ggml.model"] == "gpt2" and f["tokenizer.ggml.pre"] == "llama-bpe"
    tokens, types = f["tokenizer.ggml.tokens"], f["tokenizer.ggml.token_type"]
    assert len(tokens) == 50 == len(types) and tokens[:7] == ["a", "b", "c", "ab", "Ġ", "Ġa", "é"] and tokens[7] == "[PAD7]"
    assert tokens[40:43] == ["<|bos|>", "<|end|>", "extra"] and types[:8] == [1] * 7 + [5] and types[40:43] == [3, 3, 4]
    assert f["tokenizer.ggml.merges"] == ["a b", "Ġ a"]
    same_as_gguf(d, source, f, 50, True)


def test_sentencepiece_tokenizer(d):
    pieces = [("<unk>", 0, 2), ("<s>", 0, 3), ("</s>", 0, 3), ("<0x0A>", 0, 6), ("▁a", -1.5, 1), ("b" * 200, -2, 1)]
    settings = {"add_bos_token": True, "add_eos_token": False, "added_tokens_decoder": {
        "2": {"content": "</s>", "special": True}, "10": {"content": "▁x", "special": False}, "90": {"content": "y"}}}
    source, _ = put(d, "llama", config={**CONFIGS["llama"], "bos_token_id": 1, "eos_token_id": 2}, tokenizer__model=spm(pieces),
                    tokenizer_config__json=settings)
    f = fields(convert(d, source))
    assert f["tokenizer.ggml.model"] == "llama" and f["tokenizer.ggml.pre"] == "default"
    tokens, types, scores = (f["tokenizer.ggml." + k] for k in ("tokens", "token_type", "scores"))
    assert tokens[:6] == [p[0] for p in pieces] and types[:6] == [2, 3, 3, 6, 1, 1] and len(tokens) == 50
    assert scores[:7] == [0, 0, -1000, 0, -1.5, -2, -10000] and types[6] == 5 and tokens[6] == "[PAD6]"
    assert tokens[10] == " x" and types[10] == 4 and scores[10] == -1000
    same_as_gguf(d, source, f, 50, False)


def test_without_a_model(d):
    """Tensors of anything else: names and dtypes stay."""
    state = {"a.b": torch.randn(3, 5), "norm": torch.randn(7).half(), "i": torch.arange(6).reshape(1, 2, 3), "e": torch.zeros(0, 4)}
    source, _ = put(d, None, state)
    r = convert(d, source)
    assert {t.name for t in r.tensors} == set(state) and fields(r)["general.architecture"] == "unknown"
    for t in r.tensors:
        assert t.data.tobytes() == raw(state[t.name])


@pytest.mark.parametrize("change, code, word", [
    ({"config": {**CONFIGS["llama"], "model_type": "bloom"}}, "format_unsupported", "bloom"),
    ({"config": {**CONFIGS["llama"], "num_hidden_layers": 0}}, "format_gguf", "num_hidden_layers"),
    ({"config": {**CONFIGS["llama"], "rope_scaling": {"type": "new", "factor": 1}}}, "format_gguf", "rope_scaling"),
    ({"config": {k: v for k, v in CONFIGS["llama"].items() if k != "hidden_size"}}, "format_gguf", "hidden_size"),
    ({"config": {**CONFIGS["llama"], "num_attention_heads": 8}}, None, None),
    ({"tokenizer__json": {**bpe(), "model": {"type": "Unigram", "vocab": []}}}, "format_unsupported", "Unigram"),
    ({"tokenizer__json": {**bpe(), "model": {"type": "BPE", "vocab": {"a": -1}}}}, "format_gguf", "id"),
    ({"tokenizer__json": {**bpe(), "model": {"type": "BPE", "vocab": {"a": 1 << 40}}}}, "format_gguf", "tokens"),
    ({"tokenizer__json": b"{"}, "invalid_json", None),
    ({"tokenizer__model": b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f"}, "format_gguf", "SentencePiece"),
    ({"tokenizer__model": b"\x0a"}, "format_gguf", None),
    ({"tokenizer__model": b""}, "format_gguf", None),
    ({"tokenizer__model": b"\x0a\x02\x0a\x7f"}, "format_gguf", "piece"),
])
def test_what_is_wrong_beside_the_model(d, change, code, word):
    source, _ = put(d, "llama", **change)
    name = lib.fresh() + ".gguf"
    error = d.api.fails("reshard", *([code] if code else []), source=source, target={**HERE, "name": name, "format": "gguf"})
    assert (word is None or word in error["detail"]) and (code is None or error["file"]), error
    assert not (d.storages["main"] / name).exists()


@pytest.mark.parametrize("state, code", [
    ({"model.unknown.weight": torch.zeros(3)}, "name_invalid"),
    ({"model.layers.0.mlp.gate_proj.weight": torch.zeros(3, 4).to(torch.float8_e4m3fn)}, "dtype_unsupported"),
    ({"model.layers.0.mlp.gate_proj.weight": torch.zeros(1, 1, 1, 3, 4)}, "format_unsupported"),
])
def test_tensors_without_a_place(d, state, code):
    source, _ = put(d, "qwen2", {**weights("qwen2"), **state})
    error = d.api.fails("reshard", code, source=source, target={**HERE, "name": lib.fresh() + ".gguf", "format": "gguf"})
    assert error["fqn"]


def test_q8_0_is_ggufs_alone(d):
    p = d.api.post("/v1/jobs", {"kind": "reshard", "source": {**HERE, "name": "a"}, "target": {**HERE, "name": "b"},
                                "dtype": [["*", "q8_0"]]}).problem("validation_failed", status=422)
    assert "GGUF" in p["detail"]
