"""Bench rows of options.pace: what a training step on all cores loses while a save is written, by dcpd and by PyTorch.

A step's figure is the mean of a round's steps, since what a save takes may fall on some steps only. The process that trains is
tests/bench/pace_peer.py.
"""
import json
import pathlib
import statistics
import subprocess
import sys

from python_rows import environment

PEER = pathlib.Path(__file__).with_name("pace_peer.py")
ROUNDS = 3
NAMES = ("py.step.background", "py.step.full", "py.step.torch")


def rows(bench, size):
    """size: the state dict's bytes."""
    if not any(bench.wants(n) for n in NAMES):
        return
    bench.no_torch()
    bench.daemon()
    r = subprocess.run([sys.executable, PEER, str(size), str(ROUNDS), str(bench.disk), "full", "background", "torch"], text=True,
                       env=environment(bench), capture_output=True, timeout=900)
    if r.returncode != 0:
        raise AssertionError(f"pace_peer.py: {r.stderr[-600:]}")
    m = json.loads(r.stdout.splitlines()[-1])
    ms = {k: [statistics.mean(one) * 1e3 for one in m[k]] for k in ("none", "full", "background", "torch")}
    gib = f"{size >> 20} MiB"
    for name, ours, peer, goal, peer_name, command in (
            ("py.step.background", "background", "none", "<=1.05", "steps without a save", f"dcpd.async_save(…, pace='background'), {gib}"),
            ("py.step.full", "full", "none", "<=2.00", "steps without a save", f"dcpd.async_save, {gib}"),
            ("py.step.torch", "background", "torch", "<=1.00", "steps beside torch's async_save", f"pace='background', {gib}")):
        if bench.wants(name):
            bench.row(name, "ms", goal, peer_name, ms[ours], ms[peer], command, save_seconds=statistics.median(m[ours + "_save"]))
