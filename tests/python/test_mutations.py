"""A damaged byte is never data: checkpoints are damaged in all parts, and read on every path there is (see lib_mutations).

Of each failing case a line is printed that repeats it. `DCPD_MUTATION_SEED=n` damages other bytes; make check-full damages more, and
every byte of some checkpoints.
"""
import logging
import os
import pathlib
import random
import re
import resource
import shutil
import tempfile

import harness as lib
import lib_mutations
import mutate
import pytest
from lib_reads import Reader

import dcpd

pytestmark = pytest.mark.filterwarnings("ignore")

FIXTURES = pathlib.Path(__file__).resolve().parents[1] / "fixtures"
SEED = os.environ.get("DCPD_MUTATION_SEED", "1")
GOLDEN = sorted("/".join(p.parts[-3:-1]) for p in FIXTURES.glob("torch-*/*/checkpoint"))
OWN = ["own", "blocks", "two-ranks", "dropin", "dropin-files", "dropin-zstd", "dropin-ranks"]
# Paths that cannot read these whole checkpoints: an FQN "" has no URL; a state dict lacks the empty entries of a list.
UNREADABLE = {"odd_keys": {"slices", "dcpd.open"}, "nested_v23": {"load into"}}


@pytest.fixture(scope="module")
def reader():
    """Of a daemon whose files are in memory: thousands of small checkpoints are written and removed."""
    in_memory = shutil.disk_usage(lib.SHM).free > lib_mutations.ROOM
    home = pathlib.Path(tempfile.mkdtemp(prefix="mutations-", dir=lib.SHM if in_memory else None))
    d = lib.Daemon(home, {"main": home / "main", "other": home / "other"})
    url = os.environ.get("DCPD_URL")
    os.environ["DCPD_URL"] = f"unix://{d.socket}"
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(re.search(r"VmData:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text()).group(1)) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + lib_mutations.MEMORY, limits[1]))  # a damaged pickle makes Python's ask for any amount
    logging.disable(logging.CRITICAL)  # PyTorch logs each refusal with its traceback
    yield Reader(d)
    logging.disable(logging.NOTSET)
    resource.setrlimit(resource.RLIMIT_DATA, limits)
    dcpd.close()
    os.environ.pop("DCPD_URL")
    if url is not None:
        os.environ["DCPD_URL"] = url
    d.discard()
    shutil.rmtree(home)


@pytest.fixture(scope="module")
def places(reader, tmp_path_factory):
    """{name: directory} of all checkpoints."""
    own = lib_mutations.written(reader, tmp_path_factory.mktemp("written"))
    assert list(own) == OWN
    return {**own, **{name: FIXTURES / name / "checkpoint" for name in GOLDEN}}


def judge(reader, places, name):
    j = lib_mutations.Judge(reader, places[name])
    unsound = {path: lib_mutations.text_of(e) for path, e in j.sound()}
    assert set(unsound) == UNREADABLE.get(name.split("/")[-1], set()), f"{name}: {unsound}"
    return j


def lines(j, name, mutations):
    """A line for each fault, which repeats its case."""
    out = []
    for i, m in enumerate(mutations):
        direct = i % 2
        for path, fault in j.faults(m, bool(direct)):
            out.append(f"DCPD_MUTATION='{name} {m} {direct}' make check-python T=one_mutation  # {path}: {fault}")
    return out


def check(reader, places, names, count):
    found = []
    for name in names:
        j = judge(reader, places, name)
        found += lines(j, name, j.sample(random.Random(f"{SEED} {name}"), count))
    assert not found, "\n".join(["damage is not told:", *found])


@pytest.mark.seconds(300)
@pytest.mark.parametrize("count", [2, pytest.param(300 if lib.FULL else 18, marks=pytest.mark.long)])
def test_damage_to_what_dcpd_wrote(reader, places, count):
    check(reader, places, OWN, count)


@pytest.mark.long
@pytest.mark.seconds(1800)
@pytest.mark.parametrize("checkpoints, count", [(3, 4), pytest.param(len(GOLDEN) if lib.FULL else 16, 60 if lib.FULL else 12,
                                                                      marks=pytest.mark.long)])
def test_damage_to_what_pytorch_wrote(reader, places, checkpoints, count):
    check(reader, places, random.Random(f"{SEED} {count}").sample(GOLDEN, checkpoints), count)


@pytest.mark.slow
@pytest.mark.seconds(3600)
@pytest.mark.parametrize("name", ["own", "two-ranks", "dropin-ranks", "torch-2.15.0/plain", "torch-2.2.2/plain", "torch-2.15.0/crc32_off",
                                  "torch-2.15.0/zstd", "torch-2.9.1/unflattened"])
def test_every_byte(reader, places, name):
    j = judge(reader, places, name)
    found = lines(j, name, mutate.every_byte(random.Random(f"{SEED} {name}"), j.found))
    assert not found, "\n".join(["damage is not told:", *found])


@pytest.mark.skipif("DCPD_MUTATION" not in os.environ, reason="repeats the case that DCPD_MUTATION names")
def test_one_mutation(reader, places):
    name, text, direct = os.environ["DCPD_MUTATION"].split(" ")
    j, m = judge(reader, places, name), mutate.Mutation.parse(text)
    faults = j.faults(m, direct == "1")
    assert not faults, "\n".join([*map(str, j.touched(m)), *(f"{p}: {x}" for p, x in faults)])
