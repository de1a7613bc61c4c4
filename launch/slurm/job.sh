# What the batch scripts share: the environment, starting ranks, watching over them, and what comes after the end.
# Sourced by them, on the first node of a job, with SOPDIST_HOME set to the repository. Knows none of them.
# shellcheck shell=bash
set -euo pipefail

# shellcheck source=launch/slurm/site.sh
source "$SOPDIST_HOME/launch/slurm/site.sh"

# A task of an array has a number of its own, but for Slurm the number of one of them means all of them.
job=$SLURM_JOB_ID
if [[ -n ${SLURM_ARRAY_JOB_ID:-} ]]; then job=${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}; fi

# What Slurm has signalled: USR1 (time is nearly over), TERM (Slurm ends the job), or nothing. From the first line on,
# because an environment may take its time to load, and a shell that does not expect these signals dies of them.
asked=''
trap 'asked=${asked:-USR1}' USR1
trap 'asked=TERM' TERM

restarts=${SLURM_RESTART_COUNT:-0} # of this job, for whatever reason

say() { echo "sopdist: job $job: $*" >&2; }

fail() {
    say "$*"
    exit 2
}

enter_environment() {
    set +u # scripts of modules, conda and venvs are not written for it
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
    # Ranks get the environment that was just made, also if the job was submitted with --export=NONE, and the cores
    # that were asked for: newer srun does not take them from sbatch.
    export SLURM_EXPORT_ENV=ALL
    if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
}

# value_of KEY ARGUMENT...: the value of the last KEY=... among the arguments; nothing if there is none.
value_of() {
    local key=$1 value='' argument
    shift
    for argument in "$@"; do
        if [[ $argument == "$key="* ]]; then value=${argument#*=}; fi
    done
    echo "$value"
}

# --- starting ranks ---------------------------------------------------------------------------------------------------

# Where the ranks meet: the address of the first node as Slurm knows it, which need not have a name that resolves.
first_address() {
    local node address
    if [[ $SLURM_JOB_NUM_NODES == 1 ]]; then
        echo 127.0.0.1
        return
    fi
    node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
    address=$(scontrol show node --oneliner "$node" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
    echo "${address:-$node}"
}

# Ranks of a node; the launchers below need the same number on each.
ranks_per_node() {
    local tasks=$SLURM_TASKS_PER_NODE # such as 8(x2)
    if [[ $tasks == *,* ]]; then
        fail "SOPDIST_LAUNCHER=$SOPDIST_LAUNCHER needs as many tasks on each node: not $tasks, but --ntasks-per-node"
    fi
    echo "${tasks%%(*}"
}

# launch_ranks ARGUMENT...: becomes the launcher of launch/train.py. Run it in the background.
# A rank that ends must not take the others with it: they save, or find out by themselves what was lost, and say so.
launch_ranks() {
    local script=$SOPDIST_HOME/launch/train.py step=(--kill-on-bad-exit=0 --wait=300) ranks
    export MASTER_ADDR="${MASTER_ADDR:-$(first_address)}"
    case $SOPDIST_LAUNCHER in
        srun)
            exec srun "${step[@]}" python -u "$script" "$@"
            ;;
        torchrun)
            ranks=$(ranks_per_node)
            step+=(--ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1)
            if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then step+=(--cpus-per-task=$((ranks * SLURM_CPUS_PER_TASK))); fi
            # Another port than other jobs on the node have. The number of a node is known only on that node.
            # shellcheck disable=SC2016
            exec srun "${step[@]}" bash -c 'exec python -u -m torch.distributed.run --node-rank="$SLURM_NODEID" "$@"' \
                torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$ranks" \
                --master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-$((12000 + SLURM_JOB_ID * 7 % 20000))}" \
                "$script" "$@"
            ;;
        deepspeed)
            ranks=$(ranks_per_node)
            scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/$/ slots=$ranks/" >"$scratch/hosts"
            # It puts `srun -n RANKS` in front of the script; the ranks find their place as with srun.
            exec deepspeed --launcher slurm --force_multi --no_ssh_check --hostfile "$scratch/hosts" \
                --master_addr "$MASTER_ADDR" --launcher_args "${step[*]}" "$script" "$@"
            ;;
    esac
}

check_launcher() {
    case $SOPDIST_LAUNCHER in
        srun | torchrun | deepspeed) ;;
        *) fail "SOPDIST_LAUNCHER=$SOPDIST_LAUNCHER: must be srun, torchrun or deepspeed" ;;
    esac
}

# --- watching over a command ------------------------------------------------------------------------------------------

# watch_over ASK COMMAND...: runs the command in the background until it ends: $ended is 1, its exit code is in $code.
# When Slurm signals this shell, `ASK PID` is called, again and again: a command that has just begun may not hear yet.
# After USR1 it has $SOPDIST_GRACE seconds. If the signal has come already, the command is not started.
watch_over() {
    local ask=$1 pid since=''
    shift
    code=75
    ended=''
    if [[ -n $asked ]]; then return; fi
    "$@" &
    pid=$!
    # A look every second, because a signal may come just before a `wait`, which would then not end.
    while kill -0 "$pid" 2>/dev/null; do
        if [[ -n $asked ]]; then
            if [[ -z $since ]]; then
                say "got SIG$asked: asks to save and stop"
                since=$SECONDS
            fi
            "$ask" "$pid"
            if [[ $asked == USR1 ]] && ((SECONDS - since > SOPDIST_GRACE)); then
                say "has not stopped within $SOPDIST_GRACE s (SOPDIST_GRACE): is ended"
                return
            fi
        fi
        sleep 1
    done
    code=0
    ended=1
    wait "$pid" || code=$?
}

# Once more from the beginning, which is `--resume auto`. Only a job that Slurm has not ended itself: one that Slurm
# requeues is in the queue already, and one that was cancelled must not come back.
requeue() {
    local state=unknown attempt
    for attempt in 1 2 3 4 5; do # a busy controller may not answer at once
        if state=$(squeue --noheader --jobs "$job" --format %T); then break; fi
        state=unknown
        sleep "$attempt"
    done
    if [[ $state != RUNNING && ($state != unknown || $asked == TERM) ]]; then
        say "$1; Slurm ends this job itself ($state)"
        exit "$code"
    fi
    say "$1; is requeued"
    trap '' TERM # Slurm ends this shell in the same moment
    scontrol requeue "$job" || fail "cannot be requeued: was it submitted with --no-requeue? Submit it again to go on"
    exit "$code"
}

# --- training ---------------------------------------------------------------------------------------------------------

FRUITLESS=.starts-without-progress # in the run's folder

# train CONFIG key=value...: trains, goes on where an earlier start of the job was ended, and says what comes next.
train() {
    check_launcher
    run=$(python -m sopdist stop --where --cfg "$@") # a wrong config ends the job here
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    local summary_before
    rm -f "$run/STOP" # of an earlier start of this job that was ended before it could obey
    if ((restarts == 0)); then rm -f "$run/$FRUITLESS"; fi # of another job
    summary_before=$(written_at)
    checkpoint_before=$(newest_checkpoint)
    say "start $((restarts + 1)) of run $run, ranks: ${SLURM_NTASKS:-?} on $SLURM_JOB_NODELIST by $SOPDIST_LAUNCHER"
    watch_over ask_run launch_ranks --cfg "$@" --resume auto
    if [[ -n $ended ]]; then rm -f "$run/STOP"; fi # asked once more while the run, which had obeyed, was on its way out

    # Launchers change exit codes (torchrun makes each 1) or lose them: the run's summary knows better, if it is new.
    local ending=''
    if [[ $code == 0 || $(written_at) != "$summary_before" ]]; then ending=$(how_it_ended); fi
    if [[ $ending == finished ]]; then
        say "$run is finished"
        rm -f "$run/$FRUITLESS"
        exit 0
    elif [[ $ending == preempted ]]; then
        requeue_run "$run has stopped and is saved"
    elif [[ $ending == "preempted, not saved" ]]; then
        requeue_run "$run has stopped and COULD NOT SAVE"
    elif [[ -n $asked || $code == 75 ]]; then
        requeue_run "$run goes on from its newest checkpoint, if it has one"
    elif [[ $code == 70 || $code -ge 128 || $ending == running || $ending == "another rank was lost" ]]; then
        requeue_run "a rank was lost (exit code $code)"
    fi
    say "$run has failed (exit code $code): is not requeued"
    exit $((code ? code : 1))
}

# requeue_run WHY: requeues the job, unless too many starts in a row have brought the run no further. What Slurm ends
# does not count. The count is in the run's folder, with the checkpoint since which it counts: `COUNT CHECKPOINT`.
requeue_run() {
    local newest count=0 since=''
    newest=$(newest_checkpoint)
    if [[ $newest == "$checkpoint_before" && $asked != TERM ]]; then
        read -r count since 2>/dev/null <"$run/$FRUITLESS" || true
        if [[ ! $count =~ ^[0-9]+$ || $since != "$newest" ]]; then count=0; fi
        count=$((count + 1))
        # Where it cannot be written, on a full disk, all restarts of the job count.
        if ! { mkdir -p "$run" && echo "$count $newest" >"$run/$FRUITLESS.part" &&
            mv -T "$run/$FRUITLESS.part" "$run/$FRUITLESS"; } 2>/dev/null; then count=$((restarts + 1)); fi
        if ((count > SOPDIST_MAX_RESTARTS)); then
            say "$1; starts in a row without a new checkpoint: $count (SOPDIST_MAX_RESTARTS): gives up"
            exit $((code ? code : 70))
        fi
    fi
    requeue "$1"
}

ask_run() {
    touch "$run/STOP" 2>/dev/null || true # what `sopdist stop` does, at once; there may be no such folder yet
}

written_at() { stat --format '%i %y' "$run/summary.json" 2>/dev/null || true; }

how_it_ended() { sed -n 's/^ *"exit": "\(.*\)",\{0,1\}$/\1/p' "$run/summary.json" 2>/dev/null || true; }

# Of complete ones: what a save has left behind that was killed is no progress.
newest_checkpoint() {
    { find "$run/checkpoints" -mindepth 2 -maxdepth 2 -regex '.*/step-[0-9]+/complete' 2>/dev/null || true; } |
        sort -V | tail -n 1
}
