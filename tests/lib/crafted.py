"""Checkpoints that are wrong in one way each: a golden one, copied into a storage and damaged."""
import pathlib
import pickle
import shutil

import dcpd as lib

FIXTURES = pathlib.Path(__file__).resolve().parents[1] / "fixtures"


class Crafted:
    """One checkpoint under a storage root, to be damaged. `name` is what a request calls it."""

    def __init__(self, root, case="torch-2.15.0/sharded_rowwise", name=None):
        self.name = name or f"crafted/{lib.fresh()}"
        self.dir = pathlib.Path(root) / self.name
        self.dir.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(FIXTURES / case / "checkpoint", self.dir)
        self.meta = self.dir / ".metadata"

    @property
    def ref(self):
        return {"storage": "main", "name": self.name}

    def files(self):
        return sorted(p for p in self.dir.glob("*.distcp") if p.stat().st_size)

    def edit(self, change):
        """change(Metadata) in place or a new one; written back as PyTorch writes it."""
        md = pickle.loads(self.meta.read_bytes())
        md = change(md) or md
        self.meta.write_bytes(pickle.dumps(md))
        return self

    def tensor(self, md):
        """The first stored chunk of a tensor: (index, its storage info)."""
        return next((i, s) for i, s in md.storage_data.items() if getattr(i, "offset", None) is not None)

    def replace(self, old, new):
        """In the pickle's bytes, every one; lengths must agree."""
        data = self.meta.read_bytes()
        assert len(old) == len(new) and old in data
        self.meta.write_bytes(data.replace(old, new))
        return self

    def raw(self, data):
        self.meta.write_bytes(data)
        return self


class Evil:
    """Unpickling this makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        import os

        return os.system, (f"touch {self.path}",)


def tree(directory):
    """Everything below, with content: to show that nothing changed."""
    d = pathlib.Path(directory)
    return {str(p.relative_to(d)): p.read_bytes() if p.is_file() else None for p in sorted(d.rglob("*"))}
