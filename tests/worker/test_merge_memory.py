"""A merge holds a sum and one checkpoint's elements of a block, however many checkpoints are added up."""
import json
import pathlib
import struct

import pytest
from gang import SANITIZED, Gang

BYTES = 48 << 20


@pytest.mark.long
def test_sixteen_checkpoints_of_eight_bits_in_sixty_four(tmp_path):
    """Each element takes eight times its bytes: held for all sixteen, a worker took 530 MiB."""
    head = json.dumps({"x": {"dtype": "F8_E4M3", "shape": [BYTES], "data_offsets": [0, BYTES]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + b"\x38" * BYTES)     # ones
    with Gang(1, {"out": tmp_path}) as g:
        one = {"storage": "out", "name": "a.safetensors"}
        end = g.job("merge", {"sources": [one] * 16, "target": {"storage": "out", "name": "b.safetensors", "format": "safetensors"},
                              "dtype": "float64"})
        assert end.kind == "DONE", end.body
        status = pathlib.Path(f"/proc/{g.workers[0].proc.pid}/status").read_text()
        peak = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))) >> 10
        assert SANITIZED or peak < 160, f"{peak} MiB"
    assert (tmp_path / "b.safetensors").read_bytes().endswith(b"\x38" * BYTES)
