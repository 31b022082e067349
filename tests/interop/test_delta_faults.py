"""Deltas that are damaged, hostile, or of something else: a clear error that names tensor and file, and nothing is written."""
import base64
import io
import json
import struct

import delta_form as form
import numpy as np
import pytest
import torch
import zstandard
from safetensors.torch import save_file
from test_delta import HERE, changed, data, delta, folder, put, state

import dcpd as lib

DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture(scope="module")
def sides():
    before = state(1, DTYPES)
    return before, changed(before, 2)


def written(d, sides, **how):
    """The base, and a delta that none of our code has written."""
    before, after = ({k: data(t) for k, t in s.items()} for s in sides)
    change = {**HERE, "name": lib.fresh()}
    form.write(folder(d, change), before, after, **how)
    return put(d, sides[0]), change


def refused(d, base, change, *codes):
    to = {**HERE, "name": lib.fresh()}
    said = d.api.fails("apply", *codes, base=base, source=change, target=to)
    assert not folder(d, to).exists() and not d.staging()
    return said


def frame(raw, **how):
    return zstandard.ZstdCompressor(**how).compress(bytes(raw))


def wide(n):
    z = zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(window_log=27)).compressobj()
    return z.compress(bytes(n)) + z.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) + z.flush()


def overwrite(count, at, values):
    return frame(struct.pack("<I", count) + np.array(at, "<u4").tobytes() + bytes(values))


N = 1300 * 1000 * 2  # bytes of model.big
FRAMES = {
    "short": ("xor", frame(N - 1)), "long": ("xor", frame(N + 1)), "bomb": ("xor", frame(1 << 28)), "cut": ("xor", frame(N)[:-3]),
    "garbage": ("xor", bytes(1000)), "trailing": ("xor", frame(N) + b"\0"), "two frames": ("xor", frame(N) + frame(0)),
    "window": ("xor", wide(N)), "nothing": ("overwrite", frame(b"")), "count": ("overwrite", overwrite(N + 1, [1], [1])),
    "positions cut": ("overwrite", overwrite(2, [1], [])), "values cut": ("overwrite", overwrite(2, [1, 2], [1])),
    "values more": ("overwrite", overwrite(1, [1], [1, 2])),
    "twice": ("overwrite", overwrite(2, [5, 5], [1, 2])), "back": ("overwrite", overwrite(2, [5, 4], [1, 2])),
    "outside": ("overwrite", overwrite(1, [N], [1])),
}


@pytest.mark.parametrize("what", FRAMES)
def test_frames(d, sides, what):
    encoding, bad = FRAMES[what]
    base, change = written(d, sides, encoding=encoding, frames={"model.big": bad})
    said = refused(d, base, change, "format_transform")
    assert said["fqn"] == "model.big" and said["file"].startswith(change["name"] + "/model-") and said["offset"] > 8


def archive(value):
    b = io.BytesIO()
    torch.save(value, b)
    return b.getvalue()


def flipped(raw):
    at = raw.index(b"a text that is long enough")
    return raw[:at] + b"b" + raw[at + 1:]


TEXT = archive("a text that is long enough")
B64 = base64.b64encode(TEXT).decode()
VALUES = {
    "no object": ([], None), "no archive": ({"v": {"path": ["v"]}}, "v"), "no path": ({"v": {"archive": B64}}, "v"),
    "no base64": ({"v": {"path": ["v"], "archive": "?" + B64[1:]}}, "v"), "cut": ({"v": {"path": ["v"], "archive": B64[:400]}}, "v"),
    "crc": ({"v": {"path": ["v"], "archive": base64.b64encode(flipped(TEXT)).decode()}}, "v"),
    "empty": ({"v": {"path": ["v"], "archive": ""}}, "v"), "path": ({"v": {"path": [-1], "archive": B64}}, "v"),
    "long path": ({"v": {"path": ["v"] * 100, "archive": B64}}, "v"),
    "a tensor": ({"model.big": {"path": ["v"], "archive": B64}}, "model.big"),
    "deep": ({"v": {"path": [[["v"]]], "archive": B64}}, "v"),
}


@pytest.mark.parametrize("what", VALUES)
def test_values(d, sides, what):
    base, change = written(d, sides)
    at = folder(d, change) / "model.safetensors.index.json"
    bad, fqn = VALUES[what]
    at.write_text(json.dumps({**json.loads(at.read_text()), "values": bad}))
    said = refused(d, base, change, "format_safetensors", "format_zip", "digest_mismatch", "duplicate_key")
    assert said["file"].endswith(at.name) and said.get("fqn") == fqn


def test_checksums(d, sides):
    base, change = written(d, sides, checksums={"model.big": "0" * 32})
    said = refused(d, base, change, "digest_mismatch")
    assert said["fqn"] == "model.big" and said["expected"] == "0" * 32 and len(said["actual"]) == 32
    base, change = written(d, sides, checksums={"model.big": None})
    assert refused(d, base, change, "format_safetensors")["fqn"] == "model.big"
    base, change = written(d, sides, checksums={"model.big": "xyz"})
    assert refused(d, base, change, "format_safetensors")["fqn"] == "model.big"
    other = put(d, changed(sides[0], 5))  # of no base that the index names: the checksums tell
    base, change = written(d, sides)
    assert len(refused(d, other, change, "digest_mismatch")["expected"]) == 32


def test_indexes(d, sides):
    base, change = written(d, sides)
    index = folder(d, change) / "model.safetensors.index.json"
    whole = json.loads(index.read_text())

    def put_index(**meta):
        index.write_text(json.dumps({**whole, "metadata": {k: v for k, v in {**whole["metadata"], **meta}.items() if v is not None}}))

    for meta, code in (({"checksum_format": "blake3"}, "format_unsupported"), ({"delta_encoding": "add"}, "format_unsupported"),
                       ({"compression_format": "lz4"}, "format_unsupported"), ({"compression_format": None}, "format_safetensors"),
                       ({"content_digest": "zz"}, "format_safetensors"), ({"version": 7}, "format_safetensors")):
        put_index(**meta)
        assert "model.safetensors.index.json" in refused(d, base, change, code).get("file", "model.safetensors.index.json")
    put_index(content_digest="0" * 32)
    assert refused(d, base, change, "digest_mismatch")["expected"] == "0" * 32
    put_index(base_content_digest="0" * 32)
    assert "0" * 32 in refused(d, base, change, "base_mismatch")["detail"]
    index.write_text(json.dumps({"weight_map": whole["weight_map"], "metadata": whole["metadata"]}))  # seen too late to recognise it
    refused(d, base, change, "format_safetensors", "format_unsupported")
    for text in ("", "{", '{"metadata":{"delta_encoding":"xor"', json.dumps({**whole, "weight_map": {"model.big": "../x.safetensors"}})):
        index.write_text(text)
        refused(d, base, change, "format_safetensors")
    index.write_text(json.dumps({**whole, "weight_map": {**whole["weight_map"], "model.none": "model-00000-of-00002.safetensors"}}))
    refused(d, base, change, "checkpoint_incomplete")


def test_other_tensors(d, sides):
    """What the form has no place for is refused by name."""
    before, after = sides
    base = put(d, before)
    less = {k: v for k, v in after.items() if k != "model.big"}
    for other, code in (({**after, "model.more": torch.ones(3)}, "missing_key"), (less, "missing_key"),
                        ({**after, "model.big": after["model.big"].reshape(1000, 1300)}, "size_mismatch"),
                        ({**after, "model.big": after["model.big"].view(torch.float16)}, "kind_mismatch")):
        to = {**HERE, "name": lib.fresh()}
        said = d.api.fails("delta", code, base=base, source=put(d, other), target=to)
        assert said["fqn"] in ("model.more", "model.big") and not folder(d, to).exists()
    change, _ = delta(d, base, put(d, after))
    less = {**HERE, "name": lib.fresh() + ".safetensors"}
    save_file({k: v for k, v in before.items() if k != "model.big"}, str(folder(d, less)))
    refused(d, less, change, "base_mismatch")


def test_requests(d, sides):
    base, change = written(d, sides)
    to = {**HERE, "name": lib.fresh()}

    def no(code, kind="delta", **fields):
        d.api.post("/v1/jobs", {"kind": kind, "base": base, "source": base, "target": to, **fields}).problem(code)

    no("validation_failed", encoding="zip")
    no("validation_failed", target=base)
    no("unknown_field", "apply", encoding="xor")
    no("unknown_field", include=["a"])
    no("not_found", base={**HERE, "name": "nowhere"})
    d.api.fails("apply", "format_unsupported", base=base, source=base, target=to)
    shown = d.api.post("/v1/jobs?dry_run=true", {"kind": "delta", "base": base, "source": base, "target": to}).ok(200)
    assert shown["tensors"] == 11 and not folder(d, to).exists()
    assert d.api.post("/v1/jobs?dry_run=true", {"kind": "apply", "base": base, "source": change, "target": to}).ok(200)["tensors"] == 11


def test_damage(d, sides):
    """A flipped bit of a base, of which dcpd has digests, and of a delta's frame."""
    base, new = (put(d, s, 1, 2) for s in sides)
    change, _ = delta(d, base, new)
    for ref, glob in ((change, "model-*.safetensors"), (base, "*.distcp")):
        file = sorted(folder(d, ref).glob(glob))[-1]
        raw = bytearray(file.read_bytes())
        at = len(raw) - 30000
        raw[at] ^= 4
        file.write_bytes(raw)
        refused(d, base, change, "format_transform", "digest_mismatch")
        d.api.fails("verify", "checkpoint_damaged", "digest_mismatch", source=ref)
        raw[at] ^= 4
        file.write_bytes(raw)


def test_shared_memory(d, sides):
    """Both sides of a delta as generations of one state dict; the base of what is applied in shared memory, too."""
    tensors = [{k: t for k, t in s.items() if t.numel()} for s in sides]
    name = lib.fresh()
    refs = [put(d, t) for t in tensors]
    d.api.run("load", source=refs[0], target={"state_dict": name, "world_size": 2})
    first = d.api.get(f"/v1/state-dicts/{name}").ok()["ranks"][0]["slots"][0]["generation"]
    shm = {"state_dict": name, "generation": first}
    change, result = delta(d, shm, refs[1], "overwrite")
    to = {**HERE, "name": lib.fresh()}
    done = d.api.run("apply", base={"state_dict": name}, source=change, target=to)["result"]
    assert done["content_digest"] == result["content_digest"]
    assert d.api.run("diff", a=to, b=refs[1])["result"]["equal"]
    back, _ = delta(d, refs[1], {"state_dict": name})
    d.api.run("apply", base=refs[1], source=back, target={**HERE, "name": to["name"] + "-back"})
    assert d.api.run("diff", a={**HERE, "name": to["name"] + "-back"}, b=refs[0])["result"]["equal"]
    d.drop(name)


def test_two_generations(d, sides):
    """Of one state dict, whose rows two ranks hold; the generations are the versions."""
    names = {torch.bfloat16: "BF16", torch.float32: "F32"}
    name = lib.fresh()
    whole = [{k: t for k, t in s.items() if t.ndim == 2 and len(t) > 1} for s in sides]
    assert any(data(whole[0][k]) != data(whole[1][k]) for k in whole[0])

    def part(tensors, rank):
        entries, about = {}, {}
        for k, t in tensors.items():
            rows = t[:len(t) // 2] if rank == 0 else t[len(t) // 2:]
            entries[k] = (names[t.dtype], rows.shape, data(rows))
            about[k] = {"fqn": k, "global_shape": list(t.shape), "offsets": [0 if rank == 0 else len(t) // 2, 0]}
        return lib.image(entries, {"tensors": about})

    for generation, tensors in ((6, whole[0]), (7, whole[1])):
        d.put(name, [part(tensors, r) for r in range(2)], generation, create=generation == 6)
    shm = {"state_dict": name}
    change, result = delta(d, {**shm, "generation": 6}, shm)
    meta = form.index(folder(d, change))["metadata"]
    assert meta["base_version"] == "000006" and result["base_content_digest"] != result["content_digest"]
    to = {**HERE, "name": lib.fresh()}
    said = d.api.fails("apply", "base_mismatch", base=shm, source=change, target=to)
    assert "generation 7" in said["detail"]
    done = d.api.run("apply", base={**shm, "generation": 6}, source=change, target=to)["result"]
    assert done["content_digest"] == result["content_digest"]
    d.api.run("save", source={**shm, "generation": 7}, target={**HERE, "name": to["name"] + "-saved"})
    assert d.api.run("diff", a=to, b={**HERE, "name": to["name"] + "-saved"})["result"]["equal"]
    d.drop(name)
