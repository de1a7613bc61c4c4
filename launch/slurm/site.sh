# shellcheck shell=sh
# What is different at every site: the one file to edit. Every batch script reads it on the node, inside of the job.
#
# Partition, account and the like must be known before a job begins. sbatch takes them from SBATCH_... variables: put
# them here as well, and read this file into your shell before you submit:
#
#   source launch/slurm/site.sh
#   sbatch -N 2 --ntasks-per-node=8 --gpus-per-node=8 launch/slurm/train.sbatch webvision data.root=/shared/webvision
#
# A variable that is set already, by you or by `VARIABLE=... sbatch`, wins. Plain sh: your login shell reads this, too.

# --- for sbatch -------------------------------------------------------------------------------------------------------
# export SBATCH_PARTITION="${SBATCH_PARTITION:-gpu}"
# export SBATCH_ACCOUNT="${SBATCH_ACCOUNT:-myproject}"
# export SBATCH_QOS="${SBATCH_QOS:-normal}"
# export SBATCH_TIMELIMIT="${SBATCH_TIMELIMIT:-24:00:00}"

# --- Python: a venv (default: .venv of the repository, if there is one) or a conda environment ------------------------
# export SOPDIST_VENV="${SOPDIST_VENV:-$HOME/venvs/sopdist}"
# export SOPDIST_CONDA="${SOPDIST_CONDA:-sopdist}"
# export SOPDIST_MODULES="${SOPDIST_MODULES:-cuda/12.4 gcc/12}"

# --- how ranks are started, and how patient a job is: for the job alone, hence not exported ---------------------------
SOPDIST_LAUNCHER="${SOPDIST_LAUNCHER:-srun}"          # srun, torchrun or deepspeed
SOPDIST_MAX_RESTARTS="${SOPDIST_MAX_RESTARTS:-3}"     # in a row that bring no new checkpoint
SOPDIST_GRACE="${SOPDIST_GRACE:-100}"                 # seconds a run may take to save; less than --signal says

# --- the network. Only if training does not start, or is slow: ask your site which interfaces are the fast ones -------
# export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"                    # INFO tells what NCCL has chosen
# export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-ib0}"     # where NCCL's ranks meet
# export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-ib0}"     # the same for gloo, which every run needs beside NCCL
# export NCCL_IB_HCA="${NCCL_IB_HCA:-mlx5_0,mlx5_1}"         # InfiniBand cards
# export MASTER_ADDR=...                                     # where ranks meet; found out if it is not set
