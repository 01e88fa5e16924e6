#!/usr/bin/env bash
# mpirun with the settings that hpcfl needs, for Open MPI and MPICH, on a workstation and in a batch job:
#   bash jobs/mpirun.sh -n 8 hpcfl run jobs/quickstart/apfl.toml
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"
(($#)) || hpcfl_fail 'usage: bash jobs/mpirun.sh -n RANKS COMMAND...'
hpcfl_mpirun "$@"
