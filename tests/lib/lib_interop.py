"""Between PyTorch's view of a checkpoint and dcpd's: boxes, images, whole tensors."""
import math
import pickle
import pathlib

import dcpd as lib


def metadata(path):
    with open(pathlib.Path(path) / ".metadata", "rb") as f:
        return pickle.load(f)


def boxes_of(path):
    """{fqn: sorted [(offsets, sizes)]} as PyTorch reads `.metadata`."""
    out = {}
    for fqn, m in metadata(path).state_dict_metadata.items():
        if hasattr(m, "chunks"):
            out[fqn] = sorted((list(c.offsets), list(c.sizes)) for c in m.chunks)
    return out


def images_of(fqn, tensor, boxes, world, dtype="F32"):
    """One image a rank: `tensor` cut along boxes [(rank, offsets, sizes)]."""
    out = []
    for r in range(world):
        entries, meta = {}, {}
        for i, (k, off, size) in enumerate(boxes):
            if k == r:
                part = tensor[tuple(slice(o, o + s) for o, s in zip(off, size))].contiguous()
                entries[f"{fqn}#{i}"] = (dtype, size, part.numpy().tobytes())
                meta[f"{fqn}#{i}"] = {"fqn": fqn, "global_shape": list(tensor.shape), "offsets": off}
        out.append(lib.image(entries, {"tensors": meta}))
    return out


def assemble(images):
    """{fqn: (shape, bytes)} of whole tensors; fails on holes and on replicas that differ."""
    import numpy as np

    shapes, data, seen = {}, {}, {}
    for img in images:
        for fqn, whole, off, size, _, raw in img.chunks():
            n = math.prod(size)
            if fqn not in shapes:
                shapes[fqn] = list(whole)
            assert shapes[fqn] == list(whole), f"{fqn}: {shapes[fqn]} and {whole}"
            if n == 0:
                continue
            width = len(raw) // n
            if fqn not in data or data[fqn].shape[-1] != width:
                assert fqn not in data, f"{fqn}: items of other widths"
                data[fqn] = np.zeros((*whole, width), np.uint8)
                seen[fqn] = np.zeros(tuple(whole), bool)
            cut = tuple(slice(o, o + s) for o, s in zip(off, size))
            part = np.frombuffer(raw, np.uint8).reshape(*size, width)
            old = seen[fqn][cut]
            assert (data[fqn][cut][old] == part[old]).all(), f"{fqn}: replicas differ"
            data[fqn][cut] = part
            seen[fqn][cut] = True
    for fqn, s in seen.items():
        assert s.all(), f"{fqn}: holes"
    return {fqn: (s, data[fqn].tobytes() if fqn in data else b"") for fqn, s in shapes.items()}
