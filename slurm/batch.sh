# What run.sbatch and sweep.sbatch have in common: settings, launch, signals, the end. They source it.
#
# What a site or a person may set, in the site file or in the environment of sbatch:
#   HPCFL_LAUNCHER      mpirun (absent: this one), or srun with its options: "srun --mpi=pmix"
#   HPCFL_MAX_RESTARTS  how often a job that stopped early goes back into the queue (absent: 20)
#   HPCFL_SITE          the site file (absent: ~/.config/hpcfl/slurm.sh); bash, may load modules; see slurm/README.md
#   HPCFL_VENV          the Python environment (absent: .venv in the repository)

hpcfl_say() { printf 'hpcfl: %s\n' "$*"; } # TEXT...

hpcfl_site() { # sources the site file, where there is one
    local site=${HPCFL_SITE:-${HOME:+$HOME/.config/hpcfl/slurm.sh}}
    if [ -n "$site" ] && [ -e "$site" ]; then
        hpcfl_say "site file $site"
        set +u # modules use variables that are not set
        . "$site"
        set -u
    elif [ -n "${HPCFL_SITE-}" ]; then
        printf 'hpcfl: HPCFL_SITE=%s: no such file\n' "$site" >&2
        exit 2
    fi
    [ -z "${HPCFL_GIVEN_LAUNCHER-}" ] || export HPCFL_LAUNCHER=$HPCFL_GIVEN_LAUNCHER # --launcher of hpcfl submit
}

hpcfl_tasks() { # prints the number of tasks of this job
    printf '%d' "${SLURM_NTASKS:-$((${SLURM_JOB_NUM_NODES:-1} * ${SLURM_NTASKS_PER_NODE:-1}))}"
}

hpcfl_launch() { # COMMAND...: becomes the launcher, which runs the command on all tasks of this job
    local launcher
    read -ra launcher <<<"${HPCFL_LAUNCHER:-mpirun}"
    case ${launcher[0]} in
        mpirun) hpcfl_mpirun -n "$(hpcfl_tasks)" "${launcher[@]:1}" "$@" ;;
        srun)
            [ -t 1 ] || export TERM=dumb TTY_COMPATIBLE=0
            # srun does not take the cores per task from sbatch; one failed task must not leave the others waiting.
            exec "${launcher[@]}" --kill-on-bad-exit=1 ${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"} "$@"
            ;;
        *) hpcfl_fail "HPCFL_LAUNCHER=$HPCFL_LAUNCHER: expected mpirun, or srun with its options: \"srun --mpi=pmix\"" ;;
    esac
}

hpcfl_describe() { # says what runs where
    local text="job $SLURM_JOB_ID${SLURM_ARRAY_TASK_ID:+, task $SLURM_ARRAY_TASK_ID of array $SLURM_ARRAY_JOB_ID}"
    text+=", start $((${SLURM_RESTART_COUNT:-0} + 1)): $(hpcfl_tasks) tasks on ${SLURM_JOB_NODELIST:-this host}"
    text+=", ${SLURM_CPUS_PER_TASK:-1} cores and OMP_NUM_THREADS=$OMP_NUM_THREADS per task"
    text+="${SLURM_GPUS_ON_NODE:+, $SLURM_GPUS_ON_NODE GPUs on this node}"
    hpcfl_say "$text"
    if [ "${HPCFL_LAUNCHER:-mpirun}" = mpirun ]; then
        hpcfl_say "launcher $(hpcfl_launcher || echo mpirun), binding $PRTE_MCA_hwloc_default_binding_policy"
    else
        hpcfl_say "launcher $HPCFL_LAUNCHER"
    fi
}

# A job near its time limit gets SIGUSR1 (--signal of sbatch): hpcfl writes a checkpoint and stops. The launcher passes it on.
hpcfl_ask_to_stop() {
    hpcfl_interrupted=yes
    [ -z "$hpcfl_asked" ] || return 0 # a second signal would end hpcfl at once
    hpcfl_asked=yes
    hpcfl_say "signal at $(date '+%F %T'), $SECONDS s after the start: asking for a checkpoint"
    ((SECONDS >= 60)) || hpcfl_say "from the time limit this early? Then it is too short for the lead in --signal"
    hpcfl_pass_on
}

hpcfl_pass_on() { # to the launcher, once it is there
    [ -n "$hpcfl_pid" ] && [ -z "$hpcfl_told" ] || return 0
    hpcfl_told=yes
    kill -USR1 "$hpcfl_pid" || true # it may have ended meanwhile
}

# scancel, preemption, and the time limit itself send SIGTERM, some seconds before SIGKILL.
hpcfl_end_now() {
    hpcfl_interrupted=yes hpcfl_ended=yes
    [ -z "$hpcfl_pid" ] || kill -TERM "$hpcfl_pid" 2>/dev/null || true # it may have got its own SIGTERM
}

hpcfl_batch() { # JOB.toml [OPTIONS of hpcfl run]...: starts or resumes it, sees it to its end, ends the script
    local code=0 before state
    hpcfl_pid='' hpcfl_interrupted='' hpcfl_asked='' hpcfl_told='' hpcfl_ended=''
    trap hpcfl_ask_to_stop USR1 USR2
    trap hpcfl_end_now TERM
    hpcfl_describe
    before=$(python -m hpcfl status "$@") || true
    [ -z "$hpcfl_asked" ] || hpcfl_requeue # so early that nothing has begun
    hpcfl_launch python -m hpcfl run "$@" --resume &
    hpcfl_pid=$!
    [ -z "$hpcfl_asked" ] || hpcfl_pass_on
    [ -z "$hpcfl_ended" ] || kill -TERM "$hpcfl_pid" 2>/dev/null || true
    while :; do # a trapped signal ends wait, too
        hpcfl_interrupted=''
        code=0
        wait "$hpcfl_pid" || code=$?
        [ -n "$hpcfl_interrupted" ] || break
    done
    if [ -n "$hpcfl_ended" ]; then
        hpcfl_say "ended by SIGTERM: scancel, preemption or the time limit. Submit it again to go on from the last checkpoint"
        exit $((128 + 15))
    fi
    # An exit code of 0 proves nothing (a lost node daemon gives 0), so the results file is asked.
    state=$(python -m hpcfl status "$@") || true
    hpcfl_say "exit code $code; ${state:-no results}"
    [[ $code != 0 || $state != "done in "* ]] || exit 0
    # Of ranks that leave one after the other, a launcher may kill the last: then the code is that of a signal, too.
    if [[ $state == stopped:* && $state != "$before" ]] && ((code == 75 || code > 128)); then
        hpcfl_requeue
    fi
    [[ -z $hpcfl_asked || $code != $((128 + 10)) ]] || hpcfl_requeue # SIGUSR1 kills a rank that is only starting
    case $code,$state in
        0,*) hpcfl_say "the run is not complete, whatever its exit code says" ;;
        *,"no run of "*) hpcfl_say "no results were begun. Unless a line above says why: ${HPCFL_LAUNCHER:-mpirun} may not fit" \
            "the MPI in use; the launcher with python -m hpcfl doctor tells" ;;
    esac
    exit $((code == 0 ? 1 : code))
}

hpcfl_requeue() { # puts this job back into the queue, ends the script
    local restarts=${SLURM_RESTART_COUNT:-0} most=${HPCFL_MAX_RESTARTS:-20} job=$SLURM_JOB_ID
    # The last task of an array has the number of the whole array.
    [ -z "${SLURM_ARRAY_TASK_ID-}" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    if ((restarts >= most)); then
        hpcfl_say "stopped early, and started again $restarts times already (HPCFL_MAX_RESTARTS=$most); submit it again to go on"
        exit 75
    fi
    trap '' TERM # that is how SLURM ends what it puts back
    hpcfl_say "stopped early: back into the queue, restart $((restarts + 1)) of at most $most"
    scontrol requeue "$job" || hpcfl_say "SLURM does not requeue this job; submit it again to go on"
    exit 75
}
