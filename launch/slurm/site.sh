# shellcheck shell=sh
# Settings of your site: the one file to edit. Every batch script sources it on the node, inside the job.
#
# Partition, account and the like are needed when you submit. sbatch reads them from SBATCH_... variables: set them here
# as well, and source this file before you submit:
#
#   source launch/slurm/site.sh
#   sbatch -N 2 --ntasks-per-node=8 --gpus-per-node=8 launch/slurm/train.sbatch webvision data.root=/shared/webvision
#
# Variables that are already set, for example by `VARIABLE=... sbatch`, take precedence. Use plain sh only: login shells
# source this file as well.

# --- for sbatch -------------------------------------------------------------------------------------------------------
# export SBATCH_PARTITION="${SBATCH_PARTITION:-gpu}"
# export SBATCH_ACCOUNT="${SBATCH_ACCOUNT:-myproject}"
# export SBATCH_QOS="${SBATCH_QOS:-normal}"
# export SBATCH_TIMELIMIT="${SBATCH_TIMELIMIT:-24:00:00}"

# --- Python: a venv (default: .venv of the repository, if it exists) or a conda environment ---------------------------
# export SOPDIST_VENV="${SOPDIST_VENV:-$HOME/venvs/sopdist}"
# export SOPDIST_CONDA="${SOPDIST_CONDA:-sopdist}"
# export SOPDIST_MODULES="${SOPDIST_MODULES:-cuda/12.4 gcc/12}"

# --- launcher and restarts; not exported, because only the batch script needs them ------------------------------------
SOPDIST_LAUNCHER="${SOPDIST_LAUNCHER:-srun}"          # srun, torchrun or deepspeed
SOPDIST_MAX_RESTARTS="${SOPDIST_MAX_RESTARTS:-3}"     # maximum number in a row without a new checkpoint
SOPDIST_GRACE="${SOPDIST_GRACE:-100}"                 # seconds for the run to save; less than in --signal

# --- network: only if training does not start or is slow; ask your site which interfaces are fast ---------------------
# export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"                    # INFO prints the interfaces that NCCL chose
# export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-ib0}"     # interface that NCCL uses
# export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-ib0}"     # the same for gloo, which every run uses besides NCCL
# export NCCL_IB_HCA="${NCCL_IB_HCA:-mlx5_0,mlx5_1}"         # InfiniBand cards
# export MASTER_ADDR=...                                     # address of rank 0; default: the first node
