import pytest
import torch

from octavo.train import CheckpointError, TrainConfig, run
from octavo.train.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig
from octavo.train.trained import trained_model, trained_subject


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    text = out / "text.py"
    text.write_text("def f(x):\n    return x + 1\n" * 200)
    sizes = ModelConfig(width=32, layers=1, heads=2, context=16)
    options = RunConfig(out=out / "run", device="cpu", eval_every=0)
    config = TrainConfig(sizes, DataConfig(data=text, batch=4, eval_windows=4), OptimizerConfig(steps=5), options)
    kept = []
    for recipe in ("delayed", "bf16"):
        from octavo.train import Hooks

        run(config, recipe, hooks=Hooks(on_model=kept.append))
    return out / "run", kept


@pytest.mark.parametrize("index", [0, 1], ids=["delayed", "bf16"])
def test_it_is_the_model_that_was_trained(folder, index):
    out, kept = folder
    path = out / ("delayed", "bf16")[index]
    tokens = torch.randint(0, 256, (2, 16))
    for source in (path, path / "checkpoint.pt"):
        model = trained_model(source)
        assert not model.training
        assert torch.equal(model(tokens), kept[index].eval()(tokens))


def test_what_is_no_run(folder, tmp_path):
    out, _ = folder
    for path, says in ((tmp_path / "no", "does not exist"), (tmp_path, "no run"), (out, "holds 2 runs: choose one of")):
        with pytest.raises(CheckpointError, match=says):
            trained_model(path)
    (tmp_path / "checkpoint.pt").write_text("damaged")
    with pytest.raises(CheckpointError, match="damaged"):
        trained_model(tmp_path)


def test_a_recipe_without_a_name_is_refused(folder, tmp_path):
    content = torch.load(folder[0] / "bf16" / "checkpoint.pt", weights_only=True)
    torch.save(content | {"identity": content["identity"] | {"recipe": "Recipe(...)"}}, tmp_path / "checkpoint.pt")
    with pytest.raises(CheckpointError, match="a recipe of its own"):
        trained_model(tmp_path)
    torch.save(content | {"identity": content["identity"] | {"width": 64}}, tmp_path / "checkpoint.pt")
    with pytest.raises(CheckpointError, match="does not hold"):
        trained_model(tmp_path)


def test_a_run_is_looked_at_by_batches_of_text(folder):
    out, kept = folder
    model, loss, batches = trained_subject(out / "delayed", out.parent / "text.py", 2)
    assert torch.equal(model.head.weight, kept[0].head.weight)
    assert [float(loss(model, batch).detach()) > 0 for batch in batches] == [True, True]
