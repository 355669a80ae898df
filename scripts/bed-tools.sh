#!/usr/bin/env bash
# Builds the programs of the test bed (testbed/<name>/go.mod) once per machine and version, and prints the folder of each as
# `<name> <folder>`. As root on Debian it installs the packages that the bed needs besides. Names as arguments: only those.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
tools="${XDG_CACHE_HOME:-$HOME/.cache}/rlmesh/tools"
# What the bed itself runs; the other modules are built by name.
all=(kubernetes etcd registry coredns kube-router helm)

packages=()
need() { # a file or command of it, Debian package
    command -v "$1" >/dev/null 2>&1 || [ -e "$1" ] || packages+=("$2")
}
need go golang-go
# A program by name is only built.
if [ $# = 0 ]; then
    need containerd containerd
    need runc runc
    need /usr/lib/cni/bridge containernetworking-plugins
    need iptables iptables
    need ipset ipset
    need conntrack conntrack
    need debootstrap debootstrap
    need ip iproute2
    need nsenter util-linux
fi
if [ ${#packages[@]} -gt 0 ]; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
        echo "The test bed needs Debian's packages ${packages[*]}: install them, or run this as root on Debian." >&2
        exit 1
    fi
    printf 'installing: %s\n' "${packages[*]}" >&2
    apt-get update -qq >&2
    # Nothing of theirs may start by itself: the bed runs what it needs.
    DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends "${packages[@]}" >&2
fi

flags() { # name: what goes to the linker
    case $1 in
    kubernetes) # else Helm and clients see v0.0.0
        local version
        version=$(sed -n 's/^.*k8s.io\/kubernetes \(v[0-9.]*\).*$/\1/p' "$root/testbed/kubernetes/go.mod" | head -1)
        local at=k8s.io/component-base/version major=${version#v} minor=${version#v*.}
        echo "-s -w -X $at.gitVersion=$version -X $at.gitMajor=${major%%.*} -X $at.gitMinor=${minor%%.*}"
        ;;
    *) echo '-s -w' ;;
    esac
}

build() { # name
    local name=$1 module="$root/testbed/$1" linker hash out
    linker=$(flags "$name")
    hash=$({ cat "$module/go.mod" "$module/go.sum"; echo "$linker"; } | sha256sum | cut -c1-16)
    out="$tools/$name-$hash"
    if [ ! -d "$out" ]; then
        mkdir -p "$tools"
        (
            flock 9
            [ ! -d "$out" ] || exit 0
            echo "building $name (once per machine and version)" >&2
            rm -rf "$out.new"
            mkdir "$out.new"
            cd "$module"
            CGO_ENABLED=0 go build -trimpath -ldflags "$linker" -o "$out.new/" tool >&2
            # The module path of etcd's program ends in `server`.
            [ "$name" != etcd ] || mv "$out.new/server" "$out.new/etcd"
            mv "$out.new" "$out"
        ) 9>"$tools/$name.lock"
    fi
    echo "$name $out"
}

[ $# -gt 0 ] || set -- "${all[@]}"
for name in "$@"; do
    build "$name"
done
