"""Stands in for the SDK's servers: takes the same arguments and environment, serves a socket, misbehaves on order."""
import json
import os
import socket
import subprocess
import sys
import time

args = sys.argv[1:]
if args[:2] == ["-m", "rlmesh._describe"]:
    kind, entrypoint, _, out = args[2:]
    if entrypoint == "bad:Thing":
        print("Traceback (most recent call last):", file=sys.stderr)
        print("ModuleNotFoundError: No module named 'bad'", file=sys.stderr)
        sys.exit(1)
    if entrypoint == "slow:Thing":
        time.sleep(100)
    print("a line of the module's own")
    with open(out, "w") as file:
        print(json.dumps({"kind": kind, "target": {"entrypoint": entrypoint}}), file=file)
    sys.exit(0)

assert args[:2] == ["-m", "rlmesh.serve"], args
env = args[2] == "--env"
kwargs = json.loads(os.environ["RLMESH_MAKE_KWARGS"])
address = os.environ["RLMESH_ADDRESS"]
print("serving", "env" if env else "model", args[-1], "lanes", os.environ.get("RLMESH_NUM_ENVS"), "cwd", os.getcwd(), flush=True)
print("omp", os.environ.get("OMP_NUM_THREADS"), "cuda", os.environ.get("CUDA_VISIBLE_DEVICES"), "framework", os.environ.get("RLMESH_FRAMEWORK"), flush=True)
for name in list(os.environ):
    if "rlm_jt_" in os.environ[name] or "rlm_cc_" in os.environ[name]:
        print("SECRET IN ENVIRONMENT", name, flush=True)
behave = kwargs.get("behave", "")
if behave == "unknown_param":
    print("rlmesh.params._resolve.UnknownParamError: unknown parameter(s): behave", file=sys.stderr)
    sys.exit(1)
if behave == "slow":
    time.sleep(100)
if behave == "exit":
    sys.exit(kwargs["status"])
sys.stdout.buffer.write(b"\xff\xfe garbage\n")
sys.stdout.flush()
if behave == "grandchild":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)  # rlm-test-" + kwargs["mark"]])
assert address.startswith("unix://"), address
path = address[len("unix://"):]
server = socket.socket(socket.AF_UNIX)
server.bind(path)
server.listen(16)
count = 0
once = kwargs.get("once")
while True:
    connection, _ = server.accept()
    count += 1
    if behave == "crash_once" and not os.path.exists(once):
        open(once, "w").close()
        time.sleep(0.3)
        print("RuntimeError: boom", file=sys.stderr, flush=True)
        os._exit(kwargs["status"])
    if behave == "crash":
        time.sleep(0.05)
        os._exit(kwargs["status"])
    connection.close()
