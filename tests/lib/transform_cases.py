"""Conversion rules done with torch operations: what dcpd's `transform` must equal bit for bit. And random chains of rules."""
import random
import re

import torch

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
          torch.float8_e5m2fnuz]
INTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
NAMES = {str(t).removeprefix("torch."): t for t in FLOATS + INTS}


def raw(t):
    """A tensor's elements in C order, as bytes."""
    return t.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def same(got, want):
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())
    for k, v in want.items():
        assert (got[k].dtype, got[k].shape) == (v.dtype, v.shape), (k, got[k].dtype, got[k].shape, v.dtype, v.shape)
        assert torch.equal(raw(got[k]), raw(v)), k


def size(x, names, shape):
    if isinstance(x, int):
        return x
    known = {**names, **{f"dim{i}": s for i, s in enumerate(shape)}}
    return eval(x.strip("{}").replace("/", "//"), {}, known)  # noqa: S307 (sizes of this file's own)


def filled(template, m, i=None):
    if i is not None:
        template = re.sub(r"(?<!\$)\{i\}", str(i), template)
    return re.sub(r"\$\{(\w+)\}|\$(\d+)", lambda g: m[int(g[1])] if (g[1] or g[2]).isdigit() and g[1] else m[int(g[2])], template)


def numbers(name):
    return [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", name)]


def cut(t, text, dim, names):
    lo, hi = (None if x == "" else size(int(x) if x.lstrip("-").isdigit() else x, names, t.shape) for x in text.split(":"))
    return t.movedim(dim, 0)[lo:hi].movedim(0, dim)


def on_one(t, name, rule, m, names):
    """{name: tensor} that come of one tensor."""
    if "rename" in rule:
        return {re.sub(rule["match"], lambda g: filled(rule["rename"], g), name): t}
    if "dtype" in rule:
        return {name: t.to(NAMES[rule["dtype"]])}
    if "split" in rule:
        s = rule["split"]
        sizes = [size(x, names, t.shape) for x in s["sizes"]] if "sizes" in s else [t.shape[s["dim"]] // s["parts"]] * s["parts"]
        return {filled(n, m): p for n, p in zip(s["into"], torch.split(t, sizes, s["dim"]), strict=True)}
    if "unstack" in rule:
        return {filled(rule["unstack"]["into"], m, i): p for i, p in enumerate(t.unbind(rule["unstack"]["dim"]))}
    if "permute" in rule:
        return {name: t.permute(rule["permute"])}
    if "reshape" in rule:
        return {name: t.contiguous().reshape([size(x, names, t.shape) for x in rule["reshape"]])}
    if "pad" in rule:
        d, to = rule["pad"]["dim"], size(rule["pad"]["to"], names, t.shape)
        more = list(t.shape)
        more[d] = to - t.shape[d]
        zeros = torch.zeros(more, dtype=torch.uint8).to(t.dtype)
        return {name: join(torch.cat, [t, zeros], d)}
    if "slice" in rule:
        for d, text in enumerate(rule["slice"]):
            t = cut(t, text, d, names)
        return {name: t}
    if "drop" in rule:
        return {}
    raise AssertionError(rule)


def join(how, parts, dim):
    """torch.cat and stack know no float8: by bytes."""
    kind = parts[0].dtype
    if kind.itemsize == 1:
        return how([raw(p).reshape(p.shape) for p in parts], dim).view(kind)
    return how(parts, dim)


def apply(state, rules, names=None):
    state = dict(state)
    for rule in rules:
        hits = {k: m for k in state if (m := re.search(rule["match"], k))}
        out, groups = {}, {}
        kind = "concat" if "concat" in rule else "stack" if "stack" in rule else None
        for k, m in hits.items():
            if kind:
                groups.setdefault(filled(rule[kind]["into"], m), []).append(k)
        for k, t in state.items():
            if k not in hits:
                out[k] = t
            elif "tie" in rule:
                other = filled(rule["tie"], hits[k])
                out |= {k: state.get(other, t)} if other in state else {k: t, other: t}
            elif not kind:
                out |= on_one(t, k, rule, hits[k], names or {})
            else:
                into = filled(rule[kind]["into"], hits[k])
                if into in groups:
                    order = rule[kind].get("order")
                    parts = sorted(groups.pop(into), key=lambda n: [x in n for x in order].index(True) if order else numbers(n))
                    out[into] = join(torch.cat if kind == "concat" else torch.stack, [state[p] for p in parts], rule[kind]["dim"])
        state = out
    return {k: v.contiguous() for k, v in state.items()}


# ---- random chains ----

def start(seed):
    """A few tensors under names such as a.0.w."""
    rng = random.Random(seed)
    g = torch.Generator().manual_seed(seed)
    state = {}
    for letter in "abc"[:rng.randint(1, 3)]:
        shape = [rng.choice([1, 2, 3, 4, 6, 8, 12]) for _ in range(rng.randint(1, 4))]
        kind = rng.choice(FLOATS + INTS)
        for i in range(rng.randint(1, 3)):
            t = torch.randint(-2000, 2000, shape, generator=g).float() / rng.choice([1, 64, 1e6, 1e-6])
            state[f"{letter}.{i}.w"] = t.to(kind)
    return state


def random_rule(rng, state, step):
    """A rule that fits one family of the state's names, or None."""
    name = rng.choice(sorted(state))
    family = name.split(".")[0]
    same_family = [k for k in state if k.split(".")[0] == family]
    alike = len({(state[k].shape, state[k].dtype) for k in same_family}) == 1
    t = state[name]
    one, new = f"^{re.escape(name)}$", f"{family}{step}"
    dim = rng.randrange(t.dim()) if t.dim() else 0
    kind = rng.choice(["rename", "dtype", "split", "concat", "stack", "unstack", "permute", "reshape", "reshape", "permute", "pad", "slice",
                       "drop", "tie"])
    if kind == "rename":
        return {"match": rf"^{family}\.", "rename": f"{new}x."}
    if kind == "dtype":
        return {"match": one, "dtype": rng.choice(["float32", "bfloat16", "float16", "float64"])} if t.dtype in FLOATS else None
    if kind in ("concat", "stack"):
        number = sorted(int(k.split(".")[1]) for k in same_family if len(k.split(".")) == 3)
        lists = number == list(range(len(same_family)))
        if not (alike and lists) or (kind == "concat" and not t.dim()):
            return None
        d = rng.randint(0, t.dim()) if kind == "stack" else dim
        return {"match": rf"^({family})\.\d+\.w$", kind: {"dim": d, "into": f"${{1}}{step}j.0.w"}}
    if kind == "permute":
        order = list(range(t.dim()))
        rng.shuffle(order)
        return {"match": one, "permute": order}
    if kind == "reshape":
        left, factors = t.numel(), []
        for f in (2, 3, 5, 7, 11, 13):
            while left and left % f == 0:
                factors.append(f)
                left //= f
        shape = [1] * rng.randint(1, 5)
        for f in factors + [left]:
            shape[rng.randrange(len(shape))] *= f
        if rng.random() < 0.3 and t.numel():
            shape[rng.randrange(len(shape))] = -1
        return {"match": one, "reshape": shape}
    if not t.dim():
        return None
    if kind == "split" and t.shape[dim] > 1:
        at = rng.randrange(1, t.shape[dim])
        return {"match": one, "split": {"dim": dim, "sizes": [at, f"{{dim{dim}-{at}}}"], "into": [f"{new}p.0.w", f"{new}q.0.w"]}}
    if kind == "unstack" and t.shape[dim] <= 4:
        return {"match": one, "unstack": {"dim": dim, "into": f"{new}u.{{i}}.w"}}
    if kind == "pad":
        return {"match": one, "pad": {"dim": dim, "to": t.shape[dim] + rng.randrange(3)}} if t.numel() < 3000 else None
    if kind == "slice":
        lo = rng.randrange(t.shape[dim])
        return {"match": one, "slice": [":"] * dim + [f"{lo}:" if rng.random() < 0.5 else f":{lo + 1}"]}
    if kind == "tie":
        return {"match": one, "tie": f"{new}t.0.w"}
    return {"match": one, "drop": True} if kind == "drop" and len(state) > 3 else None


def chain(seed):
    """(state, rules, what comes of it)."""
    rng = random.Random(f"chain {seed}")
    state = start(seed)
    rules, now = [], state
    for step in range(40):
        rule = random_rule(rng, now, step)
        if rule is None or len(rules) == 9:
            continue
        casts = sum("dtype" in r for r in rules)
        if "dtype" in rule and casts == 4:
            continue
        rules.append(rule)
        now = apply(now, [rule])
    return state, rules, now


def layout(seed, state, world):
    rng = random.Random(f"layout {seed}")
    rules = []
    for k, t in state.items():
        if t.dim() and rng.random() < 0.8:
            rules.append({"match": k, "placements": [f"Shard({rng.randrange(t.dim())})"], "mesh": [world]})
    return rules

