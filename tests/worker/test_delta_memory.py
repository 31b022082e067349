"""A delta and what it is applied to take so much memory and no more, whatever the tensors."""
import json
import os
import pathlib
import struct

import pytest
from gang import SANITIZED, Gang

BYTES = 128 << 20


def put(path, data):
    head = json.dumps({"x": {"dtype": "BF16", "shape": [BYTES // 2], "data_offsets": [0, BYTES]}}).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)


def peak(worker):
    """Bytes of its own: the checkpoints' pages in the cache are nobody's."""
    status = pathlib.Path(f"/proc/{worker.proc.pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))) >> 10


@pytest.mark.long
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_one_large_tensor(tmp_path, encoding):
    """Every byte is another: the frames are as large as the tensor, or five times so."""
    noise = os.urandom(BYTES)
    put(tmp_path / "a.safetensors", bytes(BYTES))
    put(tmp_path / "b.safetensors", noise)
    refs = [{"storage": "out", "name": f"{n}.safetensors"} for n in "ab"]
    change = {"storage": "out", "name": "change"}
    with Gang(1, {"out": tmp_path}) as g:
        for kind, fields in (("delta", {"base": refs[0], "source": refs[1], "target": change, "encoding": encoding}),
                             ("apply", {"base": refs[0], "source": change, "target": {"storage": "out", "name": "c.safetensors",
                                                                                      "format": "safetensors"}})):
            end = g.job(kind, fields)
            assert end.kind == "DONE", end.body
            assert SANITIZED or peak(g.workers[0]) < 160, f"{kind}: {peak(g.workers[0])} MiB"
    assert (tmp_path / "c.safetensors").read_bytes().endswith(noise)
