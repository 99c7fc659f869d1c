"""``python -m benchmarks SUBJECT [options]``; ``all`` runs them, ``stale`` and ``report`` look at what was measured."""

import sys

from benchmarks.subjects import module_of, stale, subjects


def main() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name == "stale":
        lines = stale()
        print("\n".join(lines) or "every result is of the code as it is")
        return int(bool(lines))
    if name == "all":
        from benchmarks import all_results

        return all_results.main(sys.argv[2:])
    if name == "report":
        from benchmarks import report

        return report.main(sys.argv[2:])
    if name in subjects():
        return int(module_of(name).main(sys.argv[2:]) or 0)
    print("usage: python -m benchmarks SUBJECT [--help]\n")
    for subject in subjects().values():
        print(f"  {subject.name:<23}{subject.about} ({subject.takes})")
    print(f"  {'all':<23}Make every result again that is not of the code as it is (2½ hours; --list, --stale, --only)")
    print(f"  {'stale':<23}Results that are older than the code they speak of")
    print(
        f"  {'report':<23}Write all tables and pictures of pages from the results (--check: are they what these say?)"
    )
    return 0 if name in ("-h", "--help") else 2


if __name__ == "__main__":
    sys.exit(main())
