# Set-up. On Colab and Kaggle this installs the workbench, once a session. Where it can be imported already, as in a
# checkout's JupyterLab, VS Code or devcontainer, nothing happens.
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path

if importlib.util.find_spec("workbench") is None:
    wanted = ["REQUIREMENT"]
    if "google.colab" not in sys.modules and "KAGGLE_KERNEL_RUN_TYPE" not in os.environ:
        raise ModuleNotFoundError(f"The workbench is missing here. Install it: pip install {shlex.join(wanted)}")
    # The platform's packages stay as they are, PyTorch with its CUDA above all: pip gets a list of what it may not
    # change. If nothing can be installed beside all of them, the list is PyTorch and its libraries alone.
    everything = {}
    torch_alone = {}
    for package in distributions():
        name = str(package.metadata["Name"])
        if re.match(r"[\d.]+((a|b|rc|.post|.dev)\d+)*(\+|$)", package.version):
            everything[name] = package.version
            if name.startswith(("torch", "triton", "nvidia-", "cuda-")):
                torch_alone[name] = package.version
    constraints = Path(tempfile.gettempdir(), "kept.txt")
    for kept in (everything, torch_alone):
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in kept.items()))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", str(constraints), *wanted]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            break
    else:
        raise RuntimeError(
            f"{done.stderr[-2000:]}\npip cannot install the workbench beside PyTorch {everything.get('torch')}, which "
            "is kept. If a newer one is wanted, choose the platform's newest runtime or environment."
        )
    importlib.invalidate_caches()
