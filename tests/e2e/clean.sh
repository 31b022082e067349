# clean.sh: a clean Debian 12 to install things in, for deb.sh and wheel.sh, which read it. $1: a folder with such a system
# (debootstrap --variant=minbase bookworm FOLDER), of which a copy is used; without one it is made. Needs root. Sets work and root.
me=${0##*/}
fail() { echo "$me: $*" >&2; exit 1; }
[ "$(id -u)" -eq 0 ] || fail "needs root"
work=$(mktemp -d /var/tmp/dcpd-clean-XXXXXX)
root=$work/root
pid=
end() {
	[ -z "$pid" ] || kill "$pid" 2>/dev/null || true
	for m in dev/shm proc; do umount "$root/$m" 2>/dev/null || true; done
	rm -rf --one-file-system "$work"
}
trap end EXIT

if [ -n "${1:-}" ]; then
	cp -a "$1" "$root"
else
	debootstrap --variant=minbase bookworm "$root" http://deb.debian.org/debian >"$work/log" || fail "$(tail -3 "$work/log")"
fi
mount -t proc proc "$root/proc"
mkdir -p "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
inside() { chroot "$root" env DEBIAN_FRONTEND=noninteractive LC_ALL=C "$@"; }
