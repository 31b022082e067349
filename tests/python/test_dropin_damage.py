"""The drop-in's reader and damage: what it reads itself is compared with digests as well, and an error names file and FQN."""
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_dropin import path  # noqa: F401
from test_dropin_digests import flip

import dcpd
from dcpd.torch import StorageReader, StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def fails(path, wanted, **kw):  # noqa: F811
    """The text of what dcp.load raises: PyTorch wraps it in ways that differ from version to version."""
    with pytest.raises(BaseException) as e:  # CheckpointException is no Exception
        dcp.load(wanted, storage_reader=StorageReader(path), no_dist=True, **kw)
    return "; ".join([str(e.value), *(str(x[0]) for x in getattr(e.value, "failures", {}).values())])


def place(path, fqn):  # noqa: F811
    md = StorageReader(path).read_metadata()
    return next(info for index, info in md.storage_data.items() if index.fqn == fqn)


def byte_of(path, fqn, what):  # noqa: F811
    """Where `what` is in the item of a value."""
    info = place(path, fqn)
    return path / info.relative_path, (path / info.relative_path).read_bytes().index(what, info.offset)


def by_dcpd(path, sd):  # noqa: F811
    dcp.save(sd, storage_writer=StorageWriter(path), no_dist=True)


def by_pytorch(path, sd):  # noqa: F811
    dcp.save(sd, storage_writer=dcp.FileSystemWriter(path), no_dist=True)


@pytest.mark.parametrize("write", [by_dcpd, by_pytorch])
def test_a_value_that_has_changed(at, path, write):  # noqa: F811
    write(path, {"lr": 0.01, "name": "adam", "w": torch.arange(6.0)})
    file, begin = byte_of(path, "name", b"adam")
    flip(file, begin)
    text = fails(path, {"lr": 0.0, "name": ""})
    assert file.name in text and "FQN name" in text and re.search("not those written|CRC32", text), text
    with pytest.raises(dcpd.CheckpointDamaged):
        dcpd.load(path)


def test_two_values_that_were_exchanged(at, path):  # noqa: F811
    by_dcpd(path, {"a": 3, "b": 4})
    a, b = place(path, "a"), place(path, "b")
    assert a.length == b.length and a.relative_path == b.relative_path
    file = path / a.relative_path
    data = file.read_bytes()
    new = bytearray(data)
    new[a.offset:a.offset + a.length], new[b.offset:b.offset + b.length] = \
        data[b.offset:b.offset + b.length], data[a.offset:a.offset + a.length]
    file.write_bytes(new)
    text = fails(path, {"a": 0, "b": 0})
    assert file.name in text and "not those written" in text, text


def test_two_tensors_of_pytorchs_that_were_exchanged(at, path):  # noqa: F811
    """Nothing but their sizes tells them apart."""
    by_pytorch(path, {"a": torch.tensor(3.0), "b": torch.tensor([4.0])})
    a, b = place(path, "a"), place(path, "b")
    file, data = path / a.relative_path, (path / a.relative_path).read_bytes()
    items = [data[x.offset:x.offset + x.length] for x in (a, b)]
    assert a.length == b.length and a.offset < b.offset
    file.write_bytes(items[1] + data[a.offset + a.length:b.offset] + items[0] + data[b.offset + b.length:])
    text = fails(path, {"a": torch.zeros(()), "b": torch.zeros(1)})
    assert file.name in text and re.search("FQN [ab]", text), text


@pytest.mark.parametrize("what, behind", [(b"PK\5\6", 0), (b"PK\1\2", 8), (b"little", 3)], ids=["end", "encrypted", "byte order"])
@pytest.mark.parametrize("write", [by_dcpd, by_pytorch])
def test_an_archive_that_is_damaged(at, path, write, what, behind):  # noqa: F811
    write(path, {"lr": 0.01})
    file, begin = byte_of(path, "lr", what)
    flip(file, begin + behind)
    text = fails(path, {"lr": 0.0})
    assert file.name in text and "FQN lr" in text, text


def test_a_transformed_item_that_has_changed(at, path):  # noqa: F811
    pytest.importorskip("zstandard")
    from torch.distributed.checkpoint._extension import ZStandard

    sd = {"w": torch.arange(4000.0), "n": 3}
    for writer in (StorageWriter, dcp.FileSystemWriter):
        target = path / writer.__name__
        dcp.save(sd, storage_writer=writer(target, _extensions=[ZStandard()]), no_dist=True)
        info = place(target, "w")
        flip(target / info.relative_path, info.offset + info.length // 2)
        text = fails(target, {"w": torch.zeros(4000)})
        assert info.relative_path in text and "FQN w" in text, text


@pytest.mark.parametrize("name", [".metadata", ".dcpd.json"])
def test_metadata_and_manifest_that_have_changed(at, path, name):  # noqa: F811
    by_dcpd(path, {"w": torch.arange(6.0), "v": torch.zeros(6), "lr": 0.1})
    data = (path / name).read_bytes()
    for old, new in ((b"__0_0.distcp", b"__0_1.distcp"), (data[-20:], b"")):
        (path / name).write_bytes(data.replace(old, new))
        text = fails(path, {"w": torch.zeros(6), "lr": 0.0})
        assert re.search(rf"(?<!\w){re.escape(name)}", text), text


def test_metadata_of_pytorch_that_have_changed(at, path):  # noqa: F811
    by_pytorch(path, {"w": torch.arange(6.0)})
    data = (path / ".metadata").read_bytes()
    for old, new in ((b"state_dict_metadata", b"state_dict_metadatb"), (b"storage_data", b"storage_datb"), (data[40:60], bytes(20))):
        (path / ".metadata").write_bytes(data.replace(old, new))
        text = fails(path, {"w": torch.zeros(6)})
        assert re.search(r"(?<!\w)\.metadata", text), text


def test_metadata_without_properties(at, path):  # noqa: F811
    """PyTorch has no use for them, dcpd has: the item is read as PyTorch reads it."""
    by_pytorch(path, {"w": torch.arange(6.0)})
    data = (path / ".metadata").read_bytes()
    assert data.count(b"properties") == 1
    (path / ".metadata").write_bytes(data.replace(b"properties", b"propertied"))
    got = {"w": torch.zeros(6)}
    dcp.load(got, storage_reader=StorageReader(path), no_dist=True)
    assert torch.equal(got["w"], torch.arange(6.0))


def test_replaced_by_pytorch_is_read_by_what_pytorch_wrote(at, path):  # noqa: F811
    """The manifest of what was there before speaks for nothing any more."""
    by_dcpd(path, {"w": torch.arange(6.0), "n": 1})
    by_pytorch(path, {"w": torch.arange(6.0) + 1, "n": 2})
    assert (path / ".dcpd.json").exists()
    got = {"w": torch.zeros(6), "n": 0}
    dcp.load(got, storage_reader=StorageReader(path), no_dist=True)
    assert got["n"] == 2 and torch.equal(got["w"], torch.arange(6.0) + 1)


def test_an_error_of_the_planner_is_no_damage(at, path):  # noqa: F811
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    class Planner(DefaultLoadPlanner):
        def load_bytes(self, item, value):
            raise KeyError("mine")

    by_dcpd(path, {"lr": 0.01})
    text = fails(path, {"lr": 0.0}, planner=Planner())
    assert "mine" in text and "cannot be read" not in text, text
