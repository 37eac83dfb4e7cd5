"""What `serve` imports: no torch for its options; no evaluation, code of models or clusters for a server."""

import importlib.util
import subprocess
import sys

OF_EVALUATION = (
    *("service.plots", "service.commands.evaluate", "service.commands.evaluation"),
    "attncache_core.evaluation",
)
# What transformers imports with the code of any model: seconds, and 120 MB.
OF_MODELS = ("transformers.modeling_utils", "torch._dynamo", "torch.distributed.tensor")
# scipy imports its parts when they are used first. A server with a known gain uses none.
OF_CALIBRATION = ("scipy.special", "scipy.optimize")
OF_CLUSTERS = ("aiohttp", "service.shared", "valkey", "obstore", "ray")

# For a fresh interpreter: loads the options of `serve`, then the engine without serving.
PROGRAM = """
import contextlib
import sys
from service.cli import main

main.commands["serve"]
print("torch" in sys.modules)

from service.commands import serving

def load_only(settings, load_engines, listeners):
    for listener in listeners:
        listener.socket.close()
    next(load_engines(settings, 0))
    sys.exit(0)

serving.serve_with_workers = load_only
with contextlib.suppress(SystemExit):
    main(sys.argv[1:], standalone_mode=False)
print(*sys.modules)
"""


def test_server_imports_no_evaluation(tiny_checkpoint, tiny_database):
    arguments = [
        *("serve", "--model", str(tiny_checkpoint.folder), "--database", str(tiny_database), "--port", "0"),
        *("--dtype", "float32", "--min-gain", "0", "--verify-rate", "0"),
    ]
    command = [sys.executable, "-c", PROGRAM, *arguments]
    options, imported = subprocess.check_output(command, text=True, timeout=120).splitlines()
    assert options == "False"
    assert {"torch", "service.loading.engines"} <= set(imported.split())
    assert all(map(importlib.util.find_spec, OF_EVALUATION))  # the modules still have these names
    assert set(imported.split()).isdisjoint((*OF_EVALUATION, *OF_MODELS, *OF_CALIBRATION, *OF_CLUSTERS))
