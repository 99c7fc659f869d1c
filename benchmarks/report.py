"""Everything in README and the pages that is made by a script: tables, pictures, and numbers in prose.

The two PNG there are screenshots of the page that ``octavo inspect RUN --html FILE`` writes.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks import readme, sentences
from benchmarks.common import predicted, where
from benchmarks.common.pages import filled
from benchmarks.compile import compile_matrix, compiled_bytes, onnx_export
from benchmarks.distributed import communication, communication_model, gather_host, sharded_load
from benchmarks.host import gpu_host
from benchmarks.kernels import accumulation, grouped_accuracy, kernels, layer
from benchmarks.machine_code import emulated, silicon
from benchmarks.optimizer import muon_training, optimizer_convergence, optimizer_state, optimizer_step
from benchmarks.pictures import data_flow, gather, layouts, losses, memory, mesh, step_flow
from benchmarks.subjects import ROOT, STUDIES, history
from benchmarks.training import (
    causes,
    checkpointing,
    cpu_step,
    llama_convergence,
    llama_step,
    parity,
    planned_step,
    quality_study,
    saved_bytes,
)

PAGES: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "README.md": readme.TABLES,
    "docs/compile.md": compile_matrix.TABLES | compiled_bytes.TABLES | cpu_step.TABLES,
    "docs/communication.md": communication_model.TABLES | communication.TABLES | gather_host.TABLES,
    "docs/export.md": onnx_export.TABLES,
    "docs/hugging-face.md": kernels.LIGER,
    "docs/emulator.md": emulated.TABLES | silicon.TABLES,
    "docs/guides/which-recipe.md": where.TABLES,
    "docs/inspect.md": causes.TABLES,
    "docs/kernels.md": accumulation.TABLES
    | gpu_host.TABLES
    | kernels.TABLES
    | layer.TABLES
    | llama_step.TABLES
    | planned_step.BLOCK_TABLES,
    "docs/many-gpus.md": sharded_load.TABLES,
    "docs/modules.md": saved_bytes.TABLES | llama_convergence.TABLES | checkpointing.TABLES | predicted.MODULES,
    "docs/nvfp4.md": quality_study.NVFP4,
    "docs/optimizer.md": muon_training.TABLES | optimizer_step.TABLES,
    "docs/plan.md": communication_model.PLAN_TABLES | planned_step.TABLES,
    "docs/study/mixture-of-experts.md": grouped_accuracy.TABLES | predicted.MIXTURES,
    "docs/study/optimizer-state.md": optimizer_state.TABLES | optimizer_convergence.TABLES,
    "docs/study/training-quality.md": quality_study.TABLES | parity.TABLES,
}

PICTURES: Mapping[str, Callable[[], str]] = {
    "docs/images/scale-layouts.svg": layouts.layouts,
    "docs/images/layer.svg": data_flow.data_flow,
    "docs/images/losses.svg": losses.losses,
    "docs/images/quality-gaps.svg": losses.final_gaps,
    "docs/images/memory.svg": memory.memory,
    "docs/images/step.svg": step_flow.step_flow,
    "docs/images/gather.svg": gather.gather,
    "docs/images/mesh.svg": mesh.mesh,
}


def tables_of() -> dict[str, Mapping[str, Callable[[], str]]]:
    """Return each page's tables; for pages with studies also the commits that these measured."""
    studies = {page: {"history": functools.partial(history, page)} for page in STUDIES.values()}
    return {page: PAGES.get(page, {}) | studies.get(page, {}) for page in PAGES | studies}


def made() -> dict[Path, str]:
    """Return the text that each file should have."""
    texts = {}
    tables = tables_of()
    for name in tables | sentences.SENTENCES:
        text = filled((ROOT / name).read_text(encoding="utf-8"), tables.get(name, {}))
        texts[ROOT / name] = sentences.written(name, text)
    return texts | {ROOT / name: drawn() for name, drawn in PICTURES.items()}


def main(argv: Sequence[str]) -> int:
    """Write files that have changed, or with --check name those that are not as the results are."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where something differs")
    check = parser.parse_args(argv).check
    texts = made().items()
    old = {path: text for path, text in texts if not path.exists() or path.read_text(encoding="utf-8") != text}
    for path, text in old.items():
        print("old:" if check else "written:", path.relative_to(ROOT))
        if not check:
            path.write_text(text, encoding="utf-8")
    return int(check and bool(old))
