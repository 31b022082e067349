#!/bin/bash
# fresh.sh [COMMAND]...: runs the README's two commands in a Debian 12 that has nothing but make, from a tree that is no repository.
#
# What a machine of ours happens to have (git, curl, certificates, an editor's locale, a `/` that is a mount) is easily taken for granted.
# The system is a copy of debian.sh's below $TMPDIR, with this machine's settings of apt and pip; a mount namespace and a process
# namespace of its own end with the script, whatever it started. FRESH=DIR keeps the system in DIR, and uses it again.
set -eu
tree=$(cd "$(dirname "$0")/.." && pwd)
[ $# -gt 0 ] || set -- 'make quickstart' 'make check'

if [ "${1:-}" != --inside ]; then
	[ "$(id -u)" -eq 0 ] || { echo "fresh: only root may make a system within this one" >&2; exit 1; }
	exec unshare --mount --pid --fork --kill-child "$0" --inside "$@"
fi
shift

if [ -n "${FRESH:-}" ]; then
	root=$FRESH
else
	root=$(mktemp -d "${TMPDIR:-/var/tmp}/dcpd-fresh.XXXXXX")
	trap 'umount -R "$root/proc" "$root/sys" "$root/dev/pts" "$root/dev/shm"; rm -rf --one-file-system "$root"' EXIT
fi

if [ ! -e "$root/.with-make" ]; then
	mkdir -p "$root"
	cp -a "$("$tree/tests/debian.sh")/." "$root"
	chroot "$root" apt-get -q update >/dev/null
	chroot "$root" env DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends install make >/dev/null
	touch "$root/.with-make"
fi

mount -t proc proc "$root/proc"
mount -t sysfs -o ro sys "$root/sys"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
mkdir -p "$root/dev/shm"
mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
[ ! -e /etc/resolv.conf ] || cp -L /etc/resolv.conf "$root/etc/resolv.conf"
cp /etc/hosts "$root/etc/hosts"

rm -rf "$root/src/dcpd"
mkdir -p "$root/src/dcpd"
tar -C "$tree" --exclude=./.git --exclude=./build --exclude=__pycache__ --exclude='*.egg-info' --exclude=.pytest_cache -c . |
	tar -C "$root/src/dcpd" --no-same-owner -x

# pip's settings, and the files that they name: elsewhere, as the package ca-certificates writes its own over those of the same name.
pass=(HOME=/root "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" TERM=dumb)
named() {
	local text=$1 f
	for f in $(grep -oE '/[^:=[:space:]]+\.(crt|pem)$' <<<"$text" | sort -u); do
		[ ! -f "$f" ] || { install -D -m 644 "$f" "$root/etc/fresh/$f"; text=${text//$f//etc/fresh$f}; }
	done
	echo "$text"
}
for f in /etc/pip.conf ~/.config/pip/pip.conf ~/.pip/pip.conf; do
	[ ! -e "$f" ] || { mkdir -p "$(dirname "$root/$f")"; named "$(cat "$f")" >"$root/$f"; }
done
while IFS= read -r v; do
	pass+=("$(named "$v")")
done < <(env | grep -E '^(PIP_|SSL_CERT_FILE=|REQUESTS_CA_BUNDLE=|DCPD_|([a-zA-Z]+_)?(proxy|PROXY)=)' || true)

for c in "$@"; do
	echo "fresh: $c"
	start=$SECONDS
	chroot "$root" env -i "${pass[@]}" bash -c "cd /src/dcpd && $c" || { echo "fresh: FAILED $c" >&2; exit 1; }
	echo "fresh: ok $c ($((SECONDS - start)) s)"
done
