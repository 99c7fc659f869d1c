"""Every page's Python blocks and commands run, every relative link leads somewhere, every command named exists.

Lines of ```sh and ```bash blocks that begin with ``octavo`` run in a page's folder, in turn with its Python blocks.
A block after the comment ``<!-- no-run: reason -->`` is only compiled or parsed. A block that begins with ``# name.py``
or ``# name.toml`` is also that file.
"""

import json
import re
import shlex
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

from octavo import cli
from octavo.cost.rates import PUBLISHED
from tests.support.command_line import TEXT, TINY
from tests.support.processes import ROOT

EXECUTED = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SLOW = ("export", "hugging-face", "lightning", "mixture-of-experts", "peft")  # libraries that take seconds to import
SLOW += ("ten-minutes", "compile")  # one trains three times, one compiles as tests/compile does
LINKED = sorted(p for p in ROOT.rglob("*.md") if not any(part[0] == "." for part in p.relative_to(ROOT).parts))

LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)|^ {0,3}\[[^\]^][^\]]*\]:\s*<?([^\s>]+)", re.MULTILINE)
SHELL = ("bash", "sh")
FILE = re.compile(r"# (\w+\.(?:py|toml))\n")
HEAVY = re.compile(r"--html|--onnx|config\.json")  # these import libraries for seconds: they run in the full set
LLAMA = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512}
LLAMA |= {"num_attention_heads": 8, "max_position_embeddings": 8192, "tie_word_embeddings": False}
SMALL = [*TINY, "--width", "32"]  # MX has blocks of 32
COMMAND = r"octavo ((?:train|compare|export|plan|inspect|tune|info)\b[^`\n]*)"


@dataclass
class Block:
    language: str
    line: int  # of its first line of code, from 1
    code: str
    no_run: bool


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def split(text: str) -> tuple[str, list[Block]]:
    """A page's prose (its fenced blocks blanked) and its fenced blocks."""
    prose: list[str] = []
    blocks: list[Block] = []
    fence, no_run = "", False
    for number, line in enumerate(text.splitlines(), start=1):
        opening = re.match(r"^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)", line)
        if fence:
            if opening and opening[1].startswith(fence) and not opening[2]:
                fence = ""
            else:
                blocks[-1].code += line + "\n"
        elif opening:
            fence = opening[1]
            blocks.append(Block(opening[2].lower(), number + 1, "", no_run))
            if no_run and blocks[-1].language not in ("python", *SHELL):
                raise ValueError(f"line {number}: a no-run comment stands before a block that does not run")
            no_run = False
        else:
            comment = re.match(r"^\s*<!--\s*no-run:(.*?)-->\s*$", line)
            if comment and not comment[1].strip():
                raise ValueError(f"line {number}: a no-run comment gives its reason")
            if no_run and line.strip():
                raise ValueError(f"line {number}: text stands between a no-run comment and its block")
            no_run = no_run or comment is not None
            prose.append(line)
            continue
        prose.append("")
    if fence or no_run:
        raise ValueError("the page ends inside a block" if fence else "the page ends after a no-run comment")
    return "\n".join(prose), blocks


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings, and those written as HTML."""
    prose, _ = split(page.read_text(encoding="utf-8"))
    slugs = set(re.findall(r"<a\s+(?:id|name)=\"([^\"]+)\"", prose))
    for heading in re.findall(r"^#{1,6}\s+(.*?)\s*#*$", prose, re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        slug = base = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        repeats = 0
        while slug in slugs:
            repeats += 1
            slug = f"{base}-{repeats}"
        slugs.add(slug)
    return slugs


def broken_link(page: Path, target: str, root: Path = ROOT) -> str | None:
    """Return what is wrong with a link on a page, or None. Links to other hosts are not followed."""
    if re.match(r"[a-z][a-z0-9+.-]*:", target):
        return None
    path, _, anchor = target.partition("#")
    file = (page.parent / unquote(path)).resolve() if path else page
    if not file.is_relative_to(root):
        return f"{target} leaves the repository"
    if not file.exists():
        return f"{target} does not exist"
    if anchor and (file.suffix != ".md" or anchor not in anchors(file)):
        return f"{target} has no such anchor"
    return None


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, and a machine that ``octavo info --measure`` finds to be an H100."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "job", raising=False)
    monkeypatch.setattr("octavo.train.report.plot", lambda *_: None)
    monkeypatch.setattr("octavo.cost.rates_of", lambda *_: PUBLISHED["H100"])
    monkeypatch.setattr("octavo.cost.measure", lambda: PUBLISHED["H100"])
    monkeypatch.setattr("octavo.cost.rates.keep", lambda rates: "rates.json")


def make(words: list[str]) -> None:
    """The files of a reader that a command names, if they are not there: small ones."""
    for path in map(Path, words):
        if path.name == "config.json":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(LLAMA))
        elif path.name == "my-text.txt":
            path.write_text(TEXT)
        elif str(path) == "job:training" and not Path("job.py").exists():
            blocks = split((ROOT / "docs/inspect.md").read_text(encoding="utf-8"))[1]
            Path("job.py").write_text(next(block.code for block in blocks if block.code.startswith("# job.py")))
        elif path.parts[:1] == ("runs",) and not path.exists():
            out, recipe = Path(*path.parts[:2]), (*path.parts[2:], "dynamic")[0]
            assert cli.main(["train", *SMALL, "--recipe", recipe, "--out", str(out)]) == 0


def run_commands(block: Block, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's commands; a training is a small one, unless the line says how large it is."""
    for line in re.findall(rf"^(?:python -m )?{COMMAND}", block.code.replace("\\\n", " "), re.MULTILINE):
        command, *words = shlex.split(line, comments=True)
        if HEAVY.search(line) and not full:
            continue
        make([word for word in words if words[words.index(word) - 1] not in ("--out", "--html", "--write", "--onnx")])
        with monkeypatch.context() as patch:
            if "--live" in words:
                patch.setattr("time.sleep", interrupt)
            small = SMALL if command in ("train", "compare") else []
            assert cli.main([command, *small, *words]) == 0, f"line {block.line}: octavo {line}"


def interrupt(seconds: float) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=pytest.mark.full if p.stem in SLOW else []) for p in EXECUTED], ids=name
)
def test_blocks_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, reader: None
) -> None:
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in split(page.read_text(encoding="utf-8"))[1]:
        where = f"line {block.line}: write"
        assert block.language not in {"py", "python3", "pycon"}, f"{where} ```python, or it isn't run"
        assert block.language or not re.search(rf"^{COMMAND}", block.code, re.MULTILINE), f"{where} ```sh"
        if file_name := FILE.match(block.code):
            Path(file_name[1]).write_text(block.code)
        if block.language in SHELL and not block.no_run:
            run_commands(block, request.config.getoption("--full"), monkeypatch)
        if block.language != "python":
            continue
        lines_above = "\n" * (block.line - 1)  # so that a traceback shows the page's line
        compiled = compile(lines_above + block.code, str(page), "exec")
        if not block.no_run:
            exec(compiled, namespace)


@pytest.mark.parametrize("page", LINKED, ids=name)
def test_links_lead_somewhere_and_subcommands_of_dev_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"(`+)(?!`).*?\1", "", split(text)[0])
    targets = [inline or reference for inline, reference in LINK.findall(prose)]
    assert [problem for target in targets if (problem := broken_link(page, target))] == []
    subcommands = re.findall(r"^#   (\w+) ", (ROOT / "dev").read_text(encoding="utf-8"), re.MULTILINE)
    assert {*re.findall(r"\./dev ([a-z]+)\b", text)} <= {*subcommands}


parser = cache(cli.parser)


@pytest.mark.parametrize("page", EXECUTED, ids=name)
def test_commands_are_taken(page: Path) -> None:
    """Commands of blocks parse as a whole; of commands within a sentence, which may be incomplete, options do."""
    prose, blocks = split(page.read_text(encoding="utf-8"))
    lines = "\n".join(block.code for block in blocks if block.language in SHELL)
    for line in re.findall(rf"(?:^|-m ){COMMAND}", lines.replace("\\\n", " "), re.MULTILINE):
        parser().parse_args(shlex.split(line, comments=True))
    for line in re.findall(rf"`{COMMAND}`", re.sub(r"\s+", " ", prose)):
        command, *arguments = shlex.split(line)
        (commands,) = (action.choices for action in parser()._actions if isinstance(action.choices, dict))
        assert {word.partition("=")[0] for word in arguments if word.startswith("--")} <= {
            flag for action in commands[command]._actions for flag in action.option_strings
        }, line


def test_pages_say_what_they_are_for_and_are_in_the_navigation() -> None:
    pages = {page.relative_to(ROOT / "docs").as_posix(): page for page in (ROOT / "docs").rglob("*.md")}
    named = set(re.findall(r"\s(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert pages.keys() - named == set()
    texts = {name: page.read_text(encoding="utf-8") for name, page in pages.items()}
    guides = {name: text.split("\n\n")[1] for name, text in texts.items() if "\n::: octavo" not in text}
    assert [name for name, first in guides.items() if not first.startswith("After this page")] == []


# The checks themselves: each finds its own kind of fault.


def test_split_keeps_lines_and_no_run() -> None:
    prose, blocks = split("# A\n```python\nx = 1\n```\n<!-- no-run: needs a GPU -->\n\n```python\ny\n```\n")
    assert prose.splitlines()[0] == "# A"
    assert "x = 1" not in prose
    assert blocks == [Block("python", 3, "x = 1\n", False), Block("python", 8, "y\n", True)]


@pytest.mark.parametrize(
    "text",
    [
        "```python\nx = 1\n",
        "<!-- no-run: -->\n```python\n```\n",
        "<!-- no-run: why -->\n```toml\n```\n",
        "<!-- no-run: why -->\ntext\n```python\n```\n",
        "<!-- no-run: why -->\n",
    ],
    ids=["open fence", "no reason", "does not run", "text between", "no block"],
)
def test_split_refuses(text: str) -> None:
    with pytest.raises(ValueError, match=r"line \d+|page ends"):
        split(text)


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# The `pair`, [again](x)\n## Two\n## Two\n```\n# no heading\n```\n", encoding="utf-8")
    assert anchors(page) == {"the-pair-again", "two", "two-1"}
    for good in ("page.md", "#two-1", "page.md#the-pair-again", "https://example.org/x"):
        assert broken_link(page, good, tmp_path) is None
    for bad in ("other.md", "#three", "page.md#no-heading", "../outside.md"):
        assert broken_link(page, bad, tmp_path)
