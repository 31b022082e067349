#!/bin/bash
# retry.sh FLAKY-LIST FAILED-LIST PYTEST [ARGUMENT]...: runs pytest. With RETRY=1 and five failures at most, those are run once
# more, in a new process; what passes then is added to the first list, and counts as passed. More failures than that are no machine's
# fault. What failed is added to the second list. T=WORD picks tests by name: that there is none here is no failure then.
#
# Each run has a temporary directory of its own, which stays if something failed: pytest's common one is closed to other users whenever
# another pytest begins. With IN_MEMORY=1 it is a tmpfs, where root may mount one: on a disk all sets of tests wait for each other's
# fsyncs, for longer than they work. It is not in /dev/shm, which some tests hide behind one of their own.
set -u

retry=${RETRY:-}
memory=${IN_MEMORY:-}
unset RETRY IN_MEMORY
flaky=$1
list=$2
shift 2
cache=$(mktemp -d)
export PYTEST_DEBUG_TEMPROOT=$(mktemp -d -t t-XXXXXX)
[ "$memory" = 1 ] && mount -t tmpfs -o mode=0700 dcpd-test "$PYTEST_DEBUG_TEMPROOT" 2>/dev/null || memory=
kept=
finish() {
	[ -z "$memory" ] || umount -l "$PYTEST_DEBUG_TEMPROOT"
	rm -rf "$cache"
	[ "$kept" = "$PYTEST_DEBUG_TEMPROOT" ] || rm -rf "$PYTEST_DEBUG_TEMPROOT"
}
trap finish EXIT
mkdir -p "$(dirname "$flaky")" "$(dirname "$list")"
failed="$cache/v/cache/lastfailed"
names() { sed -n 's/^ *"\(.*\)": true,\{0,1\}$/\1/p' "$failed" 2>/dev/null; }
fail() {
	names >>"$list"
	[ "$1" -eq 1 ] || echo "pytest ended with $1" >>"$list"
	kept=$PYTEST_DEBUG_TEMPROOT
	[ -z "$memory" ] || { kept=$(mktemp -d -t t-XXXXXX) && cp -a "$PYTEST_DEBUG_TEMPROOT/." "$kept"; }
	echo "what it left is in $kept"
	exit "$1"
}

"$@" -o cache_dir="$cache"
rc=$?
[ $rc -ne 5 ] || [ -z "${T:-}" ] || rc=0
[ $rc -ne 0 ] || exit 0
[ $rc -eq 1 ] && [ "$retry" = 1 ] || fail $rc
first=$(names)
[ -n "$first" ] && [ "$(wc -l <<<"$first")" -le 5 ] || fail $rc
echo "run once more: $first"
"$@" -o cache_dir="$cache" --lf || fail $?
sed 's/^/FLAKY /; s/$/: passed when run again/' <<<"$first" | tee -a "$flaky"
