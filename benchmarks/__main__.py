"""``python -m benchmarks SUBJECT [options]``."""

import importlib
import sys

SUBJECTS = {
    "on_gpu": "all that is to be done on a GPU: the kernels' tests, kernels, layer, optimizer steps",
    "kernels": "each kernel on a GPU: time, share of the roofline, beside torch.compile and other libraries",
    "layer": "a Linear forward + backward on a GPU, beside bf16 and torchao",
    "tune": "which tiles each kernel is fastest with: writes octavo/kernels/triton/configs.json",
    "compiled": "every Triton kernel's machine code for Hopper and Blackwell, made and checked without a GPU",
    "gpu_host": "host time of casts, norms and a Linear on a GPU's path, without one, beside torchao",
    "host_overhead": "host time of one eager Linear, beside torch.nn.Linear and torchao",
    "communication": "bytes and collectives of a step under FSDP2: counted here, modelled for Llama 3",
    "gather_host": "host time of the hooks by which FSDP2 gathers a weight, beside torchao",
    "cpu_step": "a whole training step of the trainer's model on a CPU, beside bf16 and torchao",
    "compile_matrix": "torch.compile beside eager: graphs, breaks, recompiles, differences; the time it takes",
    "onnx_export": "exported models in onnxruntime: every recipe and opset, the trained demo (about 20 minutes)",
    "optimizer_step": "an optimizer's step, on a GPU or a CPU: time and bytes, beside torch's and torchao's",
    "update_overlap": "updates during backward beside a step after it: time, bytes of gradients, launches",
    "optimizer_convergence": "final losses of every way to keep an optimizer's state beside float32 (an hour)",
    "optimizer_training": "the trainer's run with moments in FP8 and every master, beside float32 (about 10 minutes)",
    "gradient_storage": "validation losses of the trainer's run with gradients in FP8 (20 minutes)",
    "optimizer_state": "what 8 bits do to Adam's state: derived beside Monte-Carlo, for docs/study (3 minutes)",
    "convergence": "final losses of every recipe beside bf16 over three seeds (about 20 minutes on 2 cores)",
}


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in SUBJECTS:
        print("usage: python -m benchmarks SUBJECT [--help]")
        for name, text in SUBJECTS.items():
            print(f"  {name:<23}{text}")
        return 0 if len(sys.argv) > 1 and sys.argv[1] in ("-h", "--help") else 2
    return int(importlib.import_module(f"benchmarks.{sys.argv[1]}").main(sys.argv[2:]) or 0)


if __name__ == "__main__":
    sys.exit(main())
