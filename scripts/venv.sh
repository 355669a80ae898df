#!/bin/sh
# Makes a private Python environment from a locked requirements file, once, and prints its path.
#
#   scripts/venv.sh scripts/python/requirements.txt
#
# stdout is the path and nothing else; progress and errors go to stderr. The environment lies in
# ${XDG_CACHE_HOME:-$HOME/.cache}/rlmesh/venv-<hash>, the hash being of the requirements and the
# interpreter, so a changed lock makes a new one. Built aside and renamed when complete; callers
# at the same time wait for each other. RLMESH_BASE_PYTHON names an interpreter to use.
set -eu

say() { printf '%s\n' "venv.sh: $*" >&2; }
die() { say "$*"; exit 1; }

[ $# -eq 1 ] || { say "usage: scripts/venv.sh <requirements file>"; exit 2; }
requirements=$1
[ -r "$requirements" ] || die "cannot read the requirements file '$requirements'."
[ -n "${XDG_CACHE_HOME:-}${HOME:-}" ] || die "neither XDG_CACHE_HOME nor HOME is set, so there is no place for the environment."

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
}

python=
if [ -n "${RLMESH_BASE_PYTHON:-}" ]; then
    new_enough "$RLMESH_BASE_PYTHON" ||
        die "RLMESH_BASE_PYTHON ('$RLMESH_BASE_PYTHON') does not run or is older than Python 3.10."
    python=$RLMESH_BASE_PYTHON
else
    # Plain python3 comes last: it may be newer than the versions the lock has wheels for.
    for candidate in python3.13 python3.12 python3.11 python3.10 python3; do
        if command -v "$candidate" >/dev/null 2>&1 && new_enough "$candidate"; then
            python=$candidate
            break
        fi
    done
fi
[ -n "$python" ] || die "Python 3.10 or newer is missing; on Debian or Ubuntu install it with: apt-get install python3 python3-venv"
"$python" -c 'import venv, ensurepip' >/dev/null 2>&1 ||
    die "this Python ($python) cannot make virtual environments; on Debian or Ubuntu install: apt-get install python3-venv"
command -v flock >/dev/null 2>&1 || die "the command flock is missing; on Debian or Ubuntu install: apt-get install util-linux"

digest=$("$python" - "$requirements" <<'PY'
import hashlib
import platform
import sys

digest = hashlib.sha256()
with open(sys.argv[1], "rb") as lock:
    digest.update(lock.read())
base = f"{sys.implementation.name} {platform.python_version()} {platform.machine()} {sys.base_prefix}"
digest.update(base.encode())
print(digest.hexdigest()[:16])
PY
)

cache=${XDG_CACHE_HOME:-$HOME/.cache}/rlmesh
target=$cache/venv-$digest
if [ -e "$target/.complete" ]; then
    printf '%s\n' "$target"
    exit 0
fi

mkdir -p "$cache"
exec 9>"$cache/venv-$digest.lock"
flock 9
# Another caller may have made it while this one waited.
if [ -e "$target/.complete" ]; then
    printf '%s\n' "$target"
    exit 0
fi

# An interrupted caller leaves its half-made folder; the lock is ours, so nobody uses it.
rm -rf "$target" "$cache/venv-$digest".new.*
building=$(mktemp -d "$cache/venv-$digest.new.XXXXXX")
trap 'rm -rf "$building"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

say "making a Python environment for $requirements with $("$python" --version 2>&1) (once)"
# 9>&-: a child that outlives this script must not keep the lock.
"$python" -m venv "$building" >&2 9>&- || die "python -m venv failed (see above)."
"$building/bin/python" -m pip install --quiet --disable-pip-version-check --no-input \
    --require-hashes -r "$requirements" >&2 9>&- ||
    die "pip could not install $requirements (see above); without a network the packages must be in pip's cache."

# Scripts and activation name the folder they were made in: make them name the final one.
"$building/bin/python" - "$building" "$target" >&2 9>&- <<'PY'
import pathlib
import sys

old, new = (path.encode() for path in sys.argv[1:])
for path in [*pathlib.Path(sys.argv[1], "bin").iterdir(), pathlib.Path(sys.argv[1], "pyvenv.cfg")]:
    if path.is_symlink() or not path.is_file():
        continue
    content = path.read_bytes()
    if old in content:
        path.write_bytes(content.replace(old, new))
PY
: >"$building/.complete"
mv -T "$building" "$target"
trap - EXIT INT TERM
printf '%s\n' "$target"
