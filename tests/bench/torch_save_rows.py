"""Bench rows of torch.save files: from one to DCP, and back, beside PyTorch's own torch_save_to_dcp and dcp_to_torch_save, which hold the
whole state dict in memory and do not wait for the disk; dcpd compares CRC32s and does."""
import shutil
import time

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

RUNS, TENSORS = 3, 16


def timed(call, *args):
    start = time.monotonic()
    call(*args)
    return time.monotonic() - start


def rows(bench, size):
    if not bench.wants("format.torch"):
        return
    bench.daemon()
    bench.no_torch()
    root = bench.disk / "ckpt"
    torch.save({"model": {f"w{i}": torch.randn(size // TENSORS // 4096, 1024) for i in range(TENSORS)}}, root / "torch-source.pt")
    where = {n: {"storage": "disk", "name": n} for n in ("torch-source.pt", "torch-dcp", "torch-back.pt")}
    bench.job("reshard", source=where["torch-source.pt"], target=where["torch-dcp"])
    figures = {"to": [], "to torch": [], "from": [], "from torch": []}
    for _ in range(RUNS):
        other = {"storage": "disk", "name": "torch-again"}
        figures["to"].append(bench.job("reshard", source=where["torch-source.pt"], target=other))
        bench.delete("disk", "torch-again")
        figures["from"].append(bench.job("reshard", source=where["torch-dcp"], target={**where["torch-back.pt"], "format": "torch"}))
        bench.delete("disk", "torch-back.pt")
        figures["to torch"].append(timed(torch_save_to_dcp, root / "torch-source.pt", bench.disk / "torch-peer"))
        figures["from torch"].append(timed(dcp_to_torch_save, bench.disk / "torch-peer", bench.disk / "torch-peer.pt"))
        shutil.rmtree(bench.disk / "torch-peer")
        (bench.disk / "torch-peer.pt").unlink()
    bench.row("format.torch.to_dcp", "s", "<=1.00", "PyTorch torch_save_to_dcp", figures["to"], figures["to torch"],
              "dcpctl reshard disk:source.pt disk:dcp")
    bench.row("format.torch.from_dcp", "s", "<=1.00", "PyTorch dcp_to_torch_save", figures["from"], figures["from torch"],
              "dcpctl reshard disk:dcp disk:back.pt --format torch")
    for name in ("torch-source.pt", "torch-dcp"):
        bench.delete("disk", name)
