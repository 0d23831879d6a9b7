#!/bin/bash
#SBATCH --job-name=sweep
#SBATCH --nodes=4
#SBATCH --tasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-task=1
#SBATCH --exclusive

export WORKBENCH_RUNS=/shared/runs
export RAY_USAGE_STATS_ENABLED=0
source /shared/venv/bin/activate # with gpt2-memory-workbench[cluster]

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \
    ray symmetric-run --address "$head:6379" --min-nodes "$SLURM_JOB_NUM_NODES" \
    --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="$SLURM_GPUS_PER_TASK" -- \
    python -u -m workbench sweep /shared/grid.toml --on "$head:6379"
