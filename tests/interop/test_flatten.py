"""Flattening and paths against PyTorch's own functions, at random: _nested_dict, _traverse, _state_dict_utils.

Tensors are told apart by their length. Where PyTorch raises, ours must answer with an error, and with its words for duplicate keys.
"""
import random

import pytest
import torch
from torch.distributed import _state_dict_utils as utils
from torch.distributed.checkpoint import _nested_dict, _traverse, _version

CASES = 400


def encode(v):
    if isinstance(v, dict):
        return {"d": [[k, encode(x)] for k, x in v.items()]}
    if isinstance(v, (list, tuple)):
        return {"l" if isinstance(v, list) else "t": [encode(x) for x in v]}
    return {"x": v.numel()} if isinstance(v, torch.Tensor) else v


def random_tree(rng, depth):
    kind = rng.choice(["tensor", "value", "value", "dict", "list", "tuple", "dict", "list"]) if depth else "value"
    if kind == "tensor":
        return torch.zeros(rng.randrange(9))
    if kind == "value":
        return rng.choice([None, True, 1, 2.5, "a", ""])
    n = rng.choice([0, 1, 2, 2, 3])
    if kind == "dict":
        return random_dict(rng, n, depth - 1)
    return (list if kind == "list" else tuple)(random_tree(rng, depth - 1) for _ in range(n))


def random_dict(rng, n, depth):
    keys = ["a", "b", "c", "0", "1", 0, 1, -1, "a.b", "b.0", "", "é"]
    return {rng.choice(keys): random_tree(rng, depth) for _ in range(n)}


def flatten_as(rule, tree):
    if rule == "utils":
        return utils._flatten_state_dict(tree)
    _version._derived_version = "2_3" if rule == "dcp-2.3" else None
    try:
        return _nested_dict.flatten_state_dict(tree)
    finally:
        _version._derived_version = None


@pytest.mark.parametrize("rule", ["utils", "dcp", "dcp-2.3"])
def test_flatten_and_back(ask, rule):
    rng = random.Random(11)
    seen = {"same": 0, "duplicate": 0, "broken": 0}
    for _ in range(CASES):
        tree = random_dict(rng, rng.randrange(5), 4)
        got = ask(op="flatten", rule=rule, tree=encode(tree))
        back = ask(op="unflatten", rule=rule, tree=encode(tree))
        try:
            flat, mapping = flatten_as(rule, tree)
        except ValueError as e:
            assert got == back == {"error": "duplicate_key", "text": str(e)}, tree
            seen["duplicate"] += 1
            continue
        assert got == {"flat": [[k, list(mapping[k]), encode(v)] for k, v in flat.items()]}, tree
        undo = utils._unflatten_state_dict if rule == "utils" else _nested_dict.unflatten_state_dict
        try:
            want = undo(flat, mapping)
        except (TypeError, AttributeError, IndexError, KeyError):
            assert "error" in back, tree
            seen["broken"] += 1
            continue
        assert back == {"tree": encode(want)}, tree
        seen["same"] += 1
    assert seen["same"] > CASES / 4 and seen["duplicate"] > 5, seen


def random_path(rng, tree):
    """Mostly one that leads somewhere."""
    path = []
    while rng.random() < 0.85:
        if isinstance(tree, dict) and tree and rng.random() < 0.85:
            key = rng.choice([k for k in tree if isinstance(k, str)] or list(tree))
            tree = tree[key]
        elif isinstance(tree, (list, tuple)) and tree and rng.random() < 0.7:
            key = rng.randrange(len(tree))
            tree = tree[key]
        else:
            key, tree = rng.choice(["a", "b", "z", 0, 1, 4, -1, -3]), None
        path.append(key)
    return path or ["a"]


def test_set_element(ask):
    rng = random.Random(12)
    done = {True: 0, False: 0}
    for _ in range(2 * CASES):
        tree = random_dict(rng, rng.randrange(5), 4)
        path = random_path(rng, tree)
        before = encode(tree)
        got = ask(op="set", tree=before, path=path, value="new")
        at = _traverse.get_element(tree, path[:-1]) if all(isinstance(p, str) for p in path) else None
        if isinstance(at, torch.Tensor):
            continue
        try:
            _traverse.set_element(tree, tuple(path), "new")
        except (TypeError, AttributeError, IndexError, ValueError, RuntimeError):
            assert "error" in got, (before, path)
        else:
            assert got == {"tree": encode(tree)}, (before, path)
        done["tree" in got] += 1
    assert min(done.values()) > CASES / 10, done


def test_get_element(ask):
    rng = random.Random(13)
    found = 0
    for _ in range(2 * CASES):
        tree = random_dict(rng, rng.randrange(5), 4)
        path = random_path(rng, tree)
        got = ask(op="get", tree=encode(tree), path=path)
        missing = object()
        try:
            want = _traverse.get_element(tree, tuple(path), missing)
        except IndexError:  # its check of a list's length is off by one; there is nothing, and that is the answer here
            want = missing
        assert got == ({} if want is missing else {"tree": encode(want)}), (tree, path)
        found += want is not missing
    assert CASES / 6 < found < 2 * CASES - CASES / 4
