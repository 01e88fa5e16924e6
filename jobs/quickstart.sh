#!/usr/bin/env bash
# A first result with one command:  bash jobs/quickstart.sh [RANKS]
#
# Needs bash and Python >= 3.11. Makes the environment, trains APFL, FedAvg and local models on 8 MPI ranks (RANKS),
# prints the comparison and draws it.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"
cd -- "$HPCFL_ROOT"
ranks=${1:-8}
[[ $ranks =~ ^[1-9][0-9]*$ ]] || hpcfl_fail "usage: bash jobs/quickstart.sh [RANKS]; \"$ranks\" is not a number"
python=$HPCFL_VENV/bin/python
picture=results/quickstart.png

step() { # TITLE COMMAND...: runs it, says how long it took
    local title=$1 start=$SECONDS code=0
    shift
    printf '\n== %s\n' "$title"
    "$@" || code=$?
    ((code == 0)) || { printf '== %s: failed with exit code %d\n' "$title" "$code" >&2; exit "$code"; }
    printf '== %s: %d s\n' "$title" $((SECONDS - start))
}

step "Python environment and MPI" bash jobs/install.sh analysis
files=()
for job in apfl fedavg local; do
    step "$job on $ranks MPI ranks" \
        bash jobs/mpirun.sh -n "$ranks" "$python" -m hpcfl run "jobs/quickstart/$job.toml" --out results
    files+=("$(printf '%s\n' results/"$job"-[0-9]*/results.h5 | sort -V | tail -n 1)") # the newest run of the job
done
step "comparison" "$python" -m hpcfl show "${files[@]}"
step "picture" "$python" -m hpcfl plot "${files[@]}" -o "$picture"
printf '\nAll done in %d s. The picture: %s\n' "$SECONDS" "$HPCFL_ROOT/$picture"
