"""worker/spec/kinds.def and fields.def as Python: what tests compare the contract, the help and the package's keywords with."""
import pathlib
import re
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
SPEC = ROOT / "worker/spec"


def calls(text, *names):
    """The arguments of NAME(…) in C: strings joined and unquoted, the rest as it stands."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    for m in re.finditer(rf"^({'|'.join(names)})\(", text, re.M):
        args, now, depth, at = [], "", 0, m.end()
        while depth >= 0:
            string = re.match(r'"(?:\\.|[^"\\])*"', text[at:])
            piece = string[0] if string else text[at]
            at += len(piece)
            depth += (piece == "(") - (piece == ")")
            if piece == "," and depth == 0 or depth < 0:
                args.append(now)
                now = ""
            else:
                now += piece
        yield m[1], [value(a) for a in args]


def value(arg):
    strings = re.findall(r'"((?:\\.|[^"\\])*)"', arg)
    if strings and not re.sub(r'"(?:\\.|[^"\\])*"', "", arg).strip():
        return "".join(strings).replace('\\"', '"')
    return None if arg.strip() == "NULL" else arg.strip()


class Kind(NamedTuple):
    name: str
    number: int
    reads: str
    writes: str
    traits: str
    arguments: str
    what: str

    def refs(self):
        """Key → what the reference may be, of each object that names something."""
        if "KIND_COMPARES" in self.traits:
            return {"a": self.reads, "b": self.reads}
        base = "REF_CHECKPOINT | REF_STATE_DICT" if "KIND_HAS_BASE" in self.traits else "0"
        return {k: v for k, v in (("source", self.reads), ("base", base), ("target", self.writes)) if v != "0"}


class Field(NamedTuple):
    member: str
    place: str   # "", "source", "target", "a", "b", "base", "options", "optimizer"
    key: str
    kinds: frozenset
    type: str
    fallback: str
    option: str
    value: str
    what: str

    def words(self):
        m = re.match(r"WORD_OF\((\w+)\)", self.type)
        return WORDS[m[1]] if m else None


DEF = (SPEC / "fields.def").read_text()
KINDS = {a[1]: Kind(a[1], int(a[2]), a[4], a[5], a[6], a[8], a[9]) for _, a in calls((SPEC / "kinds.def").read_text(), "KIND")}
WORDS = {a[0]: re.findall(r"WORD\(\w+, (\w+)\)", a[1]) for _, a in calls(DEF, "WORDS") if len(a) > 1}
WORDS["target_format"] = [a[1] for _, a in calls((ROOT / "worker/format/formats.def").read_text(), "TARGET", "FILE_TARGET")]
SETS = dict(re.findall(r"^#define ([A-Z]+) (.*K\(.*|.*\bJOB_KIND_COUNT\b.*|\([A-Z]+ \|.*)$", (SPEC / "fields.c").read_text(), re.M))


def kinds_of(text):
    if "JOB_KIND_COUNT" in text:
        return frozenset(KINDS)
    out = {m.lower() for m in re.findall(r"\bK\((\w+)\)", text)}
    for name in re.findall(r"\b[A-Z]{2,}\b", re.sub(r"K\(\w+\)", "", text)):
        out |= kinds_of(SETS[name])
    return frozenset(out)


FIELDS = [Field(a[0], a[2].removeprefix("AT_").lower().replace("root", ""), a[3], kinds_of(a[4]), *a[5:])
          for _, a in calls(DEF, "FIELD", "FIELD_ALSO") if len(a) > 2]


def of(kind, place=None):
    return [f for f in FIELDS if kind in f.kinds and (place is None or f.place == place)]


def options(kind=None):
    """The rows that have an option of dcpctl, each option once."""
    found = {}
    for f in FIELDS:
        if f.option and (kind is None or kind in f.kinds):
            found.setdefault(f.option, f)
    return list(found.values())


def what(f):
    return f.what if " " in f.what else re.sub(r'"\s*\\?\s*"', "", re.search(
        rf'^#define {f.what} "(.*?)"\n\n', (SPEC / "fields.c").read_text(), re.S | re.M)[1]).replace("\\\n", "")


def commands():
    """Command → options, of every command: those of commands.c's table, and a job kind each."""
    rows = re.search(r"commands\[\] = \{(.*?)\n\};", (ROOT / "api/cli/commands.c").read_text(), re.S)[1]
    found = {}
    for m in re.finditer(r'\{ "(\w+)",\s*"(?:[^"\\]|\\.)*",\s*"([^"]*)",', rows):
        found[m[1]] = re.findall(r"([a-z-]+)=?", m[2])
    for name, kind in KINDS.items():
        if "KIND_REMOVES" not in kind.traits:
            found["cp" if name == "replicate" else name] = ["detach", "dry-run"] + [f.option for f in options(name)]
    return found
