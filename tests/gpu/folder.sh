#!/bin/bash
# folder.sh BIN FOLDER TEST...: lays in FOLDER all that check-gpu and bench-gpu need on a host with a GPU that can build nothing and has no
# network: the programs with their libraries, as the wheel has them, the unit tests of device memory, the package, and two programs, `check`
# and `bench`. The host has Python with PyTorch (and safetensors): python3, or that of DCPD_TEST_VENV=DIR.
set -eu
cd "$(dirname "$0")/../.."
bin=$1 out=$2
shift 2
rm -rf "$out"
mkdir -p "$out"/{units,tests/bench,tests/gpu,api/python}
deploy/wheel.py --folder "$bin" "$out/bin" >/dev/null
cp "$@" "$out/units"
for lib in $(ldd "$out"/units/* | sed -n 's|.* => \(/[^ ]*\) .*|\1|p' | sort -u); do
	case ${lib##*/} in
	libc.so.6 | libm.so.6 | libpthread.so.0 | libdl.so.2 | librt.so.1 | ld-linux*) ;;
	*)
		here=$out/bin/lib/${lib##*/}
		[ -e "$here" ] || { cp -L "$lib" "$here" && patchelf --force-rpath --set-rpath '$ORIGIN' "$here"; }
		;;
	esac
done
strip "$out"/units/*
patchelf --force-rpath --set-rpath '$ORIGIN/../bin/lib' "$out"/units/*
cp -r api/python/dcpd "$out/api/python/"
find "$out" -name __pycache__ -prune -exec rm -rf {} +
cp tests/gpu/*.py "$out/tests/gpu/"
cp tests/bench/gpu.py tests/bench/record.py "$out/tests/bench/"
cp tests/venv.sh "$out/tests/"
git rev-parse --short HEAD >"$out/COMMIT" 2>/dev/null || cat VERSION >"$out/COMMIT"
for name in check bench; do
	script=tests/gpu/check.py units=' --units "$here"/units/*'
	[ "$name" = check ] || script=tests/bench/gpu.py units=
	cat >"$out/$name" <<-EOF
		#!/bin/sh
		# See $script. DCPD_TEST_VENV=DIR names the folder of a Python with PyTorch.
		here=\$(cd "\$(dirname "\$0")" && pwd)
		export DCPD_BIN="\$here/bin/dcpd" PYTHONDONTWRITEBYTECODE=1
		exec "\${DCPD_TEST_VENV:+\$DCPD_TEST_VENV/bin/}python3" "\$here/$script"$units "\$@"
	EOF
	chmod +x "$out/$name"
done
echo "$out: $(du -sm "$out" | cut -f 1) MiB: check, bench"
