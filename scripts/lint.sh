#!/usr/bin/env bash
# Check style and types: ruff and mypy, from the extra "dev".
set -u
cd "$(dirname "$0")/.." || exit 1
status=0
ruff check --config scripts/ruff.toml zero_mpi tests scripts || status=1
ruff format --check --config scripts/ruff.toml zero_mpi tests scripts || status=1
mypy || status=1
exit $status
