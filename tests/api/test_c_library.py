"""The C library as `make install` gives it: headers alone in C and C++, pkg-config, what is exported, the example; and what its functions
promise: PyTorch's values, every byte compared, errors with file and offset, threads, a host process that stays as it was."""
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import threading

import libdcp
import pytest

import dcpd as lib

FIXTURES = pathlib.Path(__file__).resolve().parents[1] / "fixtures"
CASES = sorted("/".join(p.parts[-3:-1]) for p in FIXTURES.glob("torch-*/*/checkpoint"))
C11 = ["gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic"]
CXX17 = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-pedantic"]


def make(*args):
    return subprocess.run(["make", "-C", lib.ROOT, *args], check=True, capture_output=True, text=True).stdout


class Installed:
    def __init__(self, root):
        self.root, self.prefix = root, root / "usr/local"
        self.env = {**os.environ, "PKG_CONFIG_SYSROOT_DIR": str(root), "PKG_CONFIG_LIBDIR": str(self.prefix / "lib/pkgconfig"),
                    "LD_LIBRARY_PATH": str(self.prefix / "lib")}

    def flags(self, *args):
        return subprocess.run(["pkg-config", "--cflags", "--libs", *args, "dcp"], env=self.env, check=True, capture_output=True,
                              text=True).stdout.split()

    def build(self, source, out, static=False, compiler=C11):
        """As the example's comment says."""
        flags = [f.replace("-ldcp", "-l:libdcp.a") for f in self.flags("--static")] if static else self.flags()
        r = subprocess.run([*compiler, "-o", out, source, *flags, "-pthread"], capture_output=True, text=True)
        assert r.returncode == 0, r.stderr
        return out

    def run(self, program, *args):
        return subprocess.run([program, *map(str, args)], env=self.env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    root = tmp_path_factory.mktemp("installed")
    make("-s", "install", f"DESTDIR={root}", "PREFIX=/usr/local")
    return Installed(root)


def expected(case):
    """{FQN up to a NUL: (dtype, shape, bytes)}, as PyTorch said when it wrote the fixture."""
    doc = json.loads((FIXTURES / case / "expected.json").read_text())
    data = (FIXTURES / case / "expected.safetensors").read_bytes()
    n = struct.unpack("<Q", data[:8])[0]
    spans = {k: v["data_offsets"] for k, v in json.loads(data[8:8 + n]).items() if k != "__metadata__"}
    out = {}
    for fqn, t in doc["tensors"].items():
        begin, end = spans[t.get("safetensors_name", fqn)]
        out[fqn.split("\0")[0]] = t["dtype"], tuple(t["shape"]), data[8 + n + begin:8 + n + end]
    return out


def box_of(whole, shape, item, offsets, sizes):
    """The box's bytes, by elements one at a time."""
    out = bytearray()

    def walk(d, at):
        if d == len(shape):
            out.extend(whole[at * item:(at + 1) * item])
            return
        for i in range(offsets[d], offsets[d] + sizes[d]):
            walk(d + 1, at * shape[d] + i)

    walk(0, 0)
    return bytes(out)


def copy_of(case, tmp_path, name="copy"):
    shutil.copytree(FIXTURES / case / "checkpoint", tmp_path / name)
    return tmp_path / name


# ---------------------------------------------------------------------------------------------------------- installed


@pytest.mark.long
def test_headers_compile_alone(installed, tmp_path):
    headers = sorted((installed.prefix / "include").rglob("*.h"))
    assert [h.name for h in headers] == ["dcp.h"]
    for h in headers:
        for compiler, suffix in ((C11, "c"), (CXX17, "cpp")):
            source = tmp_path / f"one.{suffix}"
            source.write_text(f'#include "{h}"\n#include "{h}"\nint main(void) {{ return dcp_version() == 0; }}\n')
            r = subprocess.run([*compiler, "-c", source, "-o", tmp_path / "one.o"], capture_output=True, text=True)
            assert r.returncode == 0, r.stderr
            names = subprocess.run(["nm", "-u", tmp_path / "one.o"], capture_output=True, text=True, check=True).stdout.split()
            assert "dcp_version" in names  # C linkage in C++ too


def declared():
    text = (lib.ROOT / "api/c/dcp.h").read_text()
    return set(re.findall(r"^DCP_API .*?\b(dcp_\w+)\(", text, re.M))


def test_exports_are_the_header(installed):
    def symbols(*args):
        out = subprocess.run(["nm", "--defined-only", *args], capture_output=True, text=True, check=True).stdout
        return {line.split()[-1].split("@")[0] for line in out.splitlines() if len(line.split()) == 3}

    so = symbols("-D", installed.prefix / "lib/libdcp.so")
    assert all(s.startswith("dcp_") for s in so) and so - {"dcp_0"} == declared()
    assert symbols("-g", installed.prefix / "lib/libdcp.a") == declared()
    dynamic = subprocess.run(["readelf", "-d", installed.prefix / "lib/libdcp.so.0"], capture_output=True, text=True, check=True).stdout
    assert "[libdcp.so.0]" in dynamic and "TEXTREL" not in dynamic


@pytest.mark.long
def test_install_builds_nothing(tmp_path):
    def built():
        return {p: p.stat().st_mtime_ns for p in libdcp.BIN.parent.rglob("*") if p.is_file() and p.parent.name in ("bin", "lib", "static")}

    make("-s", "all")
    before = built()
    assert "CC " not in make("install", f"DESTDIR={tmp_path}") and built() == before


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("compiler", [C11, CXX17])
def test_example(installed, tmp_path, static, compiler):
    source = installed.prefix / "share/doc/dcpd/examples/read_checkpoint.c"
    if compiler is CXX17:  # a C program, so the header alone is C++'s matter
        (tmp_path / "x.cpp").write_text('#include <dcp.h>\n#include <cstdio>\nint main() { return std::puts(dcp_version()) < 0; }\n')
        assert installed.run(installed.build(tmp_path / "x.cpp", tmp_path / "x", static, CXX17)).returncode == 0
        return
    program = installed.build(source, tmp_path / "example", static, compiler)
    needs = subprocess.run(["readelf", "-d", program], capture_output=True, text=True, check=True).stdout
    assert ("libdcp.so.0" in needs) != static
    case = "torch-2.15.0/fsdp2_adam"
    directory = FIXTURES / case / "checkpoint"
    want = expected(case)
    r = installed.run(program, directory)
    assert r.returncode == 0 and r.stderr == "", r.stderr
    for fqn, (dtype, shape, data) in want.items():
        assert f"{fqn} {dtype} {list(shape)} {len(data)} bytes in " in r.stdout
    fqn, (dtype, shape, data) = next((k, v) for k, v in want.items() if len(v[1]) == 2 and min(v[1]) > 2)
    out = tmp_path / "slice.bin"
    assert installed.run(program, directory, fqn, "1,1", f"{shape[0] - 1},2", out).returncode == 0
    assert out.read_bytes() == box_of(data, shape, 4, (1, 1), (shape[0] - 1, 2))
    r = installed.run(program, directory, fqn, "1,1", f"{shape[0]},2", out)
    assert r.returncode == 1 and "range_invalid" in r.stderr


# ------------------------------------------------------------------------------------------------------------ reading


def test_tensors_are_pytorchs():
    for case in CASES:
        want = expected(case)
        with libdcp.open(FIXTURES / case / "checkpoint") as ck:
            got = ck.tensors()
            assert {f: (d, s) for f, d, s, _ in got} == {f: (d, s) for f, (d, s, _) in want.items()}, case
            for fqn, _, shape, t in got:
                assert ck.read(t)[0] == want[fqn][2], (case, fqn)
                if shape and min(shape) > 0:
                    offsets, sizes = [s // 2 for s in shape], [s - s // 2 for s in shape]
                    item = libdcp.lib().dcp_tensor_element_bytes(t)
                    assert ck.read(t, offsets, sizes)[0] == box_of(want[fqn][2], shape, item, offsets, sizes), (case, fqn)
            assert set(ck.values()) == set(json.loads((FIXTURES / case / "expected.json").read_text())["values"]), case


def test_chunks_tile_a_tensor():
    with libdcp.open(FIXTURES / "torch-2.15.0/fsdp2_adam/checkpoint") as ck:
        ranks = set()
        for fqn, _, shape, t in ck.tensors():
            elements = 1
            for s in shape:
                elements *= s
            held = 0
            for offsets, sizes, rank in ck.chunks(t):
                assert all(0 <= o and o + s <= n for o, s, n in zip(offsets, sizes, shape)), fqn
                n = 1
                for s in sizes:
                    n *= s
                held += n
                ranks.add(rank)
            assert held == elements, fqn
        assert libdcp.lib().dcp_world_size(ck.p) == max(ranks) + 1 > 1


def test_unaligned_buffer_and_short_buffer():
    case = "torch-2.15.0/fsdp2_adam"
    with libdcp.open(FIXTURES / case / "checkpoint") as ck:
        fqn, _, shape, t = next(x for x in ck.tensors() if len(x[2]) == 2)
        size = libdcp.lib().dcp_tensor_bytes(t)
        buffer = (libdcp.c.c_char * (size + 2))()
        at = libdcp.c.addressof(buffer) + 1
        libdcp.check(libdcp.lib().dcp_read(ck.p, t, at, size, 0, None))
        assert bytes(buffer) == b"\0" + expected(case)[fqn][2] + b"\0"
        for arguments in ({"room": size - 1}, {"flags": 2}):
            with pytest.raises(libdcp.DcpError) as e:
                ck.read(t, **arguments)
            assert (e.value.status, e.value.code) == ("invalid", "validation_failed")
        two = libdcp.c.c_int64 * 2
        for offsets, sizes in (((-1, 0), (1, 1)), ((0, 0), (1, 1 << 62)), ((1 << 62, 0), (1 << 62, 0)), ((0, 0), (-1, 1))):
            with pytest.raises(libdcp.DcpError) as e:
                libdcp.check(libdcp.lib().dcp_read_slice(ck.p, t, two(*offsets), two(*sizes), buffer, 1, 0, None))
            assert (e.value.status, e.value.code, e.value.fqn) == ("invalid", "range_invalid", fqn)
        assert ck.read(t, (0, 0), (0, shape[1])) == (b"", 0)


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(libdcp.DcpError) as e:
        libdcp.Checkpoint(tmp_path / "none")
    assert (e.value.status, e.value.code) == ("not_found", "not_found") and str(tmp_path / "none") in e.value.message
    (tmp_path / "empty").mkdir()
    with pytest.raises(libdcp.DcpError) as e:
        libdcp.Checkpoint(tmp_path / "empty")
    assert (e.value.status, e.value.code) == ("damaged", "checkpoint_incomplete")
    (tmp_path / "empty/model.safetensors").write_bytes(b"")
    with pytest.raises(libdcp.DcpError) as e:
        libdcp.Checkpoint(tmp_path / "empty")
    assert (e.value.status, e.value.code) == ("unsupported", "format_unsupported")
    assert "dcpctl reshard" in str(e.value)
    assert libdcp.lib().dcp_open(None, None) == libdcp.STATUS.index("invalid")


# ------------------------------------------------------------------------------------------------------------- damage


def saved(d, case, name):
    """The case as dcpd writes it, with a manifest."""
    target = {"storage": "main", "name": name, "format": "dcp"}
    d.api.run("reshard", source={"storage": "golden", "name": f"{case}/checkpoint"}, target=target)
    return d.storages["main"] / name


def payload_of(directory, data):
    """(file, offset) where these bytes lie."""
    for f in sorted(directory.glob("*.distcp")):
        at = f.read_bytes().find(data)
        if at >= 0:
            return f, at
    raise AssertionError("not there")


@pytest.mark.parametrize("own", [False, True])
def test_flipped_byte(d, tmp_path, own):
    case = "torch-2.15.0/plain"
    directory = saved(d, case, f"c/{lib.fresh()}") if own else copy_of(case, tmp_path)
    fqn, (_, shape, data) = max(expected(case).items(), key=lambda x: len(x[1][2]))
    file, at = payload_of(directory, data)
    with open(file, "r+b") as f:
        f.seek(at + 5)
        byte = f.read(1)[0]
        f.seek(at + 5)
        f.write(bytes([byte ^ 16]))
    with libdcp.open(directory) as ck:
        with pytest.raises(libdcp.DcpError) as e:
            ck.read(ck.tensor(fqn))
        assert (e.value.status, e.value.code, e.value.file, e.value.fqn) == ("damaged", "digest_mismatch", file.name, fqn)
        assert 0 <= e.value.offset <= at + 5 and e.value.rank == 0
        bad, unverified = ck.read(ck.tensor(fqn), flags=1)  # DCP_UNVERIFIED
        assert bad == data[:5] + bytes([data[5] ^ 16]) + data[6:] and unverified >= len(data)
        assert (fqn, file.name) in {x[:2] for x in ck.unverified()} and ck.unverified_bytes() >= unverified
        other = next(x for x in expected(case) if x != fqn)
        assert ck.read(ck.tensor(other)) == (expected(case)[other][2], 0)
    damage, _, error = libdcp.verify(directory)
    assert error.code == "checkpoint_damaged" and [(x[0], x[2]) for x in damage] == [(fqn, file.name)]


def test_verify_goes_on_to_the_end(d):
    directory = saved(d, "torch-2.15.0/fsdp2_adam", f"c/{lib.fresh()}")
    assert libdcp.verify(directory) == ([], 0, None)
    gone, cut = sorted(directory.glob("*.distcp"))[:2]
    gone.unlink()
    os.truncate(cut, cut.stat().st_size // 2)
    damage, _, error = libdcp.verify(directory)
    assert error.status == "damaged" and {x[2] for x in damage} >= {gone.name, cut.name} and len(damage) > 2
    with pytest.raises(libdcp.DcpError) as e:
        libdcp.Checkpoint(directory)
    assert (e.value.status, e.value.file) == ("damaged", gone.name)


def test_unverified_is_counted_and_named(d):
    with libdcp.open(saved(d, "torch-2.15.0/plain", f"c/{lib.fresh()}")) as ck:
        for _, _, _, t in ck.tensors():
            assert ck.read(t)[1] == 0
        ck.values()
        assert ck.unverified_bytes() == 0 and ck.unverified() == []
    directory = FIXTURES / "torch-2.15.0/crc32_off/checkpoint"
    with libdcp.open(directory) as ck:
        metadata = (directory / ".metadata").stat().st_size
        assert ck.unverified() == [(None, ".metadata", 0, metadata)]
        total = metadata
        for fqn, _, _, t in ck.tensors():
            data, unverified = ck.read(t)
            total += unverified
            assert not data or (unverified >= len(data) and fqn in {x[0] for x in ck.unverified()})
        assert ck.unverified_bytes() == total


def test_links_are_not_followed(tmp_path):
    directory = copy_of("torch-2.15.0/plain", tmp_path)
    file = next(directory.glob("*.distcp"))
    shutil.move(file, tmp_path / "outside")
    file.symlink_to(tmp_path / "outside")
    with pytest.raises(libdcp.DcpError) as e:
        with libdcp.open(directory) as ck:
            ck.read(ck.tensors()[0][3])
    assert e.value.status == "damaged" and e.value.file == file.name


# -------------------------------------------------------------------------------------------------------------- hosts


def test_threads_share_a_checkpoint(d):
    case = "torch-2.15.0/fsdp2_adam"
    want, faults = expected(case), []
    for directory in (saved(d, case, f"c/{lib.fresh()}"), FIXTURES / "torch-2.15.0/zstd/checkpoint"):
        want = expected(case if "zstd" not in str(directory) else "torch-2.15.0/zstd")
        with libdcp.open(directory) as ck:
            tensors, start = ck.tensors(), threading.Barrier(8)

            def work(me):
                try:
                    start.wait()
                    for i in range(40):
                        fqn, _, _, t = tensors[(me * 7 + i) % len(tensors)]
                        assert ck.read(t)[0] == want[fqn][2], fqn
                    ck.values()
                except BaseException as e:
                    faults.append(e)

            threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
    assert not faults, faults[0]


HOST = r"""
#include <dcp.h>
#include <dirent.h>
#include <locale.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

/* All that the library could have changed, as text. */
static void state(char *out, size_t room)
{
	size_t n = 0;
	for (int s = 1; s < 65; s++) {
		struct sigaction a;
		memset(&a, 0, sizeof a);
		if (sigaction(s, NULL, &a) == 0)
			n += (size_t)snprintf(out + n, room - n, "%p ", (void *)(size_t)a.sa_handler);
	}
	for (int r = 0; r < 16; r++) {
		struct rlimit l = { 0, 0 };
		getrlimit(r, &l);
		n += (size_t)snprintf(out + n, room - n, "%ju/%ju ", (uintmax_t)l.rlim_cur, (uintmax_t)l.rlim_max);
	}
	mode_t mask = umask(0);
	umask(mask);
	char cwd[4096] = "";
	if (!getcwd(cwd, sizeof cwd))
		exit(3);
	n += (size_t)snprintf(out + n, room - n, "%o %s %s %.1f", mask, cwd, setlocale(LC_ALL, NULL), 0.5);
}

static int entries(const char *path)
{
	DIR *d = opendir(path);
	int n = 0;
	while (d && readdir(d))
		n++;
	if (d)
		closedir(d);
	return n;
}

int main(int argc, char **argv)
{
	static char before[1 << 16], after[1 << 16];
	dcp_checkpoint *ckpt;
	char *text;

	if (argc < 3 || !setlocale(LC_ALL, "") || strtod("0,5", NULL) != 0.5)
		return 4;
	state(before, sizeof before);
	int fds = entries("/proc/self/fd"), threads = entries("/proc/self/task");
	if (dcp_open(argv[1], &ckpt) != DCP_OK)
		return 5;
	for (size_t i = 0; i < dcp_tensor_count(ckpt); i++) {
		const dcp_tensor *t = dcp_tensor_at(ckpt, i);
		void *buffer = malloc(dcp_tensor_bytes(t) + 1);
		if (dcp_read(ckpt, t, buffer, dcp_tensor_bytes(t), 0, NULL) != DCP_OK)
			return 6;
		free(buffer);
	}
	for (size_t i = 0; i < dcp_value_count(ckpt); i++) {
		const dcp_value *v = dcp_value_at(ckpt, i);
		if (dcp_value_read(ckpt, v, NULL, &text, NULL) != DCP_OK)
			return 7;
		printf("%s = %s\n", dcp_value_fqn(v), text);
		free(text);
	}
	dcp_close(ckpt);
	if (dcp_verify(argv[1], NULL, NULL, NULL) != DCP_OK || dcp_open(argv[2], &ckpt) == DCP_OK)
		return 8;
	state(after, sizeof after);
	if (strcmp(before, after) != 0) {
		printf("before: %s\nafter:  %s\n", before, after);
		return 9;
	}
	return entries("/proc/self/fd") == fds && entries("/proc/self/task") == threads ? 0 : 10;
}
"""


@pytest.mark.long
def test_host_stays_as_it_was(installed, tmp_path):
    """A host with a decimal comma: numbers in values are JSON's all the same, and nothing about the process has changed."""
    if not pathlib.Path("/usr/share/i18n/locales/de_DE").exists():
        pytest.skip("Debian's package `locales` is not installed")
    subprocess.run(["localedef", "--no-archive", "-i", "de_DE", "-f", "UTF-8", tmp_path / "de_DE.UTF-8"], check=True, capture_output=True)
    (tmp_path / "host.c").write_text("#define _GNU_SOURCE\n" + HOST)
    program = installed.build(tmp_path / "host.c", tmp_path / "host")
    installed.env |= {"LOCPATH": str(tmp_path), "LC_ALL": "de_DE.UTF-8"}
    r = installed.run(program, FIXTURES / "torch-2.15.0/fsdp2_adam/checkpoint", tmp_path)
    assert r.returncode == 0 and r.stderr == "", (r.returncode, r.stdout, r.stderr)
    assert re.search(r"\.lr = 0\.\d+\n", r.stdout), r.stdout
