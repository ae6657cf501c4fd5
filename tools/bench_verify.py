"""What it costs to prove that nothing was damaged: python tools/bench_verify.py [--layers N] [--old SRC]

Conversions of a model of Qwen2.5-1.5B's shape (see bench_material) as they are, and with every check of the source
switched off in the same code: the checksum of an .apr while it streams, the digests of the source files, the comparison
of what is restored with them. Whole processes taking turns; a ratio is that of the fastest rounds, in brackets the
median of the ratios within a round, of seconds and of CPU seconds.

    --old SRC          a third contestant: the package in another tree, such as `git worktree add /tmp/old COMMIT`
    --only CASE ...    only these cases
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench_material import QUICK_LAYERS, qwen_folder
from bench_measure import Job, Run, Series, clear, interleaved, machine, process, touch, warm

ON, OFF, OLD = "checked", "unchecked", "old"


def convert(way: str, old: Path | None, source: Path, target: Path, *options: str) -> Run:
    """One `apr convert`, from start to end."""
    words: tuple[str | Path, ...] = ("convert", source, "-o", target, "--quiet", *options)
    if way == OLD:
        return process(sys.executable, "-m", "aprfmt", *words, environment={"PYTHONPATH": str(old)})
    return process(sys.executable, __file__, "child", way, *words)


def child(way: str, arguments: list[str]) -> None:
    """The command line, with or without the checks."""
    from aprfmt.cli.main import main

    if way == OFF:
        switch_off()
    sys.argv[1:] = arguments
    sys.exit(main())


def switch_off() -> None:
    """Takes every check of the source out of this process."""
    from dataclasses import replace

    from aprfmt.convert import source_manifest, source_manifest_writer
    from aprfmt.convert.targets import apr
    from aprfmt.io.source import Source
    from aprfmt.model import Model

    for owner, name in ((Model, "record_reads"), (Model, "check_intact"), (Source, "check_unchanged")):
        setattr(owner, name, lambda self: None)
    layouts = source_manifest.SourceManifest.layouts
    source_manifest.SourceManifest.layouts = lambda self: [replace(file, digest=None) for file in layouts(self)]  # type: ignore[method-assign]
    make = source_manifest_writer.manifest_of_source
    setattr(apr, "manifest_of_source", lambda *args, **options: make(*args, **{**options, "kind": None}))  # noqa: B010


Case = tuple[str, str, tuple[str, ...]]
"""Source, target, and options of a conversion."""

CASES: dict[str, Case] = {
    "folder to .apr": ("model", "out.apr", ()),
    ".apr to folder": ("folder.apr", "out", ()),
    ".apr to GGUF": ("folder.apr", "out.gguf", ()),
    "GGUF to .apr": ("model.gguf", "out.apr", ()),
    ".apr to its GGUF": ("gguf.apr", "out.gguf", ()),
    ".apr to .apr": ("folder.apr", "out.apr", ()),
    "GGUF to Q8_0": ("model.gguf", "out.gguf", ("--dtype", "q8_0")),
}


def ratios(series: Series, base: Series, value: Callable[[Run], float]) -> str:
    """Fastest by fastest, and the median of the ratios within a round, as percentages above one."""
    fastest = min(map(value, series.values())) / min(map(value, base.values()))
    median = statistics.median(value(series[n]) / value(base[n]) for n in series.keys() & base.keys())
    return f"{fastest - 1:+.1%} ({median - 1:+.1%})"


def main() -> None:
    """Makes the models and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2 * QUICK_LAYERS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--old", type=Path)
    parser.add_argument("--no-fsync", action="store_true")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--work", type=Path, help="folder for a temporary folder with all files")
    options = parser.parse_args()
    ways = [ON, OFF, *([OLD] if options.old else [])]
    with tempfile.TemporaryDirectory(dir=options.work, prefix="bench") as name:
        work = Path(name)
        print(machine(work), flush=True)
        n_bytes = qwen_folder(work / "model", options.layers)
        for source, target in (("model", "folder.apr"), ("folder.apr", "model.gguf"), ("model.gguf", "gguf.apr")):
            convert(ON, None, work / source, work / target)
        bases = ways[1:]
        print(f"\n| {n_bytes / 1e9:.2f} GB | s | CPU s |" + "".join(f" s over {b} | CPU s over {b} |" for b in bases))
        print("|---" * (3 + 2 * len(bases)) + "|", flush=True)
        for case in options.only:
            source, target, more = CASES[case]
            words = (*more, "--no-fsync") if options.no_fsync else more
            files = (work / source, work / target)
            jobs = [Job(way, partial(convert, way, options.old, *files, *words), files[1:]) for way in ways]
            warm(work / source)
            series = interleaved(jobs, options.rounds, [work / source], partial(touch, work, n_bytes))
            cells = [f"{min(getattr(r, key) for r in series[ON].values()):.3f}" for key in ("seconds", "cpu")]
            for base in bases:
                cells += [ratios(series[ON], series[base], value) for value in (lambda r: r.seconds, lambda r: r.cpu)]
            print(f"| {case} | " + " | ".join(cells) + " |", flush=True)
            clear([work / target])


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2], sys.argv[3:])
    else:
        main()
