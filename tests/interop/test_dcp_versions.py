"""Older versions of PyTorch read what dcpd writes: each in an environment of its own (make check-full)."""
import os
import pathlib
import subprocess

import pytest

import dcpd as lib

HERE = pathlib.Path(__file__).resolve().parent
FIXTURES = HERE.parent / "fixtures"
# A version reads the dtypes it knows: those of golden checkpoints that are no newer.
READS = {"2.3": ["torch-2.2.2"], "2.6": ["torch-2.2.2", "torch-2.6.0"], "2.9": ["torch-2.2.2", "torch-2.6.0", "torch-2.9.1"]}
CHECK = """
import pathlib, sys
sys.path.insert(0, {lib!r})
import check_ckpt
bad = 0
for line in sys.stdin:
    directory, expected = line.rstrip("\\n").split("\\t")
    try:
        problems = check_ckpt.check(pathlib.Path(directory), pathlib.Path(expected))[0]
    except BaseException as e:
        problems = [f"cannot be loaded: {{type(e).__name__}}: {{e}}"]
    for p in problems:
        print(f"{{expected}}: {{p}}")
    bad += bool(problems)
sys.exit(1 if bad else 0)
"""


@pytest.mark.slow
@pytest.mark.seconds(3600)
@pytest.mark.parametrize("version", READS)
def test_older_pytorch_reads_it(d, version):
    r = subprocess.run([HERE.parent / "venv.sh", HERE / f"versions/torch-{version}.txt"], capture_output=True, text=True,
                       env={**os.environ, "DCPD_TEST_VENV": ""})
    assert r.returncode == 0, r.stderr[-2000:]
    lines = []
    for family in READS[version]:
        for case in sorted((FIXTURES / family).iterdir()):
            source = {"storage": "golden", "name": f"{family}/{case.name}/checkpoint"}
            for world, dim in ((1, 0), (3, 1)):
                name = f"versions/{lib.fresh()}"
                d.api.run("reshard", source=source, target={
                    "storage": "main", "name": name, "world_size": world,
                    "layout": [{"match": "*", "mesh": [world], "placements": [f"Shard({dim})"]}]})
                lines.append(f"{d.storages['main'] / name}\t{case}")
    python = pathlib.Path(r.stdout.strip()) / "bin/python"
    r = subprocess.run([python, "-c", CHECK.format(lib=str(HERE.parent / "lib"))], input="\n".join(lines), capture_output=True,
                       text=True)
    assert r.returncode == 0, r.stdout[-4000:] + r.stderr[-2000:]
