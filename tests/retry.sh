#!/bin/bash
# retry.sh FLAKY-LIST FAILED-LIST PYTEST [ARGUMENT]...: runs pytest. With RETRY=1 and five failures at most, those are run once
# more, in a new process; what passes then is added to the first list, and counts as passed. More failures than that are no machine's
# fault. What failed is added to the second list. T=WORD picks tests by name: that there is none here is no failure then.
#
# Each run has a temporary directory of its own, which stays if something failed: pytest's common one is closed to other users whenever
# another pytest begins.
set -u

retry=${RETRY:-}
unset RETRY
flaky=$1
list=$2
shift 2
cache=$(mktemp -d)
export PYTEST_DEBUG_TEMPROOT=$(mktemp -d -t t-XXXXXX)
trap 'rm -rf "$cache"' EXIT
mkdir -p "$(dirname "$flaky")" "$(dirname "$list")"
failed="$cache/v/cache/lastfailed"
names() { sed -n 's/^ *"\(.*\)": true,\{0,1\}$/\1/p' "$failed" 2>/dev/null; }
fail() {
	names >>"$list"
	[ "$1" -eq 1 ] || echo "pytest ended with $1" >>"$list"
	echo "what it left is in $PYTEST_DEBUG_TEMPROOT"
	exit "$1"
}

"$@" -o cache_dir="$cache"
rc=$?
[ $rc -ne 5 ] || [ -z "${T:-}" ] || rc=0
[ $rc -ne 0 ] || { rm -rf "$PYTEST_DEBUG_TEMPROOT"; exit 0; }
[ $rc -eq 1 ] && [ "$retry" = 1 ] || fail $rc
first=$(names)
[ -n "$first" ] && [ "$(wc -l <<<"$first")" -le 5 ] || fail $rc
echo "run once more: $first"
"$@" -o cache_dir="$cache" --lf || fail $?
rm -rf "$PYTEST_DEBUG_TEMPROOT"
sed 's/^/FLAKY /; s/$/: passed when run again/' <<<"$first" | tee -a "$flaky"
