"""The report: as text, as JSON, and as a page in a browser."""

import dataclasses
import html
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo import cli
from octavo.cost.rates import PUBLISHED
from octavo.errors import MissingExtraError
from octavo.inspect import Finding, Record, diagnose, report, verdict
from octavo.inspect.findings import FORMAT_SQNR
from octavo.inspect.record import OfExperts
from octavo.inspect.report import COLUMNS, Against, changes, table, to_html, to_json
from octavo.inspect.twin import DIFFERING_COSINE
from octavo.inspect.verdicts import DIFFERING_STEPS, WINDOW
from octavo.inspect.what_if import Effect, WhatIf
from octavo.kernels.arguments import Counted

np = pytest.importorskip("numpy")

from tests.inspect.test_command import record  # noqa: E402
from tests.inspect.test_findings import healthy, put  # noqa: E402
from tests.inspect.test_verdicts import with_twin  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
LIMIT = 3_000_000  # bytes of a page
FRAME = """<iframe width=1280 height=900 style="border:0" srcdoc="PAGE"></iframe>"""
LOOK = """
const wait = () => new Promise(done => setTimeout(done, 300));
const all = (selector, of) => [...document.querySelectorAll(selector)].map(of);
while (document.body.dataset.ready !== "yes") await wait();
const rows = () => [...document.querySelectorAll("#findings tbody tr")].filter(row => !row.hidden);
const cells = name => rows().map(row => row.querySelector(`[data-name="${name}"]`).textContent);
const button = name => [...document.querySelectorAll("th button")].find(b => b.textContent === name);
const colours = () => all("canvas", canvas => {
  const bytes = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data, seen = new Set();
  for (let i = 0; i < bytes.length; i += 4) seen.add(bytes[i] << 16 | bytes[i + 1] << 8 | bytes[i + 2]);
  return seen.size;
});
const heights = () => all("canvas", canvas => canvas.height);
const cut = () => all("svg, canvas", plot => plot.getAttribute("width") - plot.closest("figure").clientWidth);
const wider = () => document.documentElement.scrollWidth - innerWidth;
const found = { colours: colours(), before: heights(), cut: cut(), wider: wider() };
found.sections = all("section", section => section.id);
const shapes = ".role-mark path, .role-mark line";
found.marks = all("svg", svg => svg.querySelectorAll(shapes).length);
found.severity = cells("severity"), found.state = cells("state");
found.gone = all("#gone li", item => item.textContent), found.folded = all("summary", summary => summary.textContent);
const begin = button("from step"), begins = () => { begin.click(); return cells("from step"); };
found.up = begins(), found.down = begins(), found.sorted = begin.parentElement.ariaSort;
const select = document.getElementById("cast"), bars = () => document.querySelector("#exponents svg").innerHTML;
const first = bars(); select.selectedIndex = select.selectedIndex ? 0 : 1; select.onchange(); await wait();
found.redrawn = bars() !== first;
const filter = document.getElementById("filter");
filter.value = "layers.1.mlp"; filter.oninput({ target: filter }); await wait();
found.filtered = cells("layer"); found.after = heights();
found.legend = all("#loss .role-legend-label text", text => text.textContent);
found.bars = document.querySelectorAll("#what-if .mark-rect.role-mark path").length;
const said = figure => [figure.firstChild.role, figure.firstChild.ariaLabel, figure.lastChild.textContent];
found.labels = all("figure", said); found.texts = all("section > p", text => text.textContent);
found.links = all("nav a", link => document.querySelector(link.getAttribute("href")) !== null);
filter.value = ""; filter.oninput({ target: filter });
frameElement.width = 390; await wait();
while (document.body.dataset.ready !== "yes") await wait();
found.cards = all("#findings tbody tr", row => row.offsetWidth), found.narrow = cut(), found.wider_narrow = wider();
found.remedies = all("#findings code", code => [code.getBoundingClientRect().right, code.offsetHeight]);
const more = document.getElementById("more"); found.more = [more.hidden, more.textContent];
more.click(); found.all = [more.hidden, document.activeElement.className];
found.fetched = performance.getEntriesByType("resource").map(e => e.name);
const result = parent.document.body.appendChild(parent.document.createElement("pre"));
Object.assign(result, { id: "result", textContent: JSON.stringify(found) });
"""


def broken(layers: int, records: int) -> tuple[Record, list[Finding]]:
    """A record with two findings, in the second and third layer."""
    record = put(healthy(layers, records), 3, assumed=6.0, clipped=0.03)
    put(record, 8, flushed=[0.0, 0.3, *[0.0] * (records - 3)])
    return record, diagnose(record)


def what_if(layers: int, recipes: str = "dynamic delayed rowwise blockwise mx") -> list[dict[str, Any]]:
    """Return rows as octavo.inspect.compare gives them of the model of such a record."""
    names = ["", *(f"model.layers.{place}.mlp" for place in range(layers))]
    effects = [
        Effect(name, recipe, *(0.03,) * 3, 1e-4, 1e-4 * (place + 1), 0.9999, 1.0, place % 2 == 0)
        for place, (recipe, name) in enumerate(itertools.product(recipes.split(), names))
    ]
    return WhatIf({}, tuple(effects), {}, {}, PUBLISHED["H100"]).rows()


def with_experts() -> Record:
    """Return a record of two layers of four experts in one module; the last expert has no tokens from record 3 on."""
    record = healthy()
    names = [name.replace(".mlp", ".mlp.experts.down") for name in record.layers]
    names[0] = names[1].replace("down", "gate_up")
    called = dict(zip(record.layers, names, strict=True))
    rows = [replace(row, layer=called[row.layer], experts=4, features=8) for row in record.rows]
    tokens = np.array([[30.0, 10, 10, 10], [30, 10, 10, 10], [40, 10, 10, 0], [30, 20, 10, 0]])
    shape = record.measures["amax"].shape
    worst = {**record.measures, "flushed": np.full(shape, 0.5)}
    experts = OfExperts(worst, record.exponents, np.full(shape, 2), np.full(shape, 1), dict.fromkeys(names, tokens))
    return replace(record, rows=rows, layers=names, experts=experts)


def test_experts_and_their_tokens() -> None:
    record = with_experts()
    findings = diagnose(record)
    assert findings[0].kind == "flushed" and findings[0].cause.startswith("expert 2 of 4 (10 tokens): ")
    assert record.measures["flushed"].max() < 0.01
    lines = table(record, findings, 2).splitlines()
    load = "model.layers.1.mlp.experts: 4 experts, 0 to 30, expert 0 2 times the mean; 3 none from step 100"
    assert lines[-1].strip() == load  # one for both parts
    content = json.loads(to_json(record, findings))
    (only_load,) = content["loads"]
    assert (only_load["tokens"], only_load["mean"], only_load["idle"]) == ([30, 20, 10, 0], 15, {"3": 100})
    assert content["casts"][0]["flushed"] == [50] * 4
    assert json.loads(to_json(healthy(), []))["loads"] == []


def test_as_text() -> None:
    record, findings = broken(3, 6)
    text = table(record, findings, 1)
    assert text.startswith("3 layers, 6 of the steps 0 to 250 recorded, 2 findings")
    title = "model.layers.1.mlp input of output and grad_weight: stale from step 50"
    assert f" 1  warning ({findings[0].severity:.1f} of 10), {title}" in text
    assert text.splitlines()[1] == f"{verdict(record, findings)}." and findings[0].sentence in text.splitlines()[1]
    assert findings[0].remedy in text and text.endswith("and 1 more: --top 2")
    without = table(record, [dataclasses.replace(findings[0], expected="")], 1)
    assert all(line == "" or line.strip() for line in without.splitlines())
    nothing = f"3 layers, 6 of the steps 0 to 250 recorded, no findings\n{verdict(healthy(3, 6), [])}."
    assert table(healthy(3, 6), [], 5) == nothing
    assert table(healthy(3, 0), [], 5) == "no step is recorded yet"


def test_two_runs() -> None:
    """A finding whose severity grows by 1 is worse; a consequence in the other run is not new."""
    record, (first, second) = broken(3, 6)
    (effect,) = diagnose(put(healthy(3, 6), 0, flushed=0.2))
    earlier = [replace(first, severity=first.severity - 1, consequences=(second,)), effect]
    states = [("worse", first), ("same", second), ("gone", effect)]
    assert changes([first, second], earlier) == states
    assert changes(earlier, [first, second])[0] == ("milder", earlier[0])
    assert changes([first], [])[0][0] == "new"
    against = Against("earlier", healthy(2, 4), earlier)
    text = table(record, [first, second], 1, against)
    assert "against earlier: 1 worse, 1 same, 1 gone\n    worse: " in text
    assert "    gone: warning, model.layers.0.mlp input of output and grad_weight: flushed from step 50" in text
    content = json.loads(to_json(record, [first, second], against=against))["against"]
    assert content["states"] == ["worse", "same"] and [each["layer"] for each in content["gone"]] == [effect.layer]
    assert len(content["casts"]) == 6 and len(content["casts"][0]["sqnr"]) == 1
    assert table(healthy(), [], 5, Against("x", healthy(), [])).endswith("against x: no findings in either run")


def test_the_command_compares_with_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("one", "other/inspect"):
        record(tmp_path / folder)
    one, other, path = (str(tmp_path / name) for name in ("one", "other", "x.json"))
    assert cli.main(["inspect", one, "--against", other, "--json", path]) == 0
    assert f"against {other}/inspect: no findings in either run" in capsys.readouterr().out
    assert json.loads(Path(path).read_text())["against"]["states"] == []
    assert cli.main(["inspect", one, "--against", str(tmp_path)]) == 2
    assert f"{tmp_path} holds no record" in capsys.readouterr().err


def test_as_json() -> None:
    record, findings = broken(3, 200)
    record.measures["sqnr"][100, 0] = 3.0
    record.measures["sqnr"][:, 1] = math.nan
    content = json.loads(to_json(record, findings))
    assert content["findings"][0]["remedy"] == findings[0].remedy
    assert content["records"] == 200 and len(content["steps"]) <= COLUMNS
    casts = {(cast["layer"], cast["role"]): cast for cast in content["casts"]}
    first = casts["model.layers.0.mlp", "input"]
    assert len(first["sqnr"]) == len(content["steps"]) and min(first["sqnr"]) == 3  # the worst is kept
    assert set(casts["model.layers.0.mlp", "weight"]["sqnr"]) == {None}
    assert max(casts["model.layers.2.mlp", "grad_output"]["flushed"]) == 30  # %
    window = content["exponents"][3]["windows"][0]
    assert window["high"] == pytest.approx(math.log2(448 * record.measures["scale_inv"][1, 3]), rel=1e-3)


def test_a_scale_that_is_not_known_has_no_window() -> None:
    record, findings = broken(3, 4)
    record.measures["scale_inv"][:, 3] = math.nan
    in_use, of_amax = json.loads(to_json(record, findings))["exponents"][3]["windows"]
    assert (in_use["low"], in_use["normal"], in_use["high"]) == (None, None, None)
    assert of_amax["low"] < of_amax["normal"] < of_amax["high"]


def test_the_first_step_without_a_finite_loss_is_said() -> None:
    """A curve shows the largest of each few steps; the step at which a loss became NaN is said exactly."""
    record = healthy(3, 4)
    record.scalars["loss"] = list(range(3000)), [5.0 if step < 1372 else math.nan for step in range(3000)]
    content = json.loads(to_json(record, [], against=Against("other", healthy(3, 4), [])))
    assert content["not_finite"] == {"loss": 1372} and content["against"]["not_finite"] == {}
    assert next(point["step"] for point in content["scalars"]["loss"] if point["value"] is None) == 1374


def test_the_numbers_of_twins_are_in_the_json() -> None:
    record = with_twin(healthy(3, 6), 0.99)
    assert json.loads(to_json(record, []))["twins"][2] == {
        "layer": record.layers[2],
        "role": "gradient",
        "cosine": [0.99] * 6,
    }
    record.weights["twin_cosine"][4, 2], record.scalars["twin_loss"][1][3] = np.nan, math.inf
    content = json.loads(to_json(record, []))
    assert content["twins"][2]["cosine"] == [0.99, 0.99, 0.99, 0.99, None, 0.99]
    assert content["twin_apart"]["share"] == pytest.approx(0.001, rel=0.01)
    without = json.loads(to_json(healthy(3, 6), []))
    assert without["twin_apart"] is None and not any(map(any, (row["cosine"] for row in without["twins"])))


def test_the_limits_of_captions_are_in_the_json() -> None:
    """The script states no limit of its own: it reads each from the JSON, which has those of the verdict."""
    content = json.loads(to_json(healthy(), []))
    assert content["limits"]["twin"] == [DIFFERING_COSINE, DIFFERING_STEPS, WINDOW]
    assert content["limits"]["sqnr"] == FORMAT_SQNR and content["lowest"] == Counted.lowest
    script = Path(report.__file__).with_suffix(".js").read_text()
    assert "Below ${cosine} in ${beyond} of ${inTurn} records" in script
    numbers = DIFFERING_COSINE, *FORMAT_SQNR.values(), Counted.lowest
    assert not [number for number in numbers if re.search(rf"(?<![\d.]){number:g}(?!\d)", script)]


def test_a_printed_page_is_light_and_has_the_names_of_columns() -> None:
    style = Path(report.__file__).with_suffix(".css").read_text()
    screen, _, printed = style.partition("@media print")
    hidden = [selector.strip() for selectors in re.findall(r"([^{}]+)\{ display: none", printed)
              for selector in selectors.split(",")]  # fmt: skip
    assert hidden == [".copy", "#more", "nav", ".controls"]  # no th, and no button of one
    assert "color-scheme: light;" in printed and "@media screen and (prefers-color-scheme: dark)" in screen
    assert style.count("prefers-color-scheme") == 1


def test_the_page_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(MissingExtraError, match=r"vl_convert is not installed: pip install '.*\[inspect\]'"):
        to_html(healthy(), [], "run")


@pytest.mark.full
def test_the_page_of_a_long_training_is_small() -> None:
    pytest.importorskip("vl_convert")
    record, findings = broken(100, 1000)
    page = to_html(record, findings, "run", what_if(100))
    assert len(page.encode()) < LIMIT
    assert "<!--" not in page.split("</style>")[1].split("<script")[0]


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    record, findings = broken(12, 40)
    record.events.extend([(100, "recovery", "the loss is a spike"), (100, "skipped", "nothing was touched")])
    record.scalars["lr"] = record.steps, [1e-3] * len(record.steps)
    with_twin(record, 0.995, 1.01).weights["twin_cosine"][3, 1] = 0.7
    findings[0] = replace(findings[0], severity=5.0, consequences=(replace(findings[1], kind="clipped"),))
    other = put(put(healthy(12, 30), 3, assumed=2.5), 12, flushed=0.2)
    against = Against("another run", other, diagnose(other))
    page = to_html(record, findings, "a <run> & more", what_if(12, "dynamic mx"), against)
    seen = looked_at(page, tmp_path)
    plots = (
        "loss twin against-flushed against-clipped against-sqnr flushed clipped sqnr assumed exponents amax resolution"
    )
    assert seen["sections"] == [*plots.split(), "what-if"]
    assert len(seen["colours"]) == 6 and min(seen["colours"]) > 10, "a heat map is empty"
    assert len(seen["marks"]) == 7 and min(seen["marks"]) > 2, "a plot is empty"
    assert seen["severity"] == [f"{each.level} {each.severity:.1f} of 10" for each in findings] and len(findings) == 2
    assert seen["state"] == ["worse", "new"] and len(seen["gone"]) == 1 and seen["folded"] == ["1 consequence"]
    assert seen["up"] == ["50", "100"] and seen["down"] == ["100", "50"] and seen["sorted"] == "descending"
    assert seen["redrawn"] and set(seen["legend"]) == {"switch", "recovery", "skipped", "this run", "another run"}
    assert seen["bars"] == 2 * 2  # of all layers and of the one that the filter leaves, under two recipes
    assert seen["filtered"] == ["model.layers.1.mlp"]
    assert all(after < before for after, before in zip(seen["after"], seen["before"], strict=True))
    assert len(seen["labels"]) == 13 and {role for role, *_ in seen["labels"]} == {"img"}
    assert all(label and shows for _, label, shows in seen["labels"])
    assert (
        "lr: 0.001 in all steps. In high precision the loss of a recorded step is at most 0.99" in seen["labels"][0][2]
    )
    assert seen["labels"][1][2] == "Worst: 0.7 cosine in model.layers.1.mlp gradient, step 150."
    limit = f"Below {DIFFERING_COSINE} in {DIFFERING_STEPS} of {WINDOW} records in turn"
    assert limit in seen["texts"][1] and f"E4M3 keeps about {FORMAT_SQNR['E4M3']}," in " ".join(seen["texts"])
    assert len(seen["links"]) == 15 and all(seen["links"])
    assert max(seen["cut"] + seen["narrow"]) <= 0 and seen["wider"] <= 0 and seen["wider_narrow"] <= 0
    assert max(seen["cards"]) < 390 and all(right < 390 and height for right, height in seen["remedies"])
    assert seen["more"][0] is False and "1 of 2 findings" in seen["more"][1]
    assert seen["all"] == [True, "scrolled all"]
    assert seen["fetched"] == []


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_of_experts_without_twins_in_a_browser(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    record = with_experts()
    assert "twin_loss" not in record.scalars
    against = Against("another run", with_experts(), [])
    seen = looked_at(to_html(record, diagnose(record), "run", (), against), tmp_path)
    of_both = "loss against-flushed against-clipped against-sqnr".split()
    assert seen["sections"] == [*of_both, *"flushed clipped sqnr assumed loads exponents amax resolution".split()]
    captions = {section: text for section, (*_, text) in zip(seen["sections"], seen["labels"], strict=True)}
    assert captions["loads"].startswith("Balanced worst: model.layers.1.mlp.experts, whose fullest expert got 2 times")
    assert len(seen["colours"]) == 5 and min(seen["marks"]) > 1 and all(captions.values())


def looked_at(page: str, folder: Path) -> dict[str, Any]:
    """Return what a script in the page sees, with the network off."""
    path = folder / "page.html"
    page = html.escape(f'{page}<script type="module">{LOOK}</script>')
    path.write_text(FRAME.replace("PAGE", page), encoding="utf-8")
    options = "--headless --no-sandbox --disable-gpu --window-size=1280,900 --virtual-time-budget=60000 --dump-dom"
    offline = "--proxy-server=127.0.0.1:9"
    command = [str(CHROMIUM), *options.split(), offline, f"--user-data-dir={folder / 'user'}", path.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    match = re.search(r'<pre id="result">(.*?)</pre>', shown, re.DOTALL)
    assert match, shown[-2000:]
    return json.loads(html.unescape(match[1]))
