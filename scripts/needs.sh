#!/usr/bin/env bash
# Says in one sentence each what this machine lacks and how to get it; as root on Debian it installs what Debian has.
set -euo pipefail

missing=()
packages=()
need() { # command, package, what for
    if ! command -v "$1" >/dev/null 2>&1; then
        missing+=("$1 is missing ($3): install Debian's package $2, or your system's equivalent.")
        packages+=("$2")
    fi
}
need cc build-essential "it links Rust programs and compiles SQLite"
need protoc protobuf-compiler "the SDK's Rust crates generate their messages with it"
need git git "the sources"
if [ "${CI:-}" = true ] && [ ! -x /usr/lib/postgresql/15/bin/initdb ]; then
    missing+=("PostgreSQL 15 is missing (the store's tests run on it too): install Debian's package postgresql-15.")
    packages+=(postgresql-15)
fi
python=""
for candidate in python3.13 python3.12 python3.11 python3.10 python3; do
    if command -v "$candidate" >/dev/null 2>&1 && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    missing+=("Python 3.10 or newer is missing (models and environments run in it): install Debian's packages python3 and python3-venv.")
    packages+=(python3 python3-venv)
elif ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
    missing+=("Python's venv module is missing: install Debian's package python3-venv.")
    packages+=(python3-venv)
fi

if [ ${#packages[@]} -gt 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    printf 'installing: %s\n' "${packages[*]}" >&2
    apt-get update -qq >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >&2
    missing=()
fi
if ! command -v cargo >/dev/null 2>&1; then
    missing+=("Rust is missing: install it with rustup (https://rustup.rs), version 1.95 or newer.")
elif ! cargo --version | awk '{split($2, v, "."); exit !(v[1] > 1 || v[2] >= 95)}'; then
    missing+=("Rust is too old ($(cargo --version)): update it with \`rustup update stable\` to 1.95 or newer.")
fi
if [ ${#missing[@]} -gt 0 ]; then
    printf '%s\n' "${missing[@]}" >&2
    exit 1
fi
