"""Models for others to run: ONNX, and FP8 weights as servers read them."""

from octavo.export.checkpoints import to_safetensors
from octavo.export.onnx_model import to_onnx
from octavo.export.rollout import iterate_fp8
from octavo.export.runtime import run_onnx, sqnr_in_onnxruntime

__all__ = ["to_onnx", "run_onnx", "sqnr_in_onnxruntime", "to_safetensors", "iterate_fp8"]
