#!/usr/bin/env python3
"""sbom.py NAME FILE...: what the programs FILE... are linked with, as a bill of materials (CycloneDX 1.5, JSON) on standard output.
sbom.py NAME -: the same of a list of packages on standard input, one a line: name, version and architecture with tabs between, as
`dpkg-query -W -f '${Package}\\t${Version}\\t${Architecture}\\n'` prints them in an image.

Debian's package database knows name, version and licence of everything that is linked; dcpd's Python package depends on nothing. So the
bill needs no scanner, and lists what is there and not what a scanner guesses.
"""
import functools
import json
import pathlib
import re
import subprocess
import sys

TOP = pathlib.Path(__file__).resolve().parents[1]
DOC = pathlib.Path("/usr/share/doc")


def output(*argv, check=True):
    return subprocess.run([str(a) for a in argv], check=check, text=True, stdout=subprocess.PIPE, stderr=None if check else
                          subprocess.DEVNULL).stdout


def libraries(programs):
    """Paths of the shared libraries that the programs load, the C library's among them."""
    text = output("ldd", *programs)
    missing = re.findall(r"(\S+) => not found", text)
    if missing:
        sys.exit(f"sbom: libraries are not found: {' '.join(missing)}")
    return sorted(set(re.findall(r"(?:=> )?(/\S+\.so\S*) \(0x", text)))


def packages_of(paths):
    """path → {"name", "version", "arch"} of the Debian package that it belongs to. dpkg knows files by the path they were packed under,
    so that each is asked for below / and below /usr."""
    bare = {re.sub(r"^/usr(?=/)", "", p): p for p in paths}
    bare.update({f"/lib64/{p.rsplit('/', 1)[1]}": p for p in paths if "/ld-linux" in p})
    owner = {}
    for line in output("dpkg-query", "-S", *bare, *(f"/usr{p}" for p in bare), check=False).splitlines():
        name, path = line.split(": ", 1)
        owner[bare[re.sub(r"^/usr(?=/)", "", path)]] = name
    lost = sorted(set(paths) - set(owner))
    if lost:
        sys.exit(f"sbom: no Debian package has {' '.join(lost)}")
    facts = {}
    form = "${binary:Package}\t${Package}\t${Version}\t${Architecture}\n"
    for line in output("dpkg-query", "-W", "-f", form, *sorted(set(owner.values()))).splitlines():
        full, name, version, arch = line.split("\t")
        facts[full] = facts[name] = {"name": name, "version": version, "arch": arch}
    return {p: facts[owner[p]] for p in paths}


@functools.lru_cache(maxsize=None)
def copyright_of(package):
    path = DOC / package / "copyright"
    return path.read_bytes() if path.exists() else b""


def _component(p):
    """One package. Its licences are the names in its copyright file, where that has Debian's machine-readable form."""
    found = re.findall(r"^License: *([^\s,]+)", copyright_of(p["name"]).decode(errors="replace"), re.M)
    return {"type": "library", "name": p["name"], "version": p["version"],
            "purl": f"pkg:deb/debian/{p['name']}@{p['version']}?arch={p['arch']}",
            **({"licenses": [{"license": {"name": n}} for n in sorted(set(found))]} if found else {})}


def document(name, packages):
    """The bill as text; the same packages make the same text."""
    unique = {(p["name"], p["arch"]): p for p in packages}
    version = (TOP / "VERSION").read_text().strip()
    return json.dumps({"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
                       "metadata": {"component": {"type": "application", "name": name, "version": version}},
                       "components": [_component(unique[k]) for k in sorted(unique)]}, indent=1) + "\n"


def main(name, *files):
    if files == ("-",):
        packages = [dict(zip(("name", "version", "arch"), line.rstrip("\n").split("\t"))) for line in sys.stdin]
    else:
        packages = packages_of(libraries(files)).values()
    sys.stdout.write(document(name, packages))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
