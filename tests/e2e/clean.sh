# clean.sh: a clean Debian 12 to install things in, for the scripts that read it. Needs root. Sets work and root.
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

cp -a "$(tests/debian.sh)" "$root"
mount -t proc proc "$root/proc"
mkdir -p "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
inside() { chroot "$root" env DEBIAN_FRONTEND=noninteractive LC_ALL=C "$@"; }
