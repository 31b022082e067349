"""The scripts of `make check-gpu` and `make bench-gpu`, as far as they can be tried without a GPU: their own logic, on the CPU, and what
they say where there is no GPU, or none that PyTorch sees."""
import importlib.util
import json
import os
import subprocess
import sys

import harness as lib
import pytest
import torch

FAKES = lib.ROOT / "build/test/fakes"
CHECK, BENCH = lib.ROOT / "tests/gpu/check.py", lib.ROOT / "tests/bench/gpu.py"


def run(script, *args, **env):
    p = subprocess.run([sys.executable, str(script), *map(str, args)], env={**os.environ, "DCPD_BIN": str(lib.BIN / "dcpd"), **env},
                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100 * lib.PATIENCE)
    return p.returncode, p.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("script, word", [(CHECK, "tried"), (BENCH, "measured")])
def test_without_a_gpu_nothing_is_done_in_words(tmp_path, script, word):
    out = tmp_path / "rows"
    code, text = run(script, *(["--out", out] if script is BENCH else []))
    assert code == 0 and "skipped, nothing was " + word in text and "libcuda.so.1" in text and not out.exists(), text


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("script, word", [(CHECK, "failed: default, expandable"), (BENCH, "not measured: default, expandable")])
def test_a_gpu_that_pytorch_does_not_see(tmp_path, script, word):
    """The unit tests of the check run over whatever libcuda there is."""
    out = tmp_path / "rows"
    more = ["--out", out] if script is BENCH else ["--units", lib.ROOT / "build/test/release/test_device_gather"]
    code, text = run(script, *more, LD_LIBRARY_PATH=str(FAKES))
    assert code == 1 and "PyTorch does not see it" in text and word in text and not out.exists(), text
    assert script is BENCH or "PASSED  ] 3" in text or not os.path.exists(more[1]), text


def module(path):
    spec = importlib.util.spec_from_file_location(path.stem + "_script", path)
    m = importlib.util.module_from_spec(spec)
    kept = list(sys.path)
    spec.loader.exec_module(m)
    sys.path[:] = kept
    return m


def test_one_byte_that_differs_is_found():
    check, nan = module(CHECK), float("nan")
    a = {"m": {"x": torch.tensor([1.0, nan, 3.0]), "y": torch.zeros(2, dtype=torch.bfloat16)}, "step": 3}
    b = {"m": {"x": torch.tensor([1.0, nan, 3.0]), "y": torch.zeros(2, dtype=torch.bfloat16)}, "step": 3}
    assert check.differences(a, b) == []
    b["m"]["y"][1] = -0.0
    assert check.differences(a, b) == ["m.y: byte 3 of 4 is 0, not 128"]
    b["m"]["y"], b["step"] = torch.zeros(2, dtype=torch.float16), 4
    assert check.differences(a, b) == ["m.y: torch.bfloat16[2], not torch.float16[2]", "step: 3, not 4"]
    assert check.differences({"x": a["m"]["x"]}, {}) == ["x is in one alone"]
    b = module(BENCH).Bench.__new__(module(BENCH).Bench)
    b.torch = torch
    b.same({"t": torch.tensor([nan])}, {"t": torch.tensor([nan])})
    with pytest.raises(AssertionError, match="t has come back"):
        b.same({"t": torch.tensor([0.0])}, {"t": torch.tensor([-0.0])})


@pytest.mark.long
@pytest.mark.seconds(400)
def test_the_checks_themselves():
    code, text = run(CHECK, "--device", "cpu", "--mib", 16)
    assert code == 0 and text.count("\nok ") == 12 and "operations: skipped, nothing was moved over NCCL: " in text, text


@pytest.mark.long
@pytest.mark.seconds(400)
def test_the_measurements_themselves(tmp_path):
    out = tmp_path / "rows"
    code, text = run(BENCH, "--device", "cpu", "--mib", 16, "--runs", 1, "--out", out)
    names = {x.split()[0] for x in text.splitlines() if x.startswith("gpu.")}
    peers = {"gpu.load_safetensors", "gpu.stall_dcp"}  # a Python without safetensors, a PyTorch without the process
    ours = {"gpu.snapshot", "gpu.stall", "gpu.load", "gpu.small_tensors", "gpu.load_cast", "gpu.snapshot_expandable",
            "gpu.stall_expandable", "gpu.load_expandable"}
    assert ours <= names <= ours | peers and (code == 0) == (names == ours | peers), text
    assert not out.exists(), "only figures of a GPU are recorded"
    for name in peers - names:
        assert f"not measured: {name}" in text or name in text.splitlines()[-1], text


# The time is up as soon as the sizes are chosen, however fast the machine is.
UP = f"""
import sys
sys.path.insert(0, {str(BENCH.parent)!r})
import gpu
fit = gpu.Bench.fit
def fit_and_end(bench):
    fit(bench)
    bench.end = 0
gpu.Bench.fit = fit_and_end
gpu.main()
"""


@pytest.mark.long
def test_rows_for_which_no_time_is_left_are_named(tmp_path):
    (tmp_path / "up.py").write_text(UP)
    code, text = run(tmp_path / "up.py", "--device", "cpu", "--mib", 1, "--runs", 1, "--rows", tmp_path / "rows", "--expandable")
    got = json.loads((tmp_path / "rows").read_text())
    assert code == 0 and got["lacking"] == ["gpu.load_expandable"] and "the time is up" in text, text
