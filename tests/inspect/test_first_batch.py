"""A record tells a change of the forward from one of the data, as modules compute the first batch in each record."""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.inspect.departures import departures

np = pytest.importorskip("numpy")

AT, STEPS = 6, 10


class Branch(nn.Module):
    """A residual branch; in the steps of a fault it multiplies what it adds, or its gradient, or drops nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(32, 64), nn.Linear(64, 32), nn.Dropout(0.1)
        self.times = self.times_in_backward = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.times * self.drop(self.down(self.up(x).relu()))
        return x + y.detach() + self.times_in_backward * (y - y.detach())


def fade(branch: Branch) -> None:
    branch.times = 0.1


def multiply_gradient(branch: Branch) -> None:
    branch.times_in_backward = 4.0


def leave_training(branch: Branch) -> None:
    branch.eval()


def write(branch: Branch) -> None:
    branch.down.weight.data.mul_(0.1)


def leave(branch: Branch) -> None:
    pass


def built() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Branch() for _ in range(3)))
    return octavo.convert(model, octavo.recipes.dynamic(), select=lambda module, name: True)


def train(model: nn.Sequential, optimizer: torch.optim.Optimizer, folder: Path, steps: range, **targets: Any) -> None:
    """Train on random numbers; from step AT on ``change`` is done to the second branch, and targets are multiplied."""
    change, of_data = targets.get("change", leave), targets.get("of_data", 1.0)
    data = torch.Generator().manual_seed(steps.start)
    target = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    with octavo.inspect.record(model, folder, 1, optimizer=optimizer, step=steps.start) as recorder:
        for step in steps:
            if step == AT:
                change(model[1])
            x = torch.randn(256, 32, generator=data)
            loss = (model(x) - x @ target * (of_data if step >= AT else 1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss=loss)


def forward_findings(folder: Path) -> list[tuple[str, int]]:
    findings = octavo.inspect.diagnose(octavo.inspect.load(folder))
    every = [each for finding in findings for each in (finding, *finding.consequences)]
    return [(each.layer, each.begins) for each in every if each.kind == "forward"]


@pytest.mark.parametrize(
    ("change", "of_data", "kind", "layer"),
    [
        (fade, 1.0, "forward", "1"),
        (leave_training, 1.0, "forward", "1.drop"),
        (multiply_gradient, 1.0, "backward", ""),
        (write, 1.0, "overwritten", "1.down"),
        (leave, 10.0, "batch", ""),
    ],
)
def test_a_change_of_the_program_is_told_from_one_of_weights_or_data(
    change: Callable[[Branch], None], of_data: float, kind: str, layer: str, tmp_path: Path
) -> None:
    model = built()
    train(model, torch.optim.Adam(model.parameters(), 1e-3), tmp_path, range(STEPS), change=change, of_data=of_data)
    record = octavo.inspect.load(tmp_path)
    first, *_ = octavo.inspect.diagnose(record)
    assert (first.kind, first.layer, first.begins) == (kind, layer, AT)
    assert forward_findings(tmp_path) == ([(layer, AT)] if kind == "forward" else [])
    if kind == "batch":
        assert "compute what they did" in first.sentence
    departure = departures(record)[0]
    assert departure.step == AT and (departure.name == f"the output of {layer} for the same batch") == (
        kind == "forward"
    )


def test_a_run_that_is_resumed_compares_with_the_run_before(tmp_path: Path) -> None:
    """Its code, its weights; where the first batch is damaged, or of other shapes, it begins anew."""
    cases: dict[str, Callable[[Path, nn.Sequential], object]] = {
        "nothing": lambda folder, model: None,
        "code": lambda folder, model: fade(model[1]),
        "weights": lambda folder, model: model[2].up.reset_parameters(),
        "damage": lambda folder, model: (folder / "batch-0.npz").write_bytes(b"?") and fade(model[1]),
        "outputs": lambda folder, model: (folder / "outputs.npz").write_bytes(b"?") and fade(model[1]),
    }
    found, model = {}, built()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    train(model, optimizer, tmp_path / "before", range(AT))
    for name, change in cases.items():
        folder = shutil.copytree(tmp_path / "before", tmp_path / name)
        (resumed := built()).load_state_dict(model.state_dict())
        other = torch.optim.Adam(resumed.parameters(), 1e-3)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        change(folder, resumed)
        train(resumed, other, folder, range(AT, AT + 2))
        found[name] = forward_findings(folder)
        record = octavo.inspect.load(folder)
        is_compared = np.isfinite(record.of_modules["output"][:, 0])
        assert np.flatnonzero(~is_compared).tolist() == [0, *([AT] if name in ("damage", "outputs") else [])]
    assert found == {"nothing": [], "code": [("1", AT)], "weights": [("2.up", AT)], "damage": [], "outputs": []}


def test_a_quarter_of_the_first_batch_runs_again(tmp_path: Path) -> None:
    """Where all arguments have as many rows; of a model that takes no fewer the whole does, and after a resume."""
    seen: list[int] = []

    class Model(nn.Module):
        def __init__(self, takes: int) -> None:
            super().__init__()
            self.layer, self.takes = octavo.nn.Linear(32, 32), takes

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            seen.append(len(x))
            if len(x) < self.takes:
                raise ValueError("too few")
            return self.layer(x * scale)

    for name, (scale, takes, rows, first) in {
        "a part": (torch.ones(16, 1), 1, 4, 1),
        "one scale": (torch.ones(1, 1), 1, 16, 1),
        "no fewer": (torch.ones(16, 1), 16, 16, 2),
    }.items():
        model = Model(takes)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for steps in (range(4), range(4, 6)):  # the second is resumed, and runs what the first one ran again
            with octavo.inspect.record(model, tmp_path / name, 1, optimizer=optimizer, step=steps.start) as recorder:
                for _ in steps:
                    seen.clear()
                    x = torch.randn(16, 32, requires_grad=True)
                    (loss := model(x, scale).square().mean()).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    recorder.step(loss=loss)
                copy.deepcopy(model)  # its hooks hold the recorder's first batch
        record = octavo.inspect.load(tmp_path / name)
        assert seen == [16, rows, 16, 16] and record.events == []  # the step, the first batch, the twin and its slope
        assert np.isfinite(record.of_modules["output"][first:]).all() and record.parameters == [
            "layer.weight",
            "layer.bias",
        ]
        assert np.isfinite(record.of_parameters["change"][first + (name == "no fewer") :]).all()


class Graph(nn.Module):
    """Multiplies what is left of its rows, or those with some indices, by its layers' weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = octavo.nn.Linear(32, 32)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        x = x.values() if x.is_nested else x if x.dim() else x * torch.ones(16, 32)
        if other is not None:
            x = x[other[:, 0] % 128] if other.dtype == torch.int64 else other @ x
        return self.layer(x)  # type: ignore[no-any-return]


def nested(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([x[:5], x[5:]], layout=torch.jagged)


# arguments, and how many elements of the first one run again
WHOLES: dict[str, tuple[Callable[[Tensor], tuple[Tensor, ...]], int]] = {
    "coordinates": (lambda x: (x, torch.eye(16).to_sparse()), 512),
    "compressed rows": (lambda x: (x, torch.eye(16).to_sparse_csr()), 512),
    "nested": (lambda x: (nested(x),), 512),
    "a number": (lambda x: (x[0, 0],), 1),
    "indices of rows": (lambda x: (x, torch.arange(15, -1, -1).unsqueeze(1)), 512),
    "of first rows": (lambda x: (x, torch.tensor([0, 1] * 8).unsqueeze(1)), 128),
    "tokens": (lambda x: (x, torch.arange(0, 2048, 128).unsqueeze(1)), 128),  # some are no indices of rows
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("case", WHOLES)
def test_a_batch_that_has_no_part_runs_as_a_whole(case: str, tmp_path: Path) -> None:
    arguments, elements = WHOLES[case]
    model, seen = Graph(), list[int]()
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0].numel()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for steps in (range(3), range(3, 5)):  # the second is resumed
        with octavo.inspect.record(model, tmp_path, 1, optimizer=optimizer, step=steps.start) as recorder:
            for _ in steps:
                seen.clear()
                (loss := model(*arguments(torch.randn(16, 32))).square().mean()).backward()
                optimizer.step()
                optimizer.zero_grad()
                recorder.step(loss=loss)
                assert seen[1] == elements
    record = octavo.inspect.load(tmp_path)
    assert record.events == [] and np.isfinite(record.weights["twin_cosine"]).all()


class Batch:
    def __init__(self, x: Tensor) -> None:
        self.x: Tensor | None = x


def test_a_first_batch_that_is_gone_ends_the_comparison_and_not_the_twin(tmp_path: Path) -> None:
    """As of an argument that is none of torch's containers, and that the training empties."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = octavo.nn.Linear(32, 32)

        def forward(self, batch: Batch) -> Tensor:
            assert batch.x is not None
            return self.layer(batch.x)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with octavo.inspect.record(model, tmp_path, 1, optimizer=optimizer) as recorder:
        for _ in range(3):
            batch = Batch(torch.randn(16, 32))
            (loss := model(batch).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            batch.x = None
            recorder.step(loss=loss)
    record = octavo.inspect.load(tmp_path)
    assert record.events == [] and np.isfinite(record.weights["twin_cosine"]).all()
    assert record.modules == ["", "layer"] and np.isnan(record.of_modules["output"]).all()


@pytest.mark.full
def test_a_llama_that_is_resumed_with_another_rotary_base_is_named(tmp_path: Path) -> None:
    """Its module, though the weights are those of the checkpoint, and the loss shows nothing."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}

    def train_llama(weights: dict[str, Any] | None, steps: range) -> dict[str, Any]:
        torch.manual_seed(0)
        llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=256))
        octavo.convert(llama, octavo.recipes.delayed(), select=lambda module, name: "lm_head" not in name)
        if weights is not None:
            llama.load_state_dict(weights)
            llama.model.rotary_emb.inv_freq = llama.model.rotary_emb.inv_freq.sqrt()
        optimizer, data = torch.optim.AdamW(llama.parameters(), 1e-3), torch.Generator().manual_seed(steps.start)
        with octavo.inspect.record(llama, tmp_path, 2, optimizer=optimizer, step=steps.start) as recorder:
            for _ in steps:
                tokens = torch.randint(256, (4, 32), generator=data)
                loss = llama(input_ids=tokens, labels=tokens).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                recorder.step(loss=loss)
        return llama.state_dict()

    train_llama(train_llama(None, range(10)), range(10, 16))
    assert forward_findings(tmp_path) == [("model.rotary_emb", 10)]
