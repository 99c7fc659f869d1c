"""A tiny training by `octavo train`, and the line of a fault."""

from octavo import cli

TEXT = "".join(f"def f{i}(x):\n    return x + {i * i}\n\n" for i in range(400))
TINY = "--width 16 --layers 1 --heads 2 --context 16 --batch 2 --steps 6 --eval-windows 2 --device cpu".split()


def train(*arguments):
    return cli.main(["train", *TINY, "--data", "text.py", *arguments])


def one_line(capsys):
    """Return the one line of a fault."""
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and len(lines) == 1 and lines[0].startswith("octavo: error: "), (out, err)
    return lines[0]
