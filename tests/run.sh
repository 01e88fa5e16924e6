#!/usr/bin/env bash
# All checks:  bash tests/run.sh            environment, lint, format, types, data sets, tests
# Some tests:  bash tests/run.sh ARGS...    only pytest, with these arguments; paths from the repository's root
#
# Every step runs; the exit code is that of the first that failed.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/../jobs/env.sh"
cd -- "$HPCFL_ROOT"
first_failure=0

step() { # COMMAND...: runs it, says how long it took
    local start=$SECONDS code=0
    printf '\n== %s\n' "$*"
    "$@" || code=$?
    printf '== %s: exit code %d, %d s\n' "$*" "$code" $((SECONDS - start))
    [ $first_failure != 0 ] || first_failure=$code
}

# Killed MPI jobs leave shared memory behind. It is garbage if it is this user's, of this host, not new, and no process
# maps it.
remove_leftovers() {
    local file
    while IFS= read -r file; do
        grep -qsF -- "$file" /proc/[0-9]*/maps || rm -f -- "$file"
    done < <(find /dev/shm -maxdepth 1 -name "*_segment.$(uname -n).$(id -u).*" -user "$(id -u)" -mmin +1 2>/dev/null)
}

trap remove_leftovers EXIT
remove_leftovers
bash jobs/install.sh analysis test
if (($# == 0)); then
    step ruff check .
    step ruff format --check .
    step mypy hpcfl
    step bash tests/get_data.sh
fi
step python -m pytest "$@"
exit "$first_failure"
