# clean.sh: a clean Debian 12 to install things in, for the scripts that read it. Needs root. Sets work and root.
me=${0##*/}
. tests/e2e/version.sh
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

# Makes build/deb's packages as they would be of version $older: in FOLDER/older, beside FOLDER/new.
two_versions() { # FOLDER
	local f x n
	mkdir -p "$1/older" "$1/new"
	for f in build/deb/*.deb; do
		case $f in *dbgsym*) continue ;; esac
		cp "$f" "$1/new/"
		x=$work/older
		dpkg-deb -R "$f" "$x"
		find "$x" -type f -print0 | LC_ALL=C xargs -0 grep -lZF "$version" | LC_ALL=C xargs -0r sed -i -E "$(as_version "$older")"
		n=${f##*/}
		dpkg-deb -Znone -b "$x" "$1/older/${n/_$version/_$older}" >/dev/null
		rm -r "$x"
	done
}
