#!/usr/bin/env python3
"""The house rules as a test: what a reviewer would otherwise have to look for by hand.

    LIB=build/lib python3 tests/tidy.py        reads the tree and the symbols of what was built; takes a second

Exceptions stand in tests/tidy.allow, one a line: RULE PATH[:NAME] REASON. One that is no longer needed is an error too,
so the list can only shrink.
"""
import ast
import collections
import functools
import fnmatch
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
OBJ = pathlib.Path("build/obj/release")

# Who may use whom (DESIGN: the dependency law). A folder may always use itself.
LOW = {"base", "os", "tensor"}
PURE = {"worker/spec", "worker/format", "worker/plan"}
MID = LOW | {"ctl", "spec", "plan", "format"}
MOVERS = MID | {"device", "comm", "io"}
ENGINE = MOVERS | {"store", "session", "runner"}
LAW = {
    "worker/base": set(),
    "worker/os": {"base"},
    "worker/tensor": {"base"},
    "worker/ctl": LOW,
    "worker/spec": {"base", "tensor"},
    "worker/plan": {"base", "tensor", "spec"},
    "worker/format": {"base", "tensor", "spec"},
    "worker/device": MID,
    "worker/comm": MID | {"device"},
    "worker/io": MID | {"device"},
    "worker/store": MOVERS,
    "worker/session": MOVERS | {"store"},
    "worker/runner": MOVERS | {"store", "session"},
    "worker/query": ENGINE,
    "worker/ops": ENGINE,
    "worker": ENGINE | {"query", "ops"},
    "server": {"base", "tensor", "spec", "os", "ctl"},
    "api": {"base", "tensor", "spec", "os", "ctl", "server"},
    "api/cli": {"base", "tensor", "spec"},
    "api/c": ENGINE | {"query", "ops"},
    "api/c/examples": set(),
}
TABLES = ("format/formats.def", "store/stores.def")  # whose words spec and the coordinator take
LAYERS = {"base", "os", "tensor", "spec", "ctl", "plan", "format", "device", "comm", "io", "store", "session", "runner", "query", "ops",
          "server", "api"}
# The files of a folder from the bottom up: a file uses what stands below it, or in its own line without a circle. A stem stands for the
# files that only add words to it, too (journal: journal_read). Headers stand where the lowest of the files that they declare does.
ORDER = {
    "server": """
        service_clock principal trace takeover parts.h errdoc table webhook_address webhook_sign config gang_rendezvous doctor
        doctor_drivers
        loop
        courier descriptors
        events metrics unread
        journal_read
        journal_open
        journal
        journal_follow
        audit
        worker
        storage_speed
        devices storage
        tier
        resume_choice save_interval
        runs
        follower chain_steps
        gang
        lookup
        storage_probe
        state_dict_role
        state_dict_memory state_dict_record state_dict_slot_move state_dict_wish state_dict_owner
        state_dict_space state_dict_look
        state_dict_ring
        state_dict_slot
        state_dict_feed
        state_dict_use
        state_dict_replica
        device_copy
        device_image
        state_dict_await state_dict_make
        state_dict_lease state_dict_ask state_dict_view
        state_dict_image
        state_dict
        job_spec job_state_dict_op job_lane job_move
        verdict job job_uses job_refs
        job_tier
        catalogue
        resume lineage
        job_tell
        job_marks
        job_end
        job_queue
        job_await
        job_run
        job_take
        job_create job_ops job_drain
        job_all
        etcd
        cluster_forward cluster_probe cluster_images cluster_replicas cluster_withdraw cluster_take cluster_keys
        cluster_prune
        cluster_jobs
        cluster_nodes cluster
        webhook_queue webhook
        tracer
        chain_set chain
        flusher neighbours spread
        sweep
        policy_records policy policy_run
        storage_care trash_care state_dict_orphan state_dict_update state_dict_remote
        gauges doctor_report doctor_print
        server
        main""",
    "api": """
        url host problem listen accept range assets.h http api_impl.h
        coding
        form
        req
        request_id
        assets
        secrets
        tokens auth guard
        stream answers
        counts
        h_common
        relay
        forward
        claim
        h handlers.h
        routes
        dispatch
        api""",
}
# One function writes a state, by a table of legal moves: nothing else assigns it.
MOVES = {
    "server/job_move.c": re.compile(r"\bj(?:ob)?->(?:state|step)\s*=[^=]"),
    "server/state_dict_slot_move.c": re.compile(r"\b(?:sl|slot|state_dict_\w+\([^;]*\))->state\s*=[^=]"),
    "server/gang.c": re.compile(r"\bg(?:ang)?->state\s*=[^=]"),
}
CIRCLE_MAX = 2  # two files that need each other are one thought in two files; three are a knot
PRIVATE = re.compile(r"_impl$")
# spec, format and plan are pure: they may compute, not call the system.
PURE_HEADERS = set("""stdint.h stddef.h stdbool.h string.h limits.h inttypes.h stdlib.h stdio.h math.h float.h stdarg.h ctype.h
    endian.h errno.h assert.h stdatomic.h zlib.h zstd.h zstd_errors.h xxhash.h isa-l.h isa-l/crc.h isa-l/igzip_lib.h crc.h igzip_lib.h
    jansson.h""".split())
BANNED = {
    "strcpy strcat strncpy strncat sprintf vsprintf atoi atol atoll atof strtok gets alloca system popen rand srand mktemp "
    "tmpnam tempnam": (r"", "use base/str, base/buf or the os layer"),
    "malloc calloc realloc free strdup strndup asprintf vasprintf": (r"worker/base/", "memory comes from mem_* or an arena"),
    "json_dumpb json_dump_callback": (
        r"worker/base/jtext|api/cli/|tests/", "base/jtext.h: one form of numbers, and memory that runs out is noticed"),
    "json_dumps json_loads json_loadb json_loadf json_load_file json_load_callback": (
        r"worker/base/jtext|api/cli/|tests/", "base/jtext.h: jansson is not safe when memory runs out"),
    "clock_gettime gettimeofday time": (r"worker/base/clock|tests/", "base/clock.h has the clocks"),
    "fs_open_dir fs_open fs_stat fs_list fs_rename fs_rename_noreplace fs_exchange fs_unlink fs_mkdir fs_mkdirs fs_remove_tree fs_read_all "
    "fs_read_all_stat fs_open_root fs_check_root fs_free_bytes fs_direct_ok fs_in_memory fs_is_local fs_allocate fs_truncate fs_fsync": (
        r"worker/os/|worker/store/(posix|trash)|server/|api/|tests/", "store/store.h is the face of every storage"),
    "open openat openat2 creat rename renameat renameat2 fsync fdatasync fallocate posix_fallocate unlink unlinkat mkdirat "
    "mkdir rmdir shm_open shm_unlink": (r"worker/os/|server/|api/|tests/", "files are the os layer's"),
}
# libevent's table and epoll's part when a watched descriptor is closed, so one module owns all of them; timers have none (-1).
WATCHING = re.compile(r"\b(event_(?:assign|base_once|new)|bufferevent_\w+|evconnlistener_\w+)\s*\((?!(?:[^,;]+,){1,2}\s*-1\b)")
# A job's request is read once, by spec_read. Its JSON only tells whether two jobs wish the same.
REQUEST = re.compile(r"(?<!spec_wishes\(j)->request\b")
MAX = {"columns": 140, "function": 70, "file": 800}
IGNORED = (".git", "build", "compile_commands.json", "__pycache__", "*.egg-info", ".pytest_cache")  # as in .gitignore
NAMELESS = re.compile(r"/\* (What|Who|Whose|Where|Which|That one|The other) ")
UNFINISHED = re.compile("TO" + "DO|FIX" + r"ME|(?<!X)XX" + r"X(?!X)|HA" + r"CK\b")
FOREIGN = re.compile("/" + r"(?:home|work)/\w")


@functools.cache
def strip_code(text):
    """Blanks comments and literals, keeps line numbers and columns."""
    def blank(m):
        return "\n".join(" " * len(line) for line in m.group(0).split("\n"))
    return re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', blank, text, flags=re.S)


def tree():
    """Names of the tree's files. Asks no git: a tarball is no repository."""
    for folder, folders, files in os.walk(ROOT):
        folders[:], files = ([n for n in names if not any(fnmatch.fnmatch(n, i) for i in IGNORED)] for names in (folders, files))
        yield from (str(pathlib.Path(folder, n).relative_to(ROOT)) for n in files)


def width(line):
    return len(line.expandtabs(8))


def is_member(path, private):
    """Whether a file may include a private header: x_impl.h is for x*.c and x*.h beside it; named after its folder, for all there."""
    path, private = pathlib.Path(path), pathlib.Path(private)
    module, folder = private.stem.removesuffix("_impl"), private.parent.name
    return path.parent.name == folder and (module == folder or path.stem == module or path.stem.startswith(module + "_"))


def python_imports(module, is_package, parsed, modules):
    """The modules among `modules` that a module imports, wherever the import stands."""
    out = set()
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            out |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: None if is_package and node.level < 2 else is_package - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            out |= {f"{base}.{a.name}" if f"{base}.{a.name}" in modules else base for a in node.names}
    return (out & set(modules)) - {module}


def python_path(uses, start):
    """A shortest way along imports from a module back to itself, without the last step; None if there is none."""
    ways = [[start]]
    seen = set()
    for way in ways:
        for m in sorted(uses[way[-1]]):
            if m == start:
                return way
            if m not in seen:
                seen.add(m)
                ways.append([*way, m])
    return None


def python_unused(parsed):
    """Names that are imported, and stand nowhere else (nor in an annotation that is text)."""
    names = {n.id for n in ast.walk(parsed) if isinstance(n, ast.Name)}
    for node in ast.walk(parsed):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.update(re.findall(r"\w+", node.value))
    imports = [n for n in ast.walk(parsed) if isinstance(n, (ast.Import, ast.ImportFrom)) and getattr(n, "module", "") != "__future__"]
    return sorted({(a.asname or a.name).split(".")[0] for n in imports for a in n.names} - names)


def circles(uses):
    """The strongly connected components of more than one node (Tarjan)."""
    number, low, stack, out = {}, {}, [], []

    def visit(n):
        number[n] = low[n] = len(number)
        stack.append(n)
        for m in sorted(uses.get(n, ())):
            if m not in number:
                visit(m)
            low[n] = min(low[n], low[m]) if m in stack else low[n]
        if low[n] == number[n]:
            at = stack.index(n)
            if len(stack) - at > 1:
                out.append(sorted(stack[at:]))
            del stack[at:]

    for n in sorted(uses):
        if n not in number:
            visit(n)
    return out


def order_of(folder, names):
    """Which line of ORDER each file of a folder stands in; None: in none."""
    lines = [line.split() for line in ORDER[folder].strip().split("\n")]
    at = {stem: i for i, line in enumerate(lines) for stem in line}

    def source(stem):
        words = stem.split("_")
        return next((at[s] for s in ("_".join(words[:k]) for k in range(len(words), 0, -1)) if s in at), None)

    def header(stem):
        stem = PRIVATE.sub("", stem)
        own = {pathlib.Path(n).stem for n in names if n.endswith(".h")} - {stem}
        declared = [s for s in (pathlib.Path(n).stem for n in names if n.endswith(".c"))
                    if s == stem or (s.startswith(stem + "_") and not any(s == o or s.startswith(o + "_") for o in own))]
        ranks = [source(s) for s in declared]
        return min((r for r in ranks if r is not None), default=None)

    return {n: at.get(pathlib.Path(n).name, (header if n.endswith(".h") else source)(pathlib.Path(n).stem)) for n in names}


class Tidy:
    def __init__(self):
        self.found = []
        self.text = {}
        for n in tree():
            if n.startswith("tests/fixtures/torch-"):
                continue
            try:
                self.text[n] = (ROOT / n).read_text()
            except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
                continue
        self.c = sorted(n for n in self.text if n.endswith((".c", ".h")))
        self.ours = [n for n in self.c if n.startswith(("worker/", "server/", "api/"))]

    def say(self, rule, path, what, line=None, name=None):
        self.found.append((rule, path if name is None else f"{path}:{name}", f"{path}{f':{line}' if line else ''}: {what}"))

    def includes(self):
        for n in self.ours:
            home = str(pathlib.Path(n).parent)
            if home not in LAW:
                self.say("layer", n, "is in a folder that the dependency law does not know")
                continue
            own = home.split("/")[-1]
            top_comment = self.text[n].split("*/")[0]
            if n.endswith(".h") and not n.endswith("_impl.h") and re.search(r"nobody else includes|\bc share[:;,.]", top_comment):
                self.say("impl", n, "a private header's name ends in _impl.h")
            for i, line in enumerate(self.text[n].split("\n"), 1):
                m = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
                if not m:
                    continue
                what = m.group(2)
                if m.group(1) == "<":
                    if home in PURE and what not in PURE_HEADERS:
                        self.say("include", n, f"<{what}>: {home} is pure and calls no system", i, what)
                    continue
                if what.endswith("_impl.h") and not is_member(n, what):
                    self.say("impl", n, f'"{what}" is private to its module', i, what)
                top = what.split("/")[0]
                if what.startswith(home + "/"):
                    continue
                if what.startswith("api/cli/"):
                    if home != "api/cli":
                        self.say("include", n, f'"{what}": only dcpctl uses api/cli', i, what)
                elif what.endswith("assets.h") and top == "api" and home in ("server", "api"):
                    continue
                elif n == "server/main.c" and top == "api":  # the program puts the parts together
                    continue
                elif top in LAYERS and top != own and top not in LAW[home] and what not in TABLES:
                    self.say("include", n, f'"{what}": {home} may use {", ".join(sorted(LAW[home])) or "nothing"} only', i, what)
                if pathlib.Path(what).stem == "main":
                    self.say("include", n, "nobody includes a main", i, what)

    def symbols(self):
        """A global name begins with its file's or folder's name, or a part of it (dcp_meta_write.c: dcp_meta_); or it is a
        verb of the layer above, on this file's matter (verify.c: job_verify)."""
        sources = [n for n in self.ours if n.endswith(".c") and pathlib.Path(n).name != "main.c"]
        objects = {str((OBJ / n).with_suffix(".o")): n for n in sources if (ROOT / OBJ / n).with_suffix(".o").exists()}
        if not objects:
            return
        out = subprocess.run(["nm", "-A", "-g", "--defined-only", *objects], cwd=ROOT, capture_output=True, text=True).stdout
        for line in out.splitlines():
            obj, rest = line.split(":", 1)
            name, n = rest.split()[-1], objects[obj]
            words = pathlib.Path(n).stem.split("_")
            prefixes = ["_".join(words[i:k]) for i in range(len(words)) for k in range(i + 1, len(words) + 1)]
            prefixes.append(pathlib.Path(n).parent.name)
            prefixes += [x[:-1] for x in prefixes if x.endswith("s")] + [x + "s" for x in prefixes]
            if not name.endswith("_" + "_".join(words)) and not any(name == p or name.startswith(p + "_") for p in prefixes):
                self.say("prefix", n, f"global {name} does not begin with {pathlib.Path(n).stem}_", None, name)

    def unused(self):
        """A global has a user in another object of the product; enumerators, macros and struct tags stand in a second place. An enum's
        first word may be unused: it is what a zero means."""
        objects = {str((OBJ / n).with_suffix(".o")): n for n in self.ours if n.endswith(".c")}
        objects = {o: n for o, n in objects.items() if (ROOT / o).exists()}
        out = subprocess.run(["nm", "-A", "-g", *objects], cwd=ROOT, capture_output=True, text=True).stdout if objects else ""
        symbols = [(objects[o], *rest.split()[-2:]) for o, rest in (line.split(":", 1) for line in out.splitlines())]
        elsewhere = {name for _, kind, name in symbols if kind == "U"} | {"main"}
        words = {n: collections.Counter(re.findall(r"\w+", strip_code(self.text[n]))) for n in self.c}
        tables = [collections.Counter(re.findall(r"\w+", t)) for n, t in self.text.items() if n.endswith(".def")]
        tests, every = collections.Counter(), collections.Counter()
        for n in self.c:
            (tests if n.startswith("tests/") else every).update(words[n])
        for table in [*tables, tests]:
            every.update(table)
        for n, kind, name in symbols:
            here = words[n][name] > 1
            if kind != "U" and name not in elsewhere and not (here and tests[name]):
                why = "only in its own file: make it static" if here else "by tests only" if tests[name] else "nowhere"
                self.say("unused", n, f"{name} is used {why}", None, name)
        pasted = tuple({p for n in self.ours for p in re.findall(r"(\w+_)##", self.text[n])})
        for n in self.ours:
            code = strip_code(self.text[n])
            names = re.findall(r"^\s*#\s*define\s+(\w+)", code, re.M) + re.findall(r"\bstruct\s+(\w+)\s*\{", code)
            for tag, body in re.findall(r"\benum\b\s*(\w*)[^;{}()]*\{([^}]*)\}", code):
                body = re.sub(r"\([^()]*\)|^\s*#.*", "", body, flags=re.M)
                names += re.findall(r"(?:^|,)\s*([A-Za-z_]\w*)", body)[1 if tag else 0:]
            for name in names:
                if every[name] == 1 and not name.startswith(pasted):
                    self.say("unused", n, f"{name} is used nowhere", None, name)

    def order(self):
        """Files of server/ and api/ stand in the order of ORDER, and no more than CIRCLE_MAX of them use each other in a circle; by the
        symbols of what was built, and by what they include."""
        for folder in ORDER:
            names = [n for n in self.ours if str(pathlib.Path(n).parent) == folder]
            at = order_of(folder, names)
            for n in names:
                if at[n] is None:
                    self.say("order", n, "stands in no line of ORDER (tests/tidy.py)")
            uses = {n: set() for n in names}
            for n in names:
                own = {folder + "/" + m for m in re.findall(r'#\s*include\s*"%s/([^"/]+)"' % folder, self.text[n])}
                uses[n] |= own & set(names)
            said = {(n, m): "includes it" for n in names for m in uses[n]}
            for n, m, symbol in self.symbol_edges([n for n in names if n.endswith(".c")]):
                uses[n].add(m)
                said.setdefault((n, m), f"uses {symbol}()")
            for (n, m), why in sorted(said.items()):
                if None not in (at[n], at[m]) and at[m] > at[n]:
                    self.say("order", n, f"stands below {m}, but {why}", None, pathlib.Path(m).name)
            for knot in circles(uses):
                if len(knot) > CIRCLE_MAX:
                    self.say("circle", knot[0], f"{len(knot)} files use each other in a circle: {' '.join(knot)}")

    def moves(self):
        for home, pattern in MOVES.items():
            for n in (n for n in self.ours if n.startswith("server/")):
                found = list(pattern.finditer(strip_code(self.text[n])))
                if n == "server/gang.c" == home:
                    found = found[1:]  # gang_move's own
                for m in found if n != home or n == "server/gang.c" else ():
                    line = self.text[n].count("\n", 0, m.start()) + 1
                    self.say("move", n, f"{m.group(0).strip(' =')} is {home}'s to write", line, m.group(0))

    def symbol_edges(self, sources):
        """(user, definer, symbol) for the files among `sources` that were built."""
        objects = {str((OBJ / n).with_suffix(".o")): n for n in sources if (ROOT / OBJ / n).with_suffix(".o").exists()}
        if not objects:
            return []
        out = subprocess.run(["nm", "-A", "-g", *objects], cwd=ROOT, capture_output=True, text=True).stdout
        rows = [(objects[obj], *rest.split()[-2:]) for obj, rest in (line.split(":", 1) for line in out.splitlines())]
        home = {symbol: n for n, kind, symbol in rows if kind not in "UwWvV"}
        return [(n, home[s], s) for n, kind, s in rows if kind == "U" and home.get(s, n) != n]

    def calls(self):
        for n in self.c:
            code = strip_code(self.text[n])
            for names, (where_ok, why) in BANNED.items():
                if where_ok and re.match(where_ok, n) or n.startswith("tests/") and "malloc" in names:
                    continue
                for m in re.finditer(r"(?<![\w.>])(%s)\s*\(" % "|".join(names.split()), code):
                    self.say("call", n, f"{m.group(1)}(): {why}", code.count("\n", 0, m.start()) + 1, m.group(1))
            for m in WATCHING.finditer(code) if n in self.ours and n != "worker/os/watch.c" else ():
                self.say("call", n, f"{m.group(1)}(): os/watch.h watches descriptors", code.count("\n", 0, m.start()) + 1, m.group(1))
            for m in REQUEST.finditer(code) if n.startswith("worker/") and n != "worker/main.c" else ():
                self.say("call", n, "the request's JSON is spec/'s: job->spec has it as C", code.count("\n", 0, m.start()) + 1, "request")

    def form(self):
        for n in self.c:
            text = self.text[n]
            lines = text.split("\n")
            if len(lines) - 1 > MAX["file"]:
                self.say("file", n, f"{len(lines) - 1} lines, at most {MAX['file']}")
            if not text.lstrip().startswith("/*"):
                self.say("comment", n, "does not begin with a comment that says what it is for")
            start = None
            for i, line in enumerate(lines, 1):
                if width(line) > MAX["columns"]:
                    self.say("columns", n, f"{width(line)} columns, at most {MAX['columns']}", i)
                if NAMELESS.search(line):
                    self.say("subject", n, "the comment's subject has no name", i)
                if line != line.rstrip():
                    self.say("space", n, "white space at the end of the line", i)
                if line == "{":
                    start = i
                elif line.startswith("}") and start:
                    if i - start - 1 > MAX["function"]:
                        head = next((x for x in reversed(lines[: start - 1]) if x and not x[0].isspace()), "?")
                        name = (re.search(r"(\w+)\s*\(", head) or re.search(r"(\w+)", head)).group(1)
                        self.say("function", n, f"{name}() has {i - start - 1} lines, at most {MAX['function']}", start, name)
                    start = None
        for n, text in self.text.items():
            for i, line in enumerate(text.split("\n"), 1):
                if UNFINISHED.search(line) and not n.endswith((".svg", ".json")):
                    self.say("unfinished", n, line.strip()[:80], i)
                if FOREIGN.search(line) and n != "tests/tidy.py":
                    self.say("path", n, "names a folder of one machine", i)
                if n.endswith((".js", ".css", ".py", ".sh")) and not n.startswith(("tests/lib/check_ckpt.py", "tests/fixtures/")):
                    if len(line) > MAX["columns"]:
                        self.say("columns", n, f"{len(line)} columns", i)

    def tests(self):
        units = {n: t for n, t in self.text.items() if n.startswith("tests/unit/")}
        for n in self.ours:
            p = pathlib.Path(n)
            if p.suffix != ".c" or p.name == "main.c":
                continue
            words = p.stem.split("_")
            names = ["_".join(words[:k]) for k in range(1, len(words) + 1)] + [p.parent.name]
            header = [f'"{p.parent.name}/{x}.h"' for x in names] + [f'"{p.parent}/{x}.h"' for x in names]
            if any(f"tests/unit/test_{x}.c" in units for x in names) or any(h in t for t in units.values() for h in header):
                continue
            self.say("untested", n, "no unit test includes its header")

    def contract(self):
        """openapi.yaml is YAML: a colon or a quote too many in a description breaks its readers, not ours."""
        try:
            import yaml  # python3-yaml, of `make deps-test`
        except ImportError:
            return
        try:
            yaml.load(self.text["api/openapi.yaml"], getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except yaml.YAMLError as e:
            self.say("yaml", "api/openapi.yaml", str(e.problem), e.problem_mark.line + 1)

    def names(self):
        """pytest imports test files by their bare name: two of one name are an error, or one that is not run."""
        seen = {}
        for path in sorted(ROOT.glob("tests/*/test_*.py")):
            other = seen.setdefault(path.name, path)
            if other != path:
                self.say("names", str(path.relative_to(ROOT)), f"has the name of {other.relative_to(ROOT)}")

    def python(self):
        """The package's modules import each other without a circle, imports within functions counted; and import nothing for nothing."""
        root = pathlib.Path("api/python")
        paths = {n: pathlib.Path(n).relative_to(root) for n in self.text if n.startswith("api/python/dcpd/") and n.endswith(".py")}
        modules = {".".join(p.with_suffix("").parts).removesuffix(".__init__"): n for n, p in paths.items()}
        uses = {m: python_imports(m, n.endswith("__init__.py"), ast.parse(self.text[n]), modules) for m, n in modules.items()}
        for m, n in sorted(modules.items()):
            for name in [] if n.endswith("__init__.py") else python_unused(ast.parse(self.text[n])):
                self.say("import", n, f"{name} is imported and not used", None, name)
            path = python_path(uses, m)
            if path and m == min(path):
                self.say("circle", n, " → ".join([*path, m]))

    def codes(self):
        text = self.text.get("worker/base/err.def", "")
        codes = [c.lower() for c in re.findall(r"^X\((\w+),", text, re.M)]
        seen = set()
        for n, t in self.text.items():
            if n.startswith("tests/") and not n.startswith(("tests/lib/", "tests/tidy")):
                seen.update(w.lower() for w in re.findall(r"(?:ERR_|\b[CT]_ERR\()([A-Z_]+)\b", t))
                seen.update(re.findall(r"[\"']([a-z_]+)[\"']", t))
        for c in codes:
            if c not in seen:
                self.say("code", "worker/base/err.def", f"no test produces {c}", None, c)
        api = self.text.get("api/openapi.yaml")
        if api is None:
            return
        listed = set()
        for block in re.findall(r"enum:\s*\[([^\]]*)\]|enum:\s*\n((?:\s+-\s+\w+\s*\n)+)", api):
            words = set(re.findall(r"\w+", block[0] or block[1]))
            if "checkpoint_exists" in words:
                listed |= words
        for c in sorted(set(codes) ^ listed):
            self.say("catalogue", "api/openapi.yaml", f"{c} is in {'err.def' if c in codes else 'openapi.yaml'} only", None, c)


def main():
    t = Tidy()
    for rule in (t.includes, t.symbols, t.order, t.moves, t.unused, t.calls, t.form, t.tests, t.contract, t.names, t.python, t.codes):
        rule()
    allowed = {}
    path = ROOT / "tests/tidy.allow"
    for line in path.read_text().splitlines() if path.exists() else []:
        if line.strip() and not line.startswith("#"):
            rule, where, reason = line.split(None, 2)
            allowed[rule, where] = reason
    used, bad = set(), 0
    for rule, where, what in t.found:
        keys = [(rule, where), (rule, where.split(":")[0]), (rule, str(pathlib.Path(where.split(":")[0]).parent) + "/")]
        key = next((k for k in keys if k in allowed), None)
        if key:
            used.add(key)
            continue
        bad += 1
        print(f"{what} [{rule}]")
    for rule, where in allowed.keys() - used:
        if not os.environ.get("TIDY_PARTIAL"):
            bad += 1
            print(f"tests/tidy.allow: '{rule} {where}' is no longer needed")
    print(f"tidy: {len(t.c)} C files, {len(t.text)} files, {bad} violations, {len(used)} exceptions")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
