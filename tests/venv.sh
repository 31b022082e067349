#!/bin/bash
# venv.sh [REQUIREMENTS]...: makes the Python environment of the tests once per user, and prints its folder.
#
# It lives in the user's cache folder under the digest of its requirements and of the interpreter, so that a second clone
# finds it ready (PyTorch alone is gigabytes). A virtual environment cannot be renamed into place, so `.complete` marks
# one that is whole, and a lock keeps two makes apart. DCPD_TEST_VENV=DIR uses an environment that is there already.
set -eu

[ -z "${DCPD_TEST_VENV:-}" ] || { echo "$DCPD_TEST_VENV"; exit 0; }
[ $# -gt 0 ] || set -- "$(dirname "$0")"/requirements*.txt
root=${XDG_CACHE_HOME:-$HOME/.cache}/dcpd
key=$({ python3 -V; cat "$@" | grep -v '^ *\(#\|$\)'; } | sha256sum | cut -c1-12)
venv=$root/venv-$key
if [ ! -e "$venv/.complete" ]; then
	mkdir -p "$root"
	exec 9>"$venv.lock"
	flock 9
	if [ ! -e "$venv/.complete" ]; then
		echo "deps-test: installing Python packages into $venv: $(cat "$@" | grep -v '^ *\(#\|$\)' | tr '\n' ' ')" >&2
		rm -rf "$venv"
		python3 -m venv "$venv"
		# A mirror that is slow or drops a connection is asked again; what has been fetched is in pip's cache.
		for pause in 5 30 0; do
			"$venv/bin/pip" -q --disable-pip-version-check --retries 5 --timeout 60 install "${@/#/-r}" >&2 && break
			[ "$pause" -ne 0 ] || exit 1
			echo "deps-test: that failed; once more in $pause s" >&2
			sleep "$pause"
		done
		touch "$venv/.complete"
		echo "deps-test: done" >&2
	fi
fi
echo "$venv"
