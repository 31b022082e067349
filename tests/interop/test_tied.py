"""Tied weights of a torch.save file are one storage in the torch.save file that dcpd makes of it; elsewhere each has its own bytes."""
import torch
from safetensors.torch import load_file

import dcpd as lib
from test_one_file import HERE


def model():
    """GPT-2's way: the embedding is the head; a transposed tie, a view, an equal tensor that is another, and two that are empty."""
    torch.manual_seed(4)
    e, large = torch.randn(50, 8).bfloat16(), torch.randn(700, 1001)
    return {"wte": e, "lm_head": {"weight": e}, "t1": large.t(), "t2": large.t(), "whole": large, "rows": large[3:9], "same": e.clone(),
            "grad": torch.nn.Parameter(e), "empty1": torch.empty(0, 3), "empty2": torch.empty(0, 3), "step": 3}


def put(d, made=None):
    path = d.storages["main"] / (lib.fresh() + ".pt")
    torch.save(made or model(), path)
    return {**HERE, "name": path.name}


def reshard(d, source, kind="reshard", **more):
    name = lib.fresh() + ".pt"
    sources = {"sources": source} if kind == "merge" else {"source": source}
    d.api.run(kind, **sources, target={**HERE, "name": name, "format": "torch"}, **more)
    return torch.load(d.storages["main"] / name, weights_only=True, mmap=True), (d.storages["main"] / name).stat().st_size


def at(t):
    return t.untyped_storage().data_ptr()


def test_they_share_a_storage(d):
    want, (got, size) = model(), reshard(d, put(d))
    assert at(got["wte"]) == at(got["lm_head"]["weight"]) == at(got["grad"]) and got["grad"].requires_grad
    assert at(got["t1"]) == at(got["t2"])
    assert len({at(got[k]) for k in ("wte", "same", "t1", "whole", "rows")}) == 5
    assert size < 2 * 700 * 1001 * 4 + 100_000
    for k in ("wte", "same", "t1", "t2", "whole", "rows", "grad"):
        assert torch.equal(got[k], want[k]), k
    assert torch.equal(got["lm_head"]["weight"], want["wte"]) and got["step"] == 3
    with torch.no_grad():
        got["wte"][0] = 7
    assert torch.equal(got["lm_head"]["weight"][0], got["wte"][0])


def test_not_where_they_become_different(d):
    """A cast of one of them, rules; renamed, they stay tied. Other formats have both."""
    source = put(d)
    got, _ = reshard(d, source, dtype=[["wte", "float32"]])
    assert got["wte"].dtype == torch.float32 and torch.equal(got["wte"].bfloat16(), got["lm_head"]["weight"])
    got, _ = reshard(d, source, rename=[["^wte$", "embed"]], include=["wte", "lm_head.*"])
    assert got["embed"].untyped_storage().data_ptr() == got["lm_head"]["weight"].untyped_storage().data_ptr()
    got, _ = reshard(d, source, transform=[{"match": "^wte$", "pad": {"dim": 0, "to": 52}}])
    assert got["wte"].shape == (52, 8) and torch.equal(got["wte"][:50], got["lm_head"]["weight"])
    name = lib.fresh() + ".safetensors"
    d.api.run("reshard", source=source, target={**HERE, "name": name, "format": "safetensors"})
    both = load_file(d.storages["main"] / name)
    assert torch.equal(both["wte"], both["lm_head.weight"])


def test_rules_tie(d):
    """A tie rule's names share a storage, also where the source lies in shards; what rules made alike, and what they only renamed, too."""
    name = lib.fresh()
    d.api.run("reshard", source=put(d), target={**HERE, "name": name, "world_size": 3, "layout": [
        {"match": "*", "placements": ["Shard(0)"]}]}, include=["whole", "same", "step"])
    rules = [{"match": "^whole$", "tie": "head"}, {"match": "^same$", "tie": "turned"}, {"match": "^turned$", "permute": [1, 0]},
             {"match": "^(whole|head)$", "dtype": "bfloat16"}, {"match": "^same$", "tie": "narrow"},
             {"match": "^narrow$", "dtype": "float32"}]
    got, size = reshard(d, {**HERE, "name": name}, transform=rules)
    want = model()
    assert at(got["whole"]) == at(got["head"]) and len({at(got[k]) for k in ("whole", "same", "turned", "narrow")}) == 4
    assert size < 700 * 1001 * 2 + 20_000, "the tied one is written once"
    for k, v in {"whole": want["whole"].bfloat16(), "head": want["whole"].bfloat16(), "same": want["same"], "turned": want["same"].t(),
                 "narrow": want["same"].float()}.items():
        assert torch.equal(got[k], v), k
    got, _ = reshard(d, put(d), transform=[{"match": "^whole$", "drop": True}, {"match": "^wte$", "rename": "embed"}])
    assert at(got["embed"]) == at(got["lm_head"]["weight"]) == at(got["grad"]) and at(got["t1"]) == at(got["t2"])
    assert torch.equal(got["embed"], want["wte"]) and torch.equal(got["t1"], want["t1"]) and got["empty1"].shape == (0, 3)


def test_averages_stay_tied(d):
    """Where all checkpoints of a merge tie them, with rules too; not where one of them does not, or only one of the two is averaged."""
    second = {k: v + 1 if isinstance(v, torch.Tensor) else v for k, v in model().items()}
    second["grad"] = second["lm_head"]["weight"] = second["wte"]
    refs = [put(d), put(d, second)]
    want = (model()["wte"].float() * 0.5 + second["wte"].float() * 0.5).bfloat16()
    for rules in ({}, {"transform": [{"match": "^wte$", "rename": "embed"}, {"match": "^(embed|lm_head.*|grad)$", "permute": [1, 0]}]}):
        got, _ = reshard(d, refs, "merge", **rules)
        e, head = got["embed" if rules else "wte"], got["lm_head"]["weight"]
        assert at(e) == at(head) == at(got["grad"]) and torch.equal(e.t() if rules else e, want)
        assert at(got["t1"]) != at(got["t2"]), "the second one has them apart"
        assert torch.equal(got["t1"], got["t2"])
    got, _ = reshard(d, refs, "merge", first_only=["wte"])
    assert torch.equal(got["wte"], model()["wte"]) and torch.equal(got["lm_head"]["weight"], want) and at(got["wte"]) != at(got["grad"])
