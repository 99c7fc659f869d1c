"""`octavo export`: write a trained model as ONNX or as FP8 weights, and check the former in onnxruntime."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

import torch

from octavo import export
from octavo.errors import ExportError
from octavo.export.layouts import FileLayout
from octavo.train import Batches, load_corpus, next_byte_loss
from octavo.train.loop import trained_model

EXAMPLES = (
    "octavo export runs/train-001/delayed --onnx model.onnx",
    "octavo export runs/train-001/mx --safetensors served/",
)
_OF_ONNX = "opset", "weights", "data"  # the options that --onnx reads
WINDOWS = 16  # of validation text, on which the file is compared with the model


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``octavo export``."""
    parser.usage = f"{parser.prog} [OPTIONS] RUN"
    parser.add_argument("source", type=Path, metavar="RUN", help="a run's folder")
    outputs = parser.add_mutually_exclusive_group(required=True)
    outputs.add_argument("--onnx", type=Path, metavar="FILE", help="the file to write")
    help = "a new folder for FP8 weights and their config.json, as servers read them"
    outputs.add_argument("--safetensors", type=Path, metavar="FOLDER", help=help)
    help = "of FP8 weights (default: compressed-tensors, which holds those of every recipe)"
    parser.add_argument("--layout", choices=get_args(FileLayout), help=help)
    parser.add_argument("--opset", type=int, metavar="N", help="of ONNX, 21 to 24 (default: 21)")
    help = "of other weights than FP8 (default: bfloat16)"
    parser.add_argument("--weights", choices=("bfloat16", "float32"), help=help)
    help = "text to check it on (default: Python's own standard library)"
    parser.add_argument("--data", type=Path, metavar="PATH", help=help)


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Write a run's model as ONNX, and print how near its results in onnxruntime are to octavo's; or as FP8 weights."""
    unread, reader = (("layout",), "--safetensors") if options.onnx is not None else (_OF_ONNX, "--onnx")
    if flags := [f"--{name}" for name in unread if getattr(options, name) is not None]:
        raise ExportError(
            f"{', '.join(flags)} would change nothing here: only {reader} reads such options; leave them out"
        )
    model = trained_model(options.source)
    in_bf16 = 2 * sum(parameter.numel() for parameter in model.parameters())
    if options.safetensors is not None:
        export.to_safetensors(model, options.safetensors, options.layout or "compressed-tensors")
        size = sum(file.stat().st_size for file in options.safetensors.glob("*.safetensors"))
        print(f"wrote {options.safetensors}: {size:,} bytes, {size / in_bf16:.2f} of its weights in bf16")
        return 0
    corpus = load_corpus(options.data)
    corpus.require(model.config)
    tokens, targets = next(Batches(corpus, model.config.context, WINDOWS, seed=0).validation(WINDOWS))
    weights = getattr(torch, options.weights or "bfloat16")
    opset = 21 if options.opset is None else options.opset
    written = export.to_onnx(model, (tokens.int(),), options.onnx, opset=opset, weights=weights)
    sqnr = export.sqnr_in_onnxruntime(model, tokens.int(), written)
    with torch.no_grad():
        ours = float(next_byte_loss(model(tokens), targets))
    theirs = float(next_byte_loss(export.run_onnx(written, tokens.int())[0], targets))
    size = written.stat().st_size
    print(
        f"wrote {written}: {size:,} bytes, {size / in_bf16:.2f} of its weights in bf16\n"
        f"in onnxruntime: SQNR {sqnr:.1f} dB, validation loss {theirs:.4f} nats a byte (octavo {ours:.4f})"
    )
    return 0
