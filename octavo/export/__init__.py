"""Models for others to run: ONNX, and FP8 weights as servers read them; those weights back in."""

from octavo.export.checkpoints import iterate_fp8, to_safetensors
from octavo.export.loading import load_fp8
from octavo.export.onnx_model import run_onnx, sqnr_in_onnxruntime, to_onnx

__all__ = ["to_onnx", "run_onnx", "sqnr_in_onnxruntime", "to_safetensors", "load_fp8", "iterate_fp8"]
