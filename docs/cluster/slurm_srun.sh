#!/bin/bash
# The same without mpiexec, where it may not start processes on other nodes: srun starts them, and they find
# each other by themselves, on the first node. Submit with: sbatch slurm_srun.sh
#SBATCH --job-name=minidist
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out

set -euo pipefail
source "$HOME/minidist/bin/activate"

# --mpi=none: no other stands in for an mpiexec. --kill-on-bad-exit: a rank that fails ends the step.
exec srun --mpi=none --kill-on-bad-exit=1 --cpu-bind=none --label \
    python -m minidist.bench --variable_update=collective_all_reduce --num_devices=4 \
    --train_dir="$HOME/runs/$SLURM_JOB_ID"
