"""Bench rows of planning: a million chunks beside fixed limits, a hundred thousand beside PyTorch's planner, and the next step of a run."""
import scenarios
from measure import tool

LIMITS = (("plan.global", "plan_s", 1.0), ("plan.write_metadata", "write_s", 1.0), ("plan.parse", "parse_s", 2.0))
FORMS = (("grid_1000x1000", "1 1024 1000"), ("1M_chunks", "977 1024"), ("1M_tensors", "1000000 1"))
PYTORCH_CHUNKS = 100000  # a million takes PyTorch most of a minute and 2.5 GB


def rows(b):
    if not b.wants("plan"):
        return
    got = [tool("plan_million", 1000000) for _ in range(3)]
    for name, key, limit in LIMITS:
        b.row(f"{name}.1M_chunks", "s", "<=1.00", f"limit {limit:g} s", [g[key] for g in got], [limit], "plan_million 1000000")
    b.row("plan.bytes_per_chunk", "B", "<=1.00", "limit 300 bytes", [g["bytes_per_chunk"] for g in got], [300.0], "plan_million 1000000")
    for name, args in FORMS:
        got = [tool("bench_plan", *args.split()) for _ in range(3)]
        for row, key in (("plan.save", "save_plan_s"), ("plan.validate", "validate_s"), ("plan.load", "load_plan_s")):
            b.row(f"{row}.{name}", "s", "<=1.00", "limit 1 s", [g[key] for g in got], [1.0], f"bench_plan {args}")
        b.row(f"plan.save_bytes.{name}", "B", "<=1.00", "limit 300 bytes and the name", [g["save_peak_bytes_per_chunk"] for g in got],
              [300 + g["name_bytes_per_chunk"] for g in got], f"bench_plan {args}")
    beside_pytorch(b)
    next_step(b)


def beside_pytorch(b):
    n = PYTORCH_CHUNKS
    ours, theirs = {"plan": [], "write": []}, {"plan": [], "write": []}
    for _ in range(3):
        g = tool("plan_million", n)
        planned, written = scenarios.bench_plan(n, 1000, str(b.disk / "metadata"))
        for part, mine, its in (("plan", g["plan_s"] + g["validate_s"], planned), ("write", g["write_s"], written)):
            ours[part].append(n / mine)
            theirs[part].append(n / its)
    for part, what in (("plan", "create_global_plan, which validates"), ("write", "pickle.dump of its Metadata")):
        b.row(f"plan.pytorch.{part}", "chunks/s", ">=20.00", f"PyTorch {what}, {n} chunks", ours[part], theirs[part], f"plan_million {n}")


def next_step(b):
    got = [tool("bench_step", 10000, 4) for _ in range(3)]
    b.row("plan.step_again.10k_tensors", "ms", "<=1.00", "limit 1 ms", [g["again_plan_ms"] for g in got], [1.0], "bench_step 10000 4")
    b.row("plan.step_headers.10k_tensors", "ms", "<=1.00", "headers of 4 ranks read and planned",
          [g["again_match_ms"] + g["again_plan_ms"] + g["again_share_ms"] for g in got],
          [g["parse_ms"] + g["plan_ms"] + g["tables_ms"] for g in got], "bench_step 10000 4")
