#!/bin/bash
# Submit with: sbatch slurm.sh
#SBATCH --job-name=minidist
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out

set -euo pipefail
source "$HOME/minidist/bin/activate" # an environment with minidist[mpi], on a file system of all nodes

# mpiexec takes the nodes from Slurm. The launcher names the rank that fails, and starts all again from the
# newest checkpoint, up to three times.
exec python -m minidist.launch -n "$SLURM_NTASKS" --max_restarts=3 --tag_output \
    -m minidist.bench --variable_update=collective_all_reduce --num_devices=4 \
    --train_dir="$HOME/runs/$SLURM_JOB_ID"
