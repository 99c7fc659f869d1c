"""What this machine has and does: versions, devices, whether FP8 is native, which extras are there."""

from __future__ import annotations

import importlib.metadata
import platform
from importlib.util import find_spec

import torch

import octavo
from octavo.kernels.capability import runs_natively
from octavo.kernels.devices import triton_kernels

EXTRAS = {
    "cli": ("rich", "matplotlib"),
    "inspect": ("numpy",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "safetensors": ("safetensors", "huggingface_hub"),
}
NATIVE = "native FP8"
EMULATED = "emulated FP8 (the reference)"


def version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def devices() -> list[tuple[str, str, str]]:
    """Each device as (name for --device, what it is, native or emulated)."""
    found = [("cpu", f"{platform.machine()}, {torch.get_num_threads()} threads", EMULATED)]
    for index in range(torch.cuda.device_count()):
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        native = runs_natively(torch.device("cuda", index))
        architecture = "" if torch.version.hip else f", sm_{capability[0]}{capability[1]}"
        found.append((f"cuda:{index}", name + architecture, NATIVE if native else EMULATED))
    if torch.backends.mps.is_available():
        found.append(("mps", "Apple GPU", EMULATED))
    if torch.xpu.is_available():
        found += [(f"xpu:{i}", torch.xpu.get_device_name(i), EMULATED) for i in range(torch.xpu.device_count())]
    return found


def products_of(device: torch.device) -> list[str]:
    """Which FP8 products torch computes on a device, as it has just shown, and which octavo's Triton kernel."""
    if not runs_natively(device) or triton_kernels() is None:
        return []
    from octavo.kernels.triton.library_matmul import library_kinds

    found = library_kinds(device)
    width = max(map(len, found))
    owners = {True: "torch's product", False: "octavo's Triton kernel: torch's is not there, or not right"}
    return ["", f"products on {device}", *(f"  {kind:<{width}}  {owners[right]}" for kind, right in found.items())]


def configurations() -> list[str]:
    """Where the Triton kernels' tiles come from on this machine's GPU."""
    if not any(runs_natively(torch.device("cuda", index)) for index in range(torch.cuda.device_count())):
        return []
    from octavo.kernels.triton.launch import tuned_file

    path = tuned_file()
    if path is not None and path.exists():
        return ["", f"kernels' tiles: tuned on this GPU, {path}"]
    return ["", "kernels' tiles: octavo's own; `octavo tune` measures the best ones for this GPU in 10 minutes"]


def describe() -> str:
    """All of it, as text."""
    versions = {
        "octavo": octavo.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__ + (f" (CUDA {torch.version.cuda})" if torch.version.cuda else ""),
        "triton": version("triton") or "absent",
    }
    lines = [f"{name:<9}{value}" for name, value in versions.items()]
    lines += ["", "devices"]
    rows = devices()
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines += [f"  {name:<{widths[0]}}  {what:<{widths[1]}}  {fp8}" for name, what, fp8 in rows]
    for index in range(torch.cuda.device_count()):
        lines += products_of(torch.device("cuda", index))
    lines += [*configurations(), "", "extras"]
    for extra, packages in EXTRAS.items():
        absent = [package for package in packages if find_spec(package) is None]
        state = "installed" if not absent else f"pip install octavo[{extra}] ({', '.join(absent)} absent)"
        lines.append(f"  {extra:<11}  {state}")
    return "\n".join(lines)
