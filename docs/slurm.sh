#!/bin/bash
# Four machines of eight GPUs. Two minutes before the time is up the run saves itself, and the job queues again.
#SBATCH --job-name=unmask
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

RUN=/shared/runs/run7
RECIPE=recipe.toml

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
again=()
[ -d "$RUN/checkpoints" ] && again=(--resume)
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110  # torchrun passes the signal on and waits for the save
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # after a restart the machines meet anew

srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 --max-restarts 3 --signals-to-handle SIGTERM,SIGINT,SIGUSR1 \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first:29400" \
    -m unmask train "$RECIPE" --out "$RUN" "${again[@]}"

# Stopped on request: all is saved and there is more to do.
[ -s "$RUN/stopped" ] && rm "$RUN/stopped" && scontrol requeue "$SLURM_JOB_ID"
