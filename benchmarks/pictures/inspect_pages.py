"""The screenshots of octavo inspect's pages in docs/images: a small GPT trains, and headless Chromium looks.

Two faults are in the training on purpose: one layer's gradients are cast to E4M3 with a margin of 11, and one step has
300 times the learning rate. A second run has neither, and its page is compared with the first one's.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image

import octavo
from benchmarks.subjects import ROOT
from octavo import E4M3, RecipeMap, recipes
from octavo.cli import main as octavo_command
from octavo.train import Batches, ModelConfig, load_corpus, next_byte_loss
from octavo.train.trainer import build_model

TAKES = "5 minutes"
MEASURES = ("octavo/inspect",)

STEPS, SPIKE, LR = 160, 100, 1e-3
BROKEN, MARGIN = "blocks.2.mlp.fc2", 11
PICTURES = {  # file: (arguments of octavo inspect, width, height)
    "inspect.png": (["broken"], 1280, 1560),
    "inspect-narrow.png": (["broken"], 390, 1560),
    "inspect-against.png": (["mended", "--against", "broken"], 1280, 2240),
}


def train(folder: Path, is_broken: bool) -> None:
    """Record a training of the byte-level GPT."""
    delayed = recipes.delayed()
    gradient = dataclasses.replace(delayed.grad_input[0], format=E4M3, margin=MARGIN)
    rule = {"grad_input": (gradient, delayed.grad_input[1]), "grad_weight": (gradient, delayed.grad_weight[1])}
    recipe = RecipeMap(delayed, {BROKEN: rule} if is_broken else {})
    model = build_model(ModelConfig(64, 4, 2, 64), recipe, 0)
    optimizer = octavo.optim.AdamW(model.parameters(), lr=LR)
    batches = Batches(load_corpus(None), 64, 16, 0)
    with octavo.inspect.record(model, folder, every=4, optimizer=optimizer) as recorder:
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = lr = LR * (300 if is_broken and step == SPIKE else 1)
            inputs, targets = batches.training(step)
            loss = next_byte_loss(model(inputs), targets)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss=loss, lr=lr, grad_norm=norm)


def screenshot(page: Path, width: int, height: int, to: Path) -> None:
    """Write a picture of the top of a page, in 256 colours."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("the screenshots need Chromium: apt-get install chromium")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    options += [f"--window-size={width},{height}", "--virtual-time-budget=60000", f"--screenshot={to}"]
    options += [f"--user-data-dir={page.parent / 'browser'}"]
    subprocess.run([browser, *options, page.as_uri()], check=True, capture_output=True, timeout=300)
    with Image.open(to) as picture:
        picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(to, optimize=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, help="keep the records of both runs here, or read those that are here")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/images")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        records = (options.records or Path(temporary)).resolve()
        for name, is_broken in (("broken", True), ("mended", False)):
            if not (records / name / "record.json").exists():
                train(records / name, is_broken)
        page = Path(temporary, "page.html")
        for name, (of, width, height) in PICTURES.items():
            with contextlib.chdir(records):  # so that the page names a run by its folder alone
                octavo_command(["inspect", *of, "--top", "0", "--html", str(page)])
            screenshot(page, width, height, options.output.resolve() / name)


if __name__ == "__main__":
    main()
