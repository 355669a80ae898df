#!/usr/bin/env bash
# The main job on real input: starts `rlmesh up` in a throw-away folder, evaluates examples/quickstart.json, prints the
# table, stops. `bin` is the folder of the built programs, `python` the interpreter of the private environment.
set -euo pipefail
cd "$(dirname "$0")/.."

state=$(mktemp -d "${TMPDIR:-/tmp}/rlmesh-demo.XXXXXX")
up=""
stop() {
    if [ -n "$up" ]; then
        kill -TERM "$up" 2>/dev/null || true
        wait "$up" 2>/dev/null || true
    fi
    rm -rf "$state"
}
trap stop EXIT
trap 'exit 130' INT TERM

"$bin/rlmesh" up --state "$state/up" --listen 127.0.0.1:0 --python "$python" 2>"$state/up.log" &
up=$!
for _ in $(seq 300); do
    grep -q 'RLMesh runs on this machine' "$state/up.log" && break
    if ! kill -0 "$up" 2>/dev/null; then
        cat "$state/up.log" >&2
        exit 1
    fi
    sleep 0.1
done

rlmesh=("$bin/rlmesh" --state "$state/up")
status=0
"${rlmesh[@]}" eval submit examples/quickstart.json --wait || status=$?
if [ "$status" -ne 0 ]; then
    printf 'The log of `rlmesh up`:\n' >&2
    tail -n 60 "$state/up.log" >&2
    exit "$status"
fi
evaluation=$("${rlmesh[@]}" eval list -o name | head -n 1)
results=${CARGO_TARGET_DIR:-target}/demo-results.json
"${rlmesh[@]}" eval results "$evaluation" -o json >"$results"
cat >&2 <<END

The same as JSON: $results
Keep a server running:  $bin/rlmesh up --python $python
then, in another shell: $bin/rlmesh --state ~/.local/share/rlmesh/local eval submit examples/quickstart.json --wait
END
