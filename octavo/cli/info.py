"""`octavo info`: show versions, devices, where FP8 is native, and with --measure what this device does."""

from __future__ import annotations

import argparse
import platform
from importlib.util import find_spec

import torch

import octavo
from octavo.errors import MissingExtraError, require
from octavo.kernels.capability import runs_natively
from octavo.nn.machine import described_on

EXAMPLES = ("octavo info", "octavo info --measure")
EXTRAS = {
    "cli": ("matplotlib",),
    "inspect": ("numpy", "vl_convert"),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "safetensors": ("safetensors", "huggingface_hub"),
}
NATIVE = "native FP8"
EMULATED = "emulated FP8 (the reference)"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``octavo info``."""
    help = "measure what this device does: products, casts, copies; keep it for `octavo plan`, and say where FP8 pays"
    parser.add_argument("--measure", action="store_true", help=help)


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Print versions, devices and extras of this machine; with --measure, also its rates."""
    print(describe_machine())
    if options.measure:
        from octavo.cost import measure
        from octavo.cost.rates import keep
        from octavo.cost.verdict import describe_rates

        print("\nmeasuring ...", flush=True)
        rates = measure()
        print(describe_rates(rates), f"\nkept in {keep(rates)}", sep="\n")
    return 0


def devices() -> list[tuple[str, str, str]]:
    """Return a row for each device: (name for --device, description, native or emulated FP8)."""
    rows = [("cpu", f"{platform.machine()}, {torch.get_num_threads()} threads", EMULATED)]
    for index in range(torch.cuda.device_count()):
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        native = runs_natively(torch.device("cuda", index))
        architecture = "" if torch.version.hip else f", sm_{capability[0]}{capability[1]}"
        rows.append((f"cuda:{index}", name + architecture, NATIVE if native else EMULATED))
    if torch.backends.mps.is_available():
        rows.append(("mps", "Apple GPU", EMULATED))
    if torch.xpu.is_available():
        rows += [(f"xpu:{i}", torch.xpu.get_device_name(i), EMULATED) for i in range(torch.xpu.device_count())]
    return rows


def describe_machine() -> str:
    """Return a text with versions, devices, whether FP8 is native there, and which extras are installed."""
    try:
        from triton import __version__ as triton
    except ImportError:
        triton = "absent"
    versions = {
        "octavo": octavo.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__ + (f" (CUDA {torch.version.cuda})" if torch.version.cuda else ""),
        "triton": triton,
    }
    lines = [*(f"{name:<9}{value}" for name, value in versions.items()), "", "devices"]
    rows = devices()
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines += [f"  {name:<{widths[0]}}  {kind:<{widths[1]}}  {fp8}" for name, kind, fp8 in rows]
    lines += [*described_on([torch.device(name) for name, *_ in rows]), "", "extras"]
    for extra, packages in EXTRAS.items():
        state = "installed"
        try:
            require(extra, *(package for package in packages if find_spec(package) is None))
        except MissingExtraError as error:
            state = str(error)
        lines.append(f"  {extra:<11}  {state}")
    return "\n".join(lines)
