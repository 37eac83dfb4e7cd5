"""What `serve` imports: no torch for its options; no evaluation, code of models or clusters for a server."""

import subprocess
import sys

# For a fresh interpreter: loads the options of `serve`, then the engine without serving, then `evaluate`.
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

def show_loaded():
    of_evaluation = ("service.plots", "service.commands.evaluat", "attncache_core.evaluation", "aiohttp")
    # What transformers imports with the code of any model: seconds, and 120 MB.
    of_models = ("transformers.modeling_utils", "torch._dynamo", "torch.distributed.tensor", "scipy.optimize")
    unneeded = (*of_evaluation, *of_models, "service.shared", "valkey", "obstore", "ray.")
    print([name for name in sys.modules if name.startswith(unneeded)])

serving.serve_with_workers = load_only
with contextlib.suppress(SystemExit):
    main(sys.argv[1:], standalone_mode=False)
show_loaded()
main.commands["evaluate"]
show_loaded()
"""


def test_server_imports_no_evaluation(tiny_checkpoint, tiny_database):
    arguments = [
        *("serve", "--model", str(tiny_checkpoint.folder), "--database", str(tiny_database), "--port", "0"),
        *("--dtype", "float32", "--min-gain", "0", "--verify-rate", "0"),
    ]
    command = [sys.executable, "-c", PROGRAM, *arguments]
    options, server, evaluation = subprocess.check_output(command, text=True, timeout=120).splitlines()
    assert options == "False"
    assert server == "[]"
    # Shows that the check finds modules.
    assert "service.commands.evaluation" in evaluation
