"""What MkDocs adds to docs/: README as first page, notebooks, the command's help, files that are linked, llms.txt."""

import os
import re
import sys
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
from notebooks import as_markdown  # beside this file

ROOT = Path(__file__).parents[1]
PAGES = {  # pages that lie outside docs/, and where the site has them
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"(?<=\]\()(?![a-z][a-z0-9+.-]*:|#)([^)#\s]+)")
CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
PAPER = re.compile(r"(?<!\[)\barXiv (\d{4}\.\d{4,5})")
THREAD = re.compile(r"(?<![\w/\[])([\w.-]+/[\w.-]+)#(\d+)(?![\w-])")


def cited(text: str) -> str:
    """Papers and threads that a text names, as links; its code as it is."""
    parts = CODE.split(text)
    for index in range(0, len(parts), 2):
        linked = PAPER.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", parts[index])
        parts[index] = THREAD.sub(r"[\1#\2](https://github.com/\1/issues/\2)", linked)
    return "".join(parts)


def targets(text: str, source: str) -> dict[str, str]:
    """The links of a page at ``source`` that lead to something in the repository, and the paths they lead to."""
    found = {link: normpath(join(dirname(source), link)) for link in LINK.findall(text)}
    return {link: path for link, path in found.items() if (ROOT / path).exists()}


def place(path: str) -> str:
    """Where the site has what lies at this path of the repository."""
    if (ROOT / path).is_dir():
        return f"files/{path}/index.md"
    return PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else f"files/{path}")


def command_page() -> str:
    """The command's own help, of it and of each sub-command."""
    from octavo.cli import parser

    os.environ["COLUMNS"] = "100"  # argparse folds its lines there
    top = parser()
    (commands,) = (action.choices for action in top._actions if isinstance(action.choices, dict))
    parts = ["# The command", "After this page you know every option of `octavo`. It is what `--help` prints."]
    for name, each in {"octavo": top, **{f"octavo {name}": found for name, found in commands.items()}}.items():
        parts.append(f"## {name}\n\n```text\n{each.format_help().strip()}\n```")
    return "\n\n".join(parts)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages that lie outside docs/, and the files and folders that any page links to."""
    sources = {f"docs/{file.src_uri}": file.abs_src_path for file in files.documentation_pages()}
    sources |= {path: str(ROOT / path) for path in PAGES if (ROOT / path).exists()}
    linked: set[str] = set(sources) & set(PAGES)
    for source, path in sources.items():
        linked |= set(targets(Path(str(path)).read_text(encoding="utf-8"), source).values())
    files.append(File.generated(config, "reference/command.md", content=command_page()))
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        name = Path(file.src_uri).stem
        content = as_markdown(Path(str(file.abs_src_path)).read_text(encoding="utf-8"), name)
        files.append(File.generated(config, f"notebooks/{name}.md", content=content))
    for folder in [path for path in linked if (ROOT / path).is_dir()]:
        names = sorted(entry.name for entry in (ROOT / folder).iterdir() if entry.is_file())
        listing = f"# {folder}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)
        page = File.generated(config, place(folder), content=listing)
        files.append(page)
        linked |= {f"{folder}/{name}" for name in names}
    for path in sorted(linked):
        if (ROOT / path).is_file() and files.get_file_from_path(place(path)) is None:
            files.append(File.generated(config, place(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as the repository has them, turned into the site's."""
    here = page.file.src_uri
    source = next((path for path, uri in PAGES.items() if uri == here), f"docs/{here}")
    moved = {link: relpath(place(path), dirname(here) or ".") for link, path in targets(markdown, source).items()}
    return cited(LINK.sub(lambda match: moved.get(match[1], match[1]), markdown))


_navigation: list[Navigation] = []


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> None:
    """Remember the pages' order, for llms.txt."""
    _navigation[:] = [nav]


def first_sentence(markdown: str) -> str:
    """What a page begins with, as plain text; nothing where it begins with something else than prose."""
    text = re.sub(r"^# .*\n+", "", markdown).split("\n\n")[0]
    if not re.match(r"\w|\[|\*|`", text) or text.startswith("```"):
        return ""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(text.split()))
    return re.split(r"(?<=[.:])\s", text)[0].rstrip(":")


def on_post_build(config: MkDocsConfig) -> None:
    """llms.txt (llmstxt.org): each page, by its part of the site, with its first sentence."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}.", ""]
    for section in _navigation[0].items:
        if isinstance(section, Section):
            lines += [f"## {section.title}", "", *(line for child in section.children for line in listed(child)), ""]
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines), encoding="utf-8")


def listed(item: Any) -> list[str]:
    """An entry of the navigation, and what is under it."""
    if isinstance(item, Section):
        return [line for child in item.children for line in listed(child)]
    sentence = first_sentence(item.markdown or "")
    return [f"- [{item.title}]({item.url})" + (f": {sentence}" if sentence else "")]


class Docstrings(griffe.Extension):
    """Citations become links; ``Example:``, which ours have for one, the section of Google's style."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Give the parser what it knows."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", cited(obj.docstring.value), flags=re.MULTILINE)
