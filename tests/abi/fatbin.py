"""fatbin.py FATBIN PTX ARCH…: has the fat binary this PTX, and machine code of its kernels for each architecture? Needs no toolkit."""
import pathlib
import re
import struct
import sys

PTX, ELF = 1, 2


def images(data):
    """(kind, architecture, bytes) of each image."""
    magic, _, head, n = struct.unpack_from("<IHHQ", data)
    assert magic == 0xBA55ED50 and head + n == len(data), "no fat binary, or one with more behind it"
    at = head
    while at < len(data):
        kind, _, head, n = struct.unpack_from("<HHIQ", data, at)
        arch, = struct.unpack_from("<I", data, at + 28)
        yield kind, arch, data[at + head:at + head + n]
        at += head + n


def words_of(ptx):
    """Without comments: fatbinary leaves them out."""
    return re.sub(rb"//[^\n]*", b"", ptx).split()


def main():
    found = list(images(pathlib.Path(sys.argv[1]).read_bytes()))
    ptx, wanted = pathlib.Path(sys.argv[2]).read_bytes(), [int(a) for a in sys.argv[3:]]
    kernels = re.findall(rb"\.visible \.entry (\w+)\(", ptx)
    assert kernels, f"{sys.argv[2]} has no kernel"
    words = [words_of(b.rstrip(b"\0")) for kind, arch, b in found if kind == PTX and arch == wanted[0]]
    assert words == [words_of(ptx)], f"its PTX is not {sys.argv[2]}"
    code = {arch: b for kind, arch, b in found if kind == ELF}
    assert sorted(code) == sorted(wanted) and len(found) == len(wanted) + 1, [f[:2] for f in found]
    for arch, b in code.items():
        assert b[:4] == b"\x7fELF", arch
        for kernel in kernels:
            assert b".text." + kernel + b"\0" in b, (arch, kernel)
    print("ok fatbin: PTX and " + ", ".join(f"sm_{a}" for a in sorted(code)))


main()
