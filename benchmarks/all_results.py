"""Make every result again that is not of the code as it is, each in a process of its own, then the pages' tables.

What is interrupted goes on where it was: a subject whose rows are all of this code is left out. Commit changes first,
for only rows of a commit are results. Machine code is of Triton 3.9: ``./dev bench --triton 3.9 all`` makes what is
older than the kernels.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata

from benchmarks import report
from benchmarks.common.measure import commit, device_name
from benchmarks.subjects import ALL, OF_TRITON, ROOT, TRITON, change_since, commits_of, results, subjects

CODE = ("octavo", "emulator", "benchmarks/*.py")


def is_made(subject: str, code: tuple[str, ...]) -> bool:
    """Whether all rows of all CSVs of a subject are of this code."""
    commits_by_name = {name: commits_of(path) for name, path in results()}
    commits = [one for name in ALL[subject] for one in commits_by_name.get(name, [""])]
    return all(change_since(one, code) == "" for one in commits)


def drop_other_devices(names: Sequence[str]) -> None:
    """Delete the CSVs of other devices where this one's are: all results are of one kind of machine."""
    for name, path in results():
        path_here = path.with_name(f"{name}-{device_name()}.csv")
        if name in names and path.stem != name and path != path_here and path_here.exists():
            path.unlink()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks all", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=ALL, default=list(ALL), metavar="SUBJECT")
    parser.add_argument("--stale", action="store_true", help="what `stale` names alone, not all of another commit")
    parser.add_argument("--list", action="store_true", help="what would be made, and how long that takes; make nothing")
    options = parser.parse_args(arguments)
    subjects_by_name, missed = subjects(), []
    if commit().endswith("+") and not options.list:
        parser.error("commit your changes first: rows of what is not committed are no results")
    for subject in options.only:
        code = subjects_by_name[subject].measures if options.stale or subject in OF_TRITON else CODE
        if is_made(subject, code):
            print(f"{subject}: made")
        elif (subject in OF_TRITON) != metadata.version("triton").startswith(TRITON):
            print(f"{subject}: left to {'' if subject in OF_TRITON else 'the environment without '}--triton {TRITON}")
        elif options.list:
            print(f"{subject}: {subjects_by_name[subject].takes}")
        else:
            print(f"--- {subject} ({subjects_by_name[subject].takes})", flush=True)
            begin = time.monotonic()
            command = [sys.executable, "-m", "benchmarks", subject]
            status = subprocess.run(command, cwd=ROOT, check=False).returncode
            drop_other_devices(ALL[subject])
            is_current = is_made(subject, code)
            if status or not is_current:
                missed.append(f"{subject}: {f'exit status {status}' if is_current else 'not made'}")
            print(f"--- {subject}: {time.monotonic() - begin:.0f} s", flush=True)
    if not options.list:
        report.main([])
    print(*missed, sep="\n")
    return int(bool(missed))
