# Shared by the batch scripts: load the environment, start ranks, supervise them, and requeue the job.
# Each script sources this file on the first node of a job, with SOPDIST_HOME set to the repository.
# shellcheck shell=bash
set -euo pipefail

# shellcheck source=launch/slurm/site.sh
source "$SOPDIST_HOME/launch/slurm/site.sh"

# Each task of an array has its own job id, but Slurm takes the id of one of them for the whole array.
job=$SLURM_JOB_ID
if [[ -n ${SLURM_ARRAY_JOB_ID:-} ]]; then job=${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}; fi

# The signal received from Slurm: USR1 (the time limit is near), TERM (Slurm ends the job), or none. The traps come
# first: loading an environment may take a while, and an untrapped signal kills the shell.
received=''
trap 'received=${received:-USR1}' USR1
trap 'received=TERM' TERM

restarts=${SLURM_RESTART_COUNT:-0} # of this job, for any reason

log() { echo "sopdist: job $job: $*" >&2; }

fail() {
    log "$*"
    exit 2
}

activate_environment() {
    set +u # module, conda and venv scripts read unset variables
    if [[ -n ${SOPDIST_MODULES:-} ]]; then
        # shellcheck disable=SC2086  # a list of words
        module load $SOPDIST_MODULES
    fi
    if [[ -n ${SOPDIST_CONDA:-} ]]; then
        # shellcheck disable=SC1091
        source "$(conda info --base)/etc/profile.d/conda.sh"
        conda activate "$SOPDIST_CONDA"
    elif [[ -n ${SOPDIST_VENV:-} || -f $SOPDIST_HOME/.venv/bin/activate ]]; then
        # shellcheck disable=SC1091
        source "${SOPDIST_VENV:-$SOPDIST_HOME/.venv}/bin/activate"
    fi
    set -u
    export PYTHONPATH="$SOPDIST_HOME${PYTHONPATH:+:$PYTHONPATH}"
    # Ranks get this environment even if the job was submitted with --export=NONE, and the cores requested for the job:
    # newer versions of srun do not inherit --cpus-per-task from sbatch.
    export SLURM_EXPORT_ENV=ALL
    if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
}

# value_of KEY ARGUMENT...: print the value of the last KEY=... among the arguments, or an empty line.
value_of() {
    local key=$1 value='' argument
    shift
    for argument in "$@"; do
        if [[ $argument == "$key="* ]]; then value=${argument#*=}; fi
    done
    echo "$value"
}

# --- starting ranks ---------------------------------------------------------------------------------------------------

# The address of rank 0: that of the first node as Slurm knows it, because the node's name may not resolve.
master_address() {
    local node address
    if [[ $SLURM_JOB_NUM_NODES == 1 ]]; then
        echo 127.0.0.1
        return
    fi
    node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
    address=$(scontrol show node --oneliner "$node" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
    echo "${address:-$node}"
}

# The number of ranks per node, which torchrun and deepspeed need to be the same on all nodes.
ranks_per_node() {
    local tasks=$SLURM_TASKS_PER_NODE # such as 8(x2)
    if [[ $tasks == *,* ]]; then
        fail "SOPDIST_LAUNCHER=$SOPDIST_LAUNCHER needs --ntasks-per-node: the tasks per node are not equal ($tasks)"
    fi
    echo "${tasks%%(*}"
}

# launch_ranks ARGUMENT...: replace this process with the launcher of launch/train.py. Run it in the background.
# A rank that exits must not take the others down: they save, or detect the lost rank themselves and report it.
launch_ranks() {
    local script=$SOPDIST_HOME/launch/train.py step=(--kill-on-bad-exit=0 --wait=300) ranks
    export MASTER_ADDR="${MASTER_ADDR:-$(master_address)}"
    case $SOPDIST_LAUNCHER in
        srun)
            exec srun "${step[@]}" python -u "$script" "$@"
            ;;
        torchrun)
            ranks=$(ranks_per_node)
            step+=(--ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1)
            if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then step+=(--cpus-per-task=$((ranks * SLURM_CPUS_PER_TASK))); fi
            # The port depends on the job id, so that jobs can share a node. SLURM_NODEID is only set on the node.
            # shellcheck disable=SC2016
            exec srun "${step[@]}" bash -c 'exec python -u -m torch.distributed.run --node-rank="$SLURM_NODEID" "$@"' \
                torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$ranks" \
                --master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-$((12000 + SLURM_JOB_ID * 7 % 20000))}" \
                "$script" "$@"
            ;;
        deepspeed)
            ranks=$(ranks_per_node)
            scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/$/ slots=$ranks/" >"$scratch/hosts"
            # deepspeed runs `srun -n RANKS SCRIPT`; ranks read Slurm's variables, as with the launcher srun.
            exec deepspeed --launcher slurm --force_multi --no_ssh_check --hostfile "$scratch/hosts" \
                --master_addr "$MASTER_ADDR" --launcher_args "${step[*]}" "$script" "$@"
            ;;
    esac
}

check_launcher() {
    case $SOPDIST_LAUNCHER in
        srun | torchrun | deepspeed) ;;
        *) fail "SOPDIST_LAUNCHER=$SOPDIST_LAUNCHER: must be one of srun, torchrun, deepspeed" ;;
    esac
}

# --- supervising a command --------------------------------------------------------------------------------------------

# supervise REQUEST_STOP COMMAND...: run the command in the background and wait. When it exits, $exited is 1 and $code
# is its exit code. After a signal from Slurm, call `REQUEST_STOP PID` every second, because a command that has just
# started may miss the first request. After USR1, stop waiting when $SOPDIST_GRACE seconds have passed. If the signal
# arrived before the command was started, do not start it.
supervise() {
    local request_stop=$1 pid since=''
    shift
    code=75
    exited=''
    if [[ -n $received ]]; then return; fi
    "$@" &
    pid=$!
    # Poll: a signal that arrives just before a `wait` would not interrupt it.
    while kill -0 "$pid" 2>/dev/null; do
        if [[ -n $received ]]; then
            if [[ -z $since ]]; then
                log "received SIG$received: requesting a stop"
                since=$SECONDS
            fi
            "$request_stop" "$pid"
            if [[ $received == USR1 ]] && ((SECONDS - since > SOPDIST_GRACE)); then
                log "did not stop within $SOPDIST_GRACE s (SOPDIST_GRACE): no longer waiting"
                return
            fi
        fi
        sleep 1
    done
    code=0
    exited=1
    wait "$pid" || code=$?
}

# requeue REASON: requeue the job, which then resumes (`--resume auto`), and exit. Only exit if Slurm has ended the job:
# a job that Slurm requeues is already in the queue, and a cancelled job must not be requeued.
requeue() {
    local state=unknown attempt
    for attempt in 1 2 3 4 5; do # a busy controller may not answer at once
        if state=$(squeue --noheader --jobs "$job" --format %T); then break; fi
        state=unknown
        sleep "$attempt"
    done
    if [[ $state != RUNNING && ($state != unknown || $received == TERM) ]]; then
        log "$1; the job is not requeued here, Slurm has ended it ($state)"
        exit "$code"
    fi
    log "$1; requeueing the job"
    trap '' TERM # Slurm sends it to this shell at the same moment
    scontrol requeue "$job" || fail "cannot requeue; was the job submitted with --no-requeue? Submit it again to resume"
    exit "$code"
}

# --- training ---------------------------------------------------------------------------------------------------------

NO_PROGRESS=.starts-without-progress # file in the run folder

# train CONFIG key=value...: train or resume the run, then exit or requeue the job.
train() {
    check_launcher
    run=$(python -m sopdist stop --where --cfg "$@") # an invalid config ends the job here
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    local summary_before
    rm -f "$run/STOP" # from an earlier start of this job that was killed before it could stop
    if ((restarts == 0)); then rm -f "$run/$NO_PROGRESS"; fi # from another job
    summary_before=$(summary_version)
    checkpoint_before=$(newest_checkpoint)
    local ranks="${SLURM_NTASKS:-?} ranks on $SLURM_JOB_NODELIST"
    log "start $((restarts + 1)) of run $run: $ranks, launcher $SOPDIST_LAUNCHER"
    supervise request_stop launch_ranks --cfg "$@" --resume auto
    # The last request may have come after the run had acknowledged the stop.
    if [[ -n $exited ]]; then rm -f "$run/STOP"; fi

    # Launchers change exit codes (torchrun returns 1) or lose them. A summary that this start has written is reliable.
    local status=''
    if [[ $code == 0 || $(summary_version) != "$summary_before" ]]; then status=$(exit_status); fi
    if [[ $status == finished ]]; then
        log "$run is finished"
        rm -f "$run/$NO_PROGRESS"
        exit 0
    elif [[ $status == preempted ]]; then
        requeue_run "$run has stopped and saved a checkpoint"
    elif [[ $status == "preempted, not saved" ]]; then
        requeue_run "$run has stopped, but its checkpoint could not be saved"
    elif [[ -n $received || $code == 75 ]]; then
        requeue_run "$run resumes from its newest checkpoint, if there is one"
    elif [[ $code == 70 || $code -ge 128 || $status == running || $status == "another rank was lost" ]]; then
        requeue_run "a rank was lost (exit code $code)"
    fi
    log "$run has failed (exit code $code): the job is not requeued"
    exit $((code ? code : 1))
}

# requeue_run REASON: requeue the job, unless too many starts in a row have saved no new checkpoint. Starts that Slurm
# ended do not count. A file in the run folder holds the count and the newest checkpoint: `COUNT CHECKPOINT`.
requeue_run() {
    local newest count=0 since=''
    newest=$(newest_checkpoint)
    if [[ $newest == "$checkpoint_before" && $received != TERM ]]; then
        read -r count since 2>/dev/null <"$run/$NO_PROGRESS" || true
        if [[ ! $count =~ ^[0-9]+$ || $since != "$newest" ]]; then count=0; fi
        count=$((count + 1))
        # If the file cannot be written, for example on a full disk, count all restarts of the job.
        if ! { mkdir -p "$run" && echo "$count $newest" >"$run/$NO_PROGRESS.part" &&
            mv -T "$run/$NO_PROGRESS.part" "$run/$NO_PROGRESS"; } 2>/dev/null; then count=$((restarts + 1)); fi
        if ((count > SOPDIST_MAX_RESTARTS)); then
            log "$1; giving up after $count starts in a row without a new checkpoint (SOPDIST_MAX_RESTARTS)"
            exit $((code ? code : 70))
        fi
    fi
    requeue "$1"
}

request_stop() {
    touch "$run/STOP" 2>/dev/null || true # as `sopdist stop` does; the run folder may not exist yet
}

summary_version() { stat --format '%i %y' "$run/summary.json" 2>/dev/null || true; }

exit_status() { sed -n 's/^ *"exit": "\(.*\)",\{0,1\}$/\1/p' "$run/summary.json" 2>/dev/null || true; }

# The newest complete checkpoint: the remains of an interrupted save are not progress.
newest_checkpoint() {
    { find "$run/checkpoints" -mindepth 2 -maxdepth 2 -regex '.*/step-[0-9]+/complete' 2>/dev/null || true; } |
        sort -V | tail -n 1
}
