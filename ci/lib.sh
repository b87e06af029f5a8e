# Shared by the commands of this folder: finding and installing what a build needs, each thing once.
# Source it from the repository root's ci/; it changes to the root. Every failure is one sentence and exit status 1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT=$PWD
LOGS=$ROOT/build/log
TORCH=2.15.0
VENV=$ROOT/.venv
INSTALL=-e
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

say() { printf '%s\n' "tide: $*"; }
fail() {
  printf '%s\n' "tide: $*" >&2
  exit 1
}

# logged NAME COMMAND...: runs it with its output in build/log/NAME.log and prints how long it took.
logged() {
  local name=$1 start=$SECONDS
  shift
  mkdir -p "$LOGS" 2>/dev/null || fail "cannot write to $ROOT/build; is the disk full or the folder read-only?"
  "$@" >"$LOGS/$name.log" 2>&1 </dev/null || return $?
  say "$name: done in $((SECONDS - start)) s"
}

# explain LOG WHAT: the one sentence for a failed step, by what its log says.
explain() {
  local log=$LOGS/$1.log what=$2
  if grep -qiE 'no space left|disk quota' "$log"; then
    fail "$what failed because the disk is full; free some space and run this again (log: $log)"
  elif [[ $1 == compile* || $1 == configure* || $1 == build ]]; then
    :
  elif grep -qiE 'certificate verify failed' "$log"; then
    fail "$what failed because the package server's certificate is not trusted here (a proxy?); name its authority by PIP_CERT=... (log: $log)"
  elif grep -qiE 'name resolution|could not resolve|connection (refused|timed out|error|broken)|network is unreachable|retrying|unable to fetch|failed to fetch|could not connect' "$log"; then
    fail "$what failed because the network or the package server cannot be reached; check the connection or proxy and run this again (log: $log)"
  fi
  fail "$what failed: $(grep -v '^ *$' "$log" | tail -n 1) (log: $log)"
}

check_machine() {
  [ "$(uname -s)" = Linux ] || fail "tide builds on Linux only, this is $(uname -s)"
  case "$(uname -m)" in
    x86_64 | aarch64 | arm64) ;;
    *) fail "tide needs a 64-bit x86 or Arm machine, this one says $(uname -m); torch has no package for it" ;;
  esac
  [ "$(getconf LONG_BIT)" = 64 ] || fail "tide needs a 64-bit system, this one runs a 32-bit userland; torch has no package for it"
}

# need_disk GIGABYTES WHAT
need_disk() {
  local free
  free=$(df -Pk "$ROOT" | awk 'NR == 2 { print int($4 / 1048576) }')
  [ "${free:-0}" -ge "$1" ] || fail "$2 needs $1 GB of disk under $ROOT, only ${free:-0} GB are free; free some space and run this again"
}

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

# The packages that stand for what is missing, looked for by what they bring and not by name.
missing_packages() {
  local compiler=${CXX:-g++}
  command -v "$compiler" >/dev/null || echo g++
  command -v cmake >/dev/null || echo cmake
  command -v ninja >/dev/null || echo ninja-build
  command -v git >/dev/null || echo git
  [ -e /usr/include/gtest/gtest.h ] || [ -e /usr/local/include/gtest/gtest.h ] || echo libgtest-dev
  [ -e /usr/include/gmock/gmock.h ] || [ -e /usr/local/include/gmock/gmock.h ] || echo libgmock-dev
  [ -e /etc/ssl/certs/ca-certificates.crt ] || echo ca-certificates
  find_python >/dev/null || python_packages
}

python_works() { # a Python of 3.11 to 3.15, 64 bits, that can make environments and compile extensions
  "$1" - 2>/dev/null <<'PY'
import os, sys, sysconfig
import ensurepip, venv
ok = (3, 11) <= sys.version_info[:2] <= (3, 15) and sys.maxsize > 2**32
sys.exit(0 if ok and os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")) else 1)
PY
}

find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    python_works "$PYTHON" || return 1
    command -v "$PYTHON"
    return
  fi
  for candidate in python3 /usr/bin/python3 python3.13 python3.12 python3.11 python3.14 python3.15; do
    if command -v "$candidate" >/dev/null && python_works "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

python_packages() { # Ubuntu 22.04's own python3 is 3.10; it offers 3.11 beside it
  if [ -n "${PYTHON:-}" ]; then return; fi
  if [ -x /usr/bin/python3 ] && ! /usr/bin/python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo python3.11 python3.11-venv python3.11-dev
  else
    echo python3 python3-venv python3-dev
  fi
}

compiles_cxx20() {
  local out status=0
  out=$(mktemp) || fail "cannot write to ${TMPDIR:-/tmp}; is the disk full?"
  printf '#include <bit>\n#include <span>\nint main() { return std::popcount(0u); }\n' |
    "${CXX:-g++}" -std=c++20 -x c++ - -o "$out" 2>/dev/null || status=1
  rm -f "$out"
  return $status
}

install_packages() {
  local wanted
  wanted=$(missing_packages | tr '\n' ' ')
  if [ -n "${wanted// /}" ]; then
    command -v apt-get >/dev/null || fail "missing here: ${wanted% }; there is no apt-get, so install them by this system's own means and run this again"
    [ "$(id -u)" = 0 ] || command -v sudo >/dev/null || fail "missing here: ${wanted% }; installing them needs root or sudo, and neither is there"
    say "installing ${wanted% }"
    logged apt-update as_root apt-get update || true # an old list may still do; the install says so if not
    # shellcheck disable=SC2086
    logged apt as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $wanted ||
      explain apt "installing ${wanted% }"
    hash -r
  fi
  compiles_cxx20 || fail "the compiler ${CXX:-g++} is missing, broken or knows no C++20 (g++ 11 or newer does); install one or name it by CXX=..."
  find_python >/dev/null || fail "no Python of 3.11 to 3.15 with venv and headers here (found: $(${PYTHON:-python3} --version 2>&1 | head -n 1)); install one or name it by PYTHON=..."
}

# make_environment: $VENV with torch $TORCH and ci/requirements.txt; what is broken is put right, what is right is kept.
make_environment() {
  local python broken whole='import pip, sys; sys.exit(sys.prefix == sys.base_prefix or sys.version_info < (3, 11))'
  python=$(find_python)
  if [ -e "$VENV" ] && ! "$VENV/bin/python" -c "$whole" >/dev/null 2>&1; then
    say "the Python environment at $VENV does not run; making it anew"
    rm -rf "$VENV"
  fi
  if [ ! -e "$VENV" ]; then
    need_disk 12 "a Python environment with torch"
    logged venv "$python" -m venv "$VENV" || explain venv "making a Python environment at $VENV"
  fi
  broken=$("$VENV/bin/python" ci/check_environment.py "$TORCH") || fail "the Python environment at $VENV cannot be read; remove it and run this again"
  [ -n "$broken" ] || return 0
  if [[ $broken == *torch==* ]]; then
    need_disk 9 "torch"
    say "installing torch $TORCH and tools (a few minutes)"
  else
    say "installing $(echo "$broken" | tr '\n' ' ')"
  fi
  # Only what is broken is forced; dependencies that are right stay. The second call brings missing dependencies.
  # shellcheck disable=SC2086
  logged pip "$VENV/bin/python" -m pip install --force-reinstall --no-deps $broken || explain pip "installing $(echo $broken)"
  # shellcheck disable=SC2086
  logged pip-dependencies "$VENV/bin/python" -m pip install -r ci/requirements.txt "torch==$TORCH" ||
    explain pip-dependencies "installing what torch and the tools depend on"
}

# tree_hash PATH...: one hash over names and contents, and over what else decides a build.
tree_hash() {
  { find "$@" -type f ! -name '*.so' ! -name '*.pyc' ! -path '*/__pycache__/*' ! -path '*.egg-info/*' -print0 | sort -z | xargs -0 sha256sum
    echo "$ROOT $VENV $TORCH ${CXX:-}"; "$VENV/bin/python" --version; } | sha256sum | cut -d ' ' -f 1
}

# fresh_build_dir DIR: a leftover that belongs to another source folder or has no rules is removed.
fresh_build_dir() {
  local home
  [ -d "$1" ] || return 0
  home=$(sed -n 's/^CMAKE_HOME_DIRECTORY:INTERNAL=//p' "$1/CMakeCache.txt" 2>/dev/null || true)
  if [ "$home" != "$ROOT" ] || [ ! -e "$1/build.ninja" ]; then rm -rf "$1"; fi
}

extension_works() { "$VENV/bin/python" ci/check_environment.py --extension "$([ "$INSTALL" = -e ] && echo editable)"; }

# use_other_torch: an environment of its own for $TORCH; the package is copied into it, the working tree's stays.
use_other_torch() {
  VENV=$ROOT/build/torch-$TORCH
  INSTALL=
}

# install_tide: the package into $VENV, editable unless it is another torch's environment.
install_tide() {
  local stamp now leftover
  stamp=$VENV/.tide-built
  [ -e setup.py ] || fail "there is no setup.py in $ROOT; this checkout is not whole"
  for leftover in build/package-*; do fresh_build_dir "$leftover"; done
  now=$(tree_hash setup.py CMakeLists.txt backend transports kernels $([ "$INSTALL" = -e ] || echo python))
  if [ "$(cat "$stamp" 2>/dev/null)" = "$now" ] && extension_works; then return 0; fi
  need_disk 2 "the build"
  rm -f "$stamp"
  say "building tide for torch $TORCH"
  logged build "$VENV/bin/python" -m pip install -v $INSTALL . --no-build-isolation --no-deps || {
    grep -m 20 -nE '(error|Error)( |:)' "$LOGS/build.log" >&2 || true
    explain build "building tide"
  }
  extension_works || fail "tide was built, but python does not find tide._C (log: $LOGS/build.log)"
  echo "$now" >"$stamp"
}

# build_cxx DIR CMAKE_ARGUMENT...: engine and C++ tests, without torch.
build_cxx() {
  local dir=$1 name
  shift
  name=$(basename "$dir")
  fresh_build_dir "$dir"
  logged "configure-$name" cmake -S . -B "$dir" -G Ninja "$@" || explain "configure-$name" "configuring $dir"
  logged "compile-$name" cmake --build "$dir" -j "$(nproc)" || {
    grep -m 20 -nE 'error:' "$LOGS/compile-$name.log" >&2 || true
    explain "compile-$name" "compiling the C++ tests in $dir"
  }
}

say_left_out() {
  local left=()
  command -v nvcc >/dev/null || left+=("CUDA kernels (no nvcc)")
  [ -e /dev/nvidiactl ] || left+=("GPU tests (no GPU)")
  if [ ${#left[@]} -gt 0 ]; then
    local joined
    joined=$(printf '%s, ' "${left[@]}")
    say "left out on this machine: ${joined%, }"
  fi
}

# set_up: everything above, in order, as far as NEED (compiler, environment or tide) says, under a lock so that two commands do not build over each other.
set_up() {
  check_machine
  mkdir -p "$LOGS" 2>/dev/null || fail "cannot write to $ROOT/build; is the disk full or the folder read-only?"
  exec 9>"$ROOT/build/.lock"
  command -v flock >/dev/null && { flock -n 9 || { say "waiting for another ci command"; flock 9; }; }
  install_packages
  if [ "${NEED:-tide}" != compiler ]; then make_environment; fi
  if [ "${NEED:-tide}" = tide ]; then install_tide; fi
  exec 9>&-
  say_left_out
}
