#!/usr/bin/env python3
"""wheel.py BIN FOLDER: makes the wheel with the programs of BIN and the libraries they need inside, and prints its path.
wheel.py --folder BIN FOLDER: lays programs, libraries, licences and the list of all in FOLDER, as an image of another system needs them.

manylinux's rules ask for every library beside the C library to travel along: hosts differ in which they have, and in which versions. They
are copied from this Debian with their licences, and found by the programs before those of the host (DT_RPATH, which LD_LIBRARY_PATH cannot
override). The platform tag is the newest symbol version of the C library that anything inside asks for: the wheel does not install on an
older one. (auditwheel would say 2_37 for 2_36: it takes zlib for the host's, whose symbol versions it counts.)

A wheel gets no updates of its libraries from the host; packages and images do. TLS looks for authorities where Debian has them.
"""
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
TOP = HERE.parent
sys.path[:0] = [str(HERE), str(TOP / "api/python")]

import backend  # noqa: E402
import sbom  # noqa: E402

PROGRAMS = ("dcpd", "dcpd-worker", "dcpctl")
COMMON = pathlib.Path("/usr/share/common-licenses")


def oldest_libc(files):
    """The version of the C library that these files need at least, as (major, minor)."""
    names = sbom.output("objdump", "-T", *files)
    return max(tuple(map(int, v)) for v in re.findall(r"\(?GLIBC_(\d+)\.(\d+)", names))


def gather(folder, bin_folder):
    """Copies programs and libraries into folder, as they lie in the wheel; returns the libraries' packages."""
    lib = folder / "lib"
    lib.mkdir()
    libraries = sbom.libraries([bin_folder / p for p in PROGRAMS])
    packages = sbom.packages_of(libraries)
    for path, package in packages.items():
        if package["name"] != "libc6":
            shutil.copy(path, lib / os.path.basename(path))
    for p in PROGRAMS:
        shutil.copy(bin_folder / p, folder / p)
        subprocess.run(["strip", folder / p], check=True)
    for rpath, files in (("$ORIGIN/lib", [folder / p for p in PROGRAMS]), ("$ORIGIN", sorted(lib.iterdir()))):
        subprocess.run(["patchelf", "--force-rpath", "--set-rpath", rpath, *files], check=True)
    return [p for p in packages.values() if p["name"] != "libc6"]


def licences(packages):
    """What goes along: the copyright file of each package, and the texts that those refer to."""
    notes = {"licenses/LICENCES.md": (TOP / "LICENCES.md").read_bytes()}
    for name in sorted({p["name"] for p in packages}):
        notes[f"licenses/{name}/copyright"] = sbom.copyright_of(name)
    for name in sorted(set(re.findall(rb"/usr/share/common-licenses/([A-Za-z0-9.-]*[A-Za-z0-9])", b"".join(notes.values())))):
        if (COMMON / name.decode()).exists():
            notes[f"licenses/common/{name.decode()}"] = (COMMON / name.decode()).read_bytes()
    return notes


def lay(folder, bin_folder):
    """Programs and libraries in folder; returns the notes that go along with them."""
    packages = gather(folder, bin_folder)
    return {**licences(packages), "sboms/dcpd.cdx.json": sbom.document("dcpd", packages).encode()}


def main(bin_folder, directory):
    with tempfile.TemporaryDirectory() as work:
        folder = pathlib.Path(work)
        notes = lay(folder, pathlib.Path(bin_folder))
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        major, minor = oldest_libc(files)
        name = backend.build_with_programs(directory, {str(p.relative_to(folder)): p.read_bytes() for p in files},
                                           f"manylinux_{major}_{minor}_{platform.machine()}", notes)
    print(os.path.join(directory, name))


def main_folder(bin_folder, directory):
    folder = pathlib.Path(directory)
    folder.mkdir(parents=True)
    for name, text in lay(folder, pathlib.Path(bin_folder)).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text)


if __name__ == "__main__":
    main_folder(*sys.argv[2:]) if sys.argv[1:2] == ["--folder"] else main(*sys.argv[1:])
