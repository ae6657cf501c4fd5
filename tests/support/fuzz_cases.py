"""One case of the fuzzer: damaged files, everything that is done with them, and which outcomes are wrong.

A case has a name that builds it again: a seed and the numbers of its edits, "gguf-bpe/12/77".
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from fuzz_formats import edit_file, edit_folder
from fuzz_seeds import Files, Seed, write

import aprfmt
from aprfmt.cli.main import run as run_command
from aprfmt.convert.report import Report
from aprfmt.errors import AprError
from aprfmt.formats.apr1_edit import decrypt_file, encrypt_file
from aprfmt.formats.apr_metadata import FILES_PREFIX
from aprfmt.running.canary import find_canary
from aprfmt.trust.keys import generate, read_private, read_public

with suppress(ImportError):  # a second that belongs to no case
    import model_signing.signing
    import model_signing.verifying  # noqa: F401

CPU_SECONDS = 2.0
MEMORY_BYTES = 512 << 20
LONGEST_MESSAGE = 2000


class OutOfTime(BaseException):
    """The processor time of a case is over."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A wrong outcome.

    Attributes:
        case: the name of the case.
        target: what was done with its files.
        kind: "exception", "time", "memory", "message", "output", "worse", "lossy", "left", "input", "died".
        key: equal for findings of one cause.
        text: what happened, with the traceback.
    """

    case: str
    target: str
    kind: str
    key: str
    text: str


def build(seeds: Mapping[str, Seed], name: str) -> Seed:
    """The files of the case `name`."""
    first, *numbers = name.split("/")
    seed, done = seeds[first], first
    for step in numbers:
        done += "/" + step
        seed = _edited(seed, Random(done), seeds)
    return seed


def _edited(seed: Seed, rng: Random, seeds: Mapping[str, Seed]) -> Seed:
    files: Files = dict(seed.files)
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        if len(files) > 1 and rng.random() < 0.06:
            files = edit_folder(files, rng)
            continue
        name = rng.choice(sorted(files))
        other = seeds[rng.choice(sorted(seeds))]
        files[name] = edit_file(name, files[name], rng, rng.choice(list(other.files.values())))
    main = seed.main if not seed.main or seed.main in files else next(iter(files))
    return Seed(files, main, seed.role)


def _template(error: BaseException) -> str:
    """A message without what differs from file to file."""
    text = error.message if isinstance(error, AprError) else str(error)
    return re.sub(r"""'[^']*'|"[^"]*"|\d+|[^\x20-\x7e]+|/\S+""", "#", text)[:120]


def _cause(error: BaseException) -> str:
    """The type of an error and the innermost line of the package that it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/aprfmt/" in f.filename or "/aprtrain/" in f.filename]
    at = own[-1] if own else frames[-1]
    return f"{type(error).__name__} in {at.filename.rpartition('/src/')[2]}:{at.name}"


@dataclass
class Run:
    """The outcomes of one case so far.

    Attributes:
        at: the folder with `in` (the files) and `out`.
        targets: what is done with a model, names of TARGETS; None: three that the case's name picks.
        targets: what is done with the model; None: three of them, which the name picks.
        tell: called with the name of each target before it begins.
        findings: wrong outcomes.
        outcomes: what was seen, one word for files that fare alike.
    """

    case: str
    seed: Seed
    at: Path
    targets: Sequence[str] | None = None
    tell: Callable[[str], None] = lambda target: None
    findings: list[Finding] = field(default_factory=list)
    outcomes: set[str] = field(default_factory=set)

    @property
    def path(self) -> Path:
        return self.at / "in" / self.seed.main if self.seed.main else self.at / "in"

    def wrong(self, target: str, kind: str, key: str, text: str) -> None:
        self.findings.append(Finding(self.case, target, kind, f"{kind}: {key}", text[-6000:]))

    def attempt(self, target: str, operation: Callable[[], Any]) -> Any:
        """The result of `operation`, None where it raised; whatever is not an AprError with a message is wrong."""
        self.tell(target)
        try:
            result = operation()
        except AprError as error:
            self.outcomes.add(f"{target.partition(' ')[0]} {type(error).__name__} {_template(error)}")
            text = str(error)
            if not error.message.strip() or len(text) > LONGEST_MESSAGE:
                self.wrong(target, "message", _cause(error), f"{len(text)} characters: {text[:200]}")
            json.dumps(error.to_json())
            return None
        except OutOfTime as error:
            self.wrong(target, "time", _cause(error), traceback.format_exc())
            raise
        except MemoryError as error:
            self.wrong(target, "memory", _cause(error), traceback.format_exc())
            return None
        except BaseException as error:
            self.wrong(target, "exception", _cause(error), traceback.format_exc())
            return None
        self.outcomes.add(f"{target} ok")
        return result


# --- what is done with a model ---


def _open_and_read(run: Run, path: Path, name: str) -> bool:
    """Everything that can be asked of an opened model; whether it opened."""
    model = run.attempt(f"{name} open", lambda: aprfmt.open(path))
    if model is None:
        return False
    with model:
        run.attempt(f"{name} metadata", lambda: {key: model.metadata[key] for key in model.metadata} or True)
        run.attempt(f"{name} hparams", lambda: model.hparams)
        run.attempt(f"{name} tokenizer", lambda: model.tokenizer or True)
        run.attempt(f"{name} checksum", model.checksum)
        run.attempt(f"{name} repr", lambda: (repr(model), repr(model.tensors), model.size_bytes, list(model.warnings)))
        run.attempt(f"{name} raw", lambda: all(map(_is_whole, model.tensors.entries)))
        for tensor in model.tensors.entries[:12]:
            run.attempt(f"{name} numpy", tensor.numpy)
    return True


def _is_whole(tensor: aprfmt.Tensor) -> bool:
    assert len(tensor.raw()) == tensor.n_bytes, "raw() has another length than n_bytes"
    return True


@contextmanager
def _captured() -> Iterator[io.TextIOWrapper]:
    """Standard output, as strict about characters as a real one; what goes to standard error is dropped."""
    streams = (sys.stdout, sys.stderr)
    out, error = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in streams)
    sys.stdout, sys.stderr = out, error
    try:
        yield out
    finally:
        sys.stdout, sys.stderr = streams


def command(*words: object) -> int:
    """Exit code of a command line; an internal error is raised as it is, JSON must be one object."""
    from aprfmt.cli import failures

    raised: list[BaseException] = []
    report = failures.report

    def keep(error: BaseException) -> int:
        if isinstance(error, OutOfTime | MemoryError) or failures.classify(error)[0] == failures.EXIT_INTERNAL:
            raised.append(error)
        return report(error)

    failures.report = keep
    try:
        with _captured() as stdout:
            code = run_command([str(word) for word in words])
            stdout.seek(0)
            printed = stdout.read()
    finally:
        failures.report = report
    if raised:
        raise raised[0]
    if "--json" in words:
        body = json.loads(printed)
        assert isinstance(body, dict), "the output is not a JSON object"
        assert body["ok"] is (code in (0, 1)) or code == 5, f"ok is {body['ok']} with exit code {code}"
    return code


def _contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


_OUTPUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "apr": ("m.apr", {}),
    "apr-any": ("m.apr", {"allow_unmapped": True, "allow_no_config": True}),
    "apr-arch": ("m.apr", {"allow_unmapped": True, "allow_no_config": True, "arch": "llama"}),
    "apr-f32": ("m.apr", {"dtype": "f32", "allow_unmapped": True}),
    "apr-aprq4": ("m.apr", {"dtype": "AprQ4"}),
    "gguf": ("m.gguf", {}),
    "gguf-q8": ("m.gguf", {"dtype": "q8_0", "allow_requantize": True}),
    "gguf-q4": ("m.gguf", {"dtype": "q4_0", "allow_requantize": True}),
    "gguf-parts": ("m.gguf", {"shard_size": 12_000}),
    "hf": ("m", {"format": "hf"}),
    "hf-bf16": ("m", {"format": "hf", "dtype": "bf16"}),
    "hf-parts": ("m", {"format": "hf", "shard_size": 12_000}),
    "safetensors": ("m.safetensors", {"allow_no_config": True, "allow_unmapped": True}),
    "mlx": ("m", {"format": "mlx"}),
    "shards": ("m", {"format": "apr-shards", "shard_size": 12_000}),
    "plan": ("m.gguf", {"plan": True}),
}


def _converted(source: Path, output: Path, **options: Any) -> Report:
    return aprfmt.convert_model(source, output, fsync=False, threads=1, **options)


def _convert(run: Run, name: str) -> None:
    """Writes a form of the model, and looks at what was written."""
    main, options = _OUTPUTS[name]
    out = run.at / "out"
    before = run.findings[:]
    report = run.attempt(f"convert {name}", lambda: _converted(run.path, out / main, **options))
    found = _contents(out)
    if report is None or report.plan:
        if found or any(out.iterdir()):
            run.wrong(f"convert {name}", "left", name, f"left behind: {sorted(found)[:9]}")
        return
    strange = [n for n in found if n.endswith((".tmp", ".part")) or Path(n).name.startswith(".")]
    strange = [n for n in strange if n.partition("/")[2] not in run.seed.files.keys() | _recorded_names(run)]
    if strange:
        run.wrong(f"convert {name}", "left", name, f"left behind: {strange[:9]}")
    written = Path(report.files[0]) if report.files else out / main
    _look_at_output(run, name, written, report.losses)
    if run.findings == before and report.lossless:
        _go_back(run, name, written, report)


def _refusals(run: Run) -> set[str]:
    return {o for o in run.outcomes if not o.endswith(" ok")}


def _look_at_output(run: Run, name: str, written: Path, losses: Sequence[str] = ()) -> None:
    """The output opens, all of it can be read, and it is no worse than what it was made from."""
    target = f"convert {name}"
    inner = Run(run.case, run.seed, run.at, tell=run.tell)
    _open_and_read(inner, written, "output")
    run.findings += inner.findings
    readable = {o.partition(" ")[2] for o in run.outcomes if o.startswith("read ")}
    for refused in sorted(_refusals(inner)):
        what = refused.partition(" ")[2]
        if what not in readable:  # a source that is refused in the same words may be carried as it is
            run.wrong(target, "output", f"{name} {what}", f"the output is refused: {refused}")
    before = run.attempt("validate", lambda: aprfmt.validate(run.path))
    after = run.attempt(f"{target} validate", lambda: aprfmt.validate(written))
    told = any("infini" in loss for loss in losses)
    keeps = name in _OUTPUTS and not _OUTPUTS[name][1].keys() & {"dtype", "arch", "allow_no_config"}
    if before is not None and after is not None and before.passed and not after.passed and keeps and not told:
        # What an .apr must say, other containers need not.
        failed = [c for c in after.checks if c.status == "fail" and c.id != "metadata.required"]
        if not failed:
            return
        key = f"{name} {[c.id for c in failed][:3]}"
        run.wrong(target, "worse", key, "\n".join(f"{c.id} {c.tensor} {c.message}" for c in failed))


_BACK = {"gguf": ("b.gguf", "gguf"), "hf": ("b", "hf"), "safetensors": ("b.safetensors", "safetensors")}


def _has_record(run: Run) -> bool:
    with aprfmt.open(run.path) as model:
        return "aprfmt.source" in model.metadata


def _recorded_names(run: Run) -> set[str]:
    """The files that the record of the source names, where there is one; an edit may have renamed them."""
    with aprfmt.open(run.path) as model:
        record = model.metadata.get("aprfmt.source")
    files = record.get("files") if isinstance(record, Mapping) else None
    return {str(file.get("name")) for file in files or () if isinstance(file, Mapping)}


def _parts(run: Run) -> Files:
    """The files that a GGUF was opened from; a part that an edit made a whole model of stands alone."""
    with aprfmt.open(run.path) as model:
        names = {Path(source.path).name for source in model.sources}
    return {name: data for name, data in run.seed.files.items() if name in names}


def _go_back(run: Run, name: str, written: Path, report: Report) -> None:
    """What is called lossless gives its source again."""
    target, format = f"back from {name}", aprfmt.detect(run.path)
    back = run.at / "back"
    back.mkdir()
    options = {key: value for key, value in _OUTPUTS[name][1].items() if key.startswith("a")}
    if format in ("apr-v1", "apr-legacy"):
        return
    if format == "apr-v2" and report.format == "safetensors":
        return  # the weights that it was imported from, which say nothing else
    if format == "apr-v2":
        if report.format == "apr-v2" and name == "apr" and run.path.is_file():
            if written.read_bytes() != run.path.read_bytes():
                run.wrong(target, "lossy", name, "the copy of the .apr is another file")
            return
        made = run.attempt(target, lambda: _converted(written, back / "b.apr", **options))
        if made is None:
            run.wrong(target, "lossy", f"{name} refused {sorted(_refusals(run))[-1:]}", "the way back is refused")
        else:
            found = run.attempt(target, lambda: aprfmt.diff(run.path, back / "b.apr"))
            # Its name is that of the folder where nothing else says one; a shard's place is its file's.
            differing = [d for d in found.differences if d.kind != "format"] if found else []
            differing = [d for d in differing if d.name not in ("name", "sharding", "aprfmt.tensors")]
            # Where an edit makes the record of the source and the metadata contradict each other, the record counts.
            differing = [d for d in differing if d.kind == "tensor" or not _has_record(run)]
            # A crafted record may hold as text what an import carries as a file beside the model.
            differing = [d for d in differing if not (d.name.startswith(FILES_PREFIX) and d.what == "missing")]
            if differing:
                run.wrong(target, "lossy", name, f"the way back differs: {differing[:5]}")
        return
    if format not in _BACK or report.format not in ("apr-v2", format):
        return
    main, form = _BACK[format]
    with aprfmt.open(run.path) as source, aprfmt.open(written) as output:  # --format mlx writes what mlx_lm has
        is_mlx = source.label == "MLX adapter" and "lora_rank" in output.metadata
    refused = _refusals(run)
    made = run.attempt(target, lambda: _converted(written, back / main, format="mlx" if is_mlx else form, **options))
    if made is None:
        why = sorted(_refusals(run) - refused)
        run.wrong(target, "lossy", f"{name} refused {why}", f"called lossless, the way back is refused: {why}")
        return
    given = run.seed.files if form == "hf" else {main: run.path.read_bytes()}
    found = _contents(back / main) if form == "hf" else _contents(back)
    if len(run.seed.files) > 1 and form == "gguf":
        given = _parts(run)
        if set(map(len, given.values())) != set(map(len, found.values())):
            found = dict.fromkeys(found, b"")
        given, found = ({str(i): d for i, d in enumerate(sorted(x.values()))} for x in (given, found))
    differing = sorted(n for n in given.keys() | found.keys() if given.get(n) != found.get(n))
    if differing:
        run.wrong(target, "lossy", f"{name} {form}", f"called lossless, but the way back differs in {differing[:9]}")


def _stamp(run: Run) -> None:
    out = run.at / "out" / "s.apr"
    done = run.attempt("stamp", lambda: aprfmt.stamp(run.path, out, license="MIT", set={"x.y": [1]}))
    if done is not None:
        _look_at_output(run, "stamp", out)


def _meta(run: Run) -> None:
    def look() -> None:
        for key in aprfmt.metadata(run.path).keys[:9]:
            aprfmt.metadata_value(run.path, key.key)

    out = run.at / "out" / ("meta" + run.path.suffix)
    run.attempt("meta list", look)
    done = run.attempt("meta set", lambda: aprfmt.edit_metadata(run.path, {"license": "MIT"}, out))
    if done is not None:
        _look_at_output(run, "meta set", out)


def _rewrite(run: Run) -> None:
    if not run.path.is_file() or aprfmt.detect(run.path) != "apr-v2":
        return
    out = run.at / "out" / "r.apr"

    def rewrite() -> None:
        with aprfmt.open(run.path) as model:
            aprfmt.rewrite_file(model, out)

    run.attempt("rewrite", rewrite)
    if out.exists():
        _look_at_output(run, "rewrite", out)


def _read_v1(run: Run) -> None:
    def read() -> object:
        found = aprfmt.read_v1(run.path, password="correct horse battery staple")
        return found.payload, found.metadata

    if run.seed.main:
        run.attempt("read_v1", read)


def _keys(run: Run) -> Path:
    """Key pairs `release` (signs) and `inbox` (X25519) beside the cases, made once."""
    place = run.at.parent
    for name, kind in (("release", "p256"), ("inbox", "x25519")):
        if not (place / f"{name}.key").exists():
            generate(place / name, kind)
    return place


def _sign(run: Run) -> None:
    """A signature of whatever the files hold verifies, and no longer once a byte was added."""
    keys, signature = _keys(run), run.at / "out" / "m.sig"
    made = run.attempt("sign", lambda: aprfmt.sign(run.path, key=keys / "release.key", output=signature, hash="sha256"))
    if made is None or not run.path.is_file() or made.n_files > 1:
        return
    verify = partial(aprfmt.verify, run.path, key=str(keys / "release.pub"), signature=signature)
    if run.attempt("verify", verify) is None:
        run.wrong("verify", "output", "own signature", "a new signature is refused")
    with run.path.open("ab") as file:
        file.write(b"\0")
    if run.attempt("verify edited", verify) is not None:
        run.wrong("verify", "output", "edited", "an edited file is verified")
    os.truncate(run.path, run.path.stat().st_size - 1)


def _encrypt(run: Run) -> None:
    """What was encrypted comes back."""
    if not run.path.is_file():
        return
    keys, out = _keys(run), run.at / "out"
    recipient, private = read_public(keys / "inbox.pub").raw(), read_private(keys / "inbox.key").raw()
    made = run.attempt("encrypt", lambda: encrypt_file(run.path, out / "e.apr", recipient=recipient))
    if made is None:
        return
    done = run.attempt("decrypt", lambda: decrypt_file(out / "e.apr", out / "d", private_key=private))
    if done is None or (not made.warnings and (out / "d").read_bytes() != run.path.read_bytes()):
        run.wrong("decrypt", "lossy", "decrypt", "what was encrypted does not come back")


_COMMANDS: dict[str, tuple[str, ...]] = {
    "inspect-json": ("inspect", "IN", "--json", "--quality", "--vocab"),
    "inspect-text": ("inspect", "IN", "--weights", "--vocab"),
    "tensors-json": ("tensors", "IN", "--stats", "--hash", "--json"),
    "tensors-text": ("tensors", "IN", "--stats"),
    "validate-json": ("validate", "IN", "--json"),
    "validate-text": ("validate", "IN"),
    "lint-json": ("lint", "IN", "--json", "--fail-at", "error"),
    "lint-text": ("lint", "IN"),
    "tree-json": ("tree", "IN", "--json"),
    "tree-dot": ("tree", "IN", "--format", "dot", "--sizes"),
    "hex-json": ("hex", "IN", "--json", "--limit", "0"),
    "hex-text": ("hex", "IN", "--limit", "50"),
    "convert-text": ("convert", "IN", "-o", "OUT/c.gguf"),
    "report-json": ("report", "IN", "-o", "OUT/page.html", "--json"),
}


def _command(run: Run, name: str) -> None:
    places = {"IN": run.path, "OUT/c.gguf": run.at / "out" / "c.gguf", "OUT/page.html": run.at / "out" / "page.html"}
    run.attempt(name, lambda: command(*(places.get(word, word) for word in _COMMANDS[name])))


def _diff_values(run: Run) -> None:
    page = run.at / "out" / "page.html"

    def look() -> None:
        aprfmt.diff(run.path, run.path, values=True, threads=1, output=page, force=True).to_json()

    run.attempt("diff --values", look)


def _hex_tensors(run: Run) -> None:
    def look() -> None:
        with aprfmt.open(run.path) as model:
            names = list(model.tensors)[:20]
        for name in names:
            aprfmt.hex(run.path, tensor=name, limit=4).to_json()

    run.attempt("hex --tensor", look)


TARGETS: dict[str, Callable[[Run], None]] = {
    **{name: partial(_convert, name=name) for name in _OUTPUTS},
    **{name: partial(_command, name=name) for name in _COMMANDS},
    "stamp": _stamp,
    "meta": _meta,
    "rewrite": _rewrite,
    "read_v1": _read_v1,
    "sign": _sign,
    "encrypt": _encrypt,
    "sbom": lambda run: run.attempt("sbom", lambda: json.dumps(aprfmt.sbom(run.path))),
    "canary": lambda run: run.attempt("find_canary", lambda: find_canary(run.path) or True),
    "load": lambda run: run.attempt("load_file", lambda: aprfmt.load_file(run.path)),
    "diff": lambda run: run.attempt("diff", lambda: aprfmt.diff(run.path, run.path).to_json()),
    "diff-values": _diff_values,
    "hex-tensors": _hex_tensors,
}


_CONVERSION = "reads a model as `convert` does"
_NETWORK = "opens a model as `inspect` does, then computes with it in another process"
ELSEWHERE: dict[str, str] = {
    **dict.fromkeys(
        ("import", "export", "quantize", "merge", "merge-adapter", "prune", "transplant", "shard"), _CONVERSION
    ),
    **dict.fromkeys(("run", "bench", "qa", "parity", "eval", "imatrix", "teacher", "distill", "pretrain"), _NETWORK),
    "vocab": "reads the tokenizer as `inspect --vocab` does",
    "resume": "reads a run's folder: tests/train/test_resume.py damages each of its files",
    "data": "reads text: tests/texts",
    "push": "uploads files as they are: tests/publishing",
    "pull": "downloads files as they are: tests/publishing",
}
"""Commands that read models and have no target of their own, and why."""


def _model(run: Run, rng: Random) -> None:
    if not _open_and_read(run, run.path, "read"):
        run.attempt("inspect", lambda: command("inspect", run.path, *rng.choice((("--json",), ()))))
        run.attempt("validate", lambda: aprfmt.validate(run.path))
        run.attempt("hex", lambda: aprfmt.hex(run.path, limit=0).to_json())
        run.attempt("convert apr", lambda: aprfmt.convert_model(run.path, run.at / "out" / "m.apr", fsync=False))
        return
    run.attempt("validate", lambda: aprfmt.validate(run.path).to_json())
    for name in run.targets if run.targets is not None else rng.sample(sorted(TARGETS), 3):
        for folder in ("out", "back"):
            shutil.rmtree(run.at / folder, ignore_errors=True)
        (run.at / "out").mkdir()
        TARGETS[name](run)


def _imatrix(run: Run, rng: Random) -> None:
    from aprfmt.formats.imatrix import read_imatrix

    if run.attempt("imatrix read", lambda: read_imatrix(run.path)) is not None:
        run.attempt("imatrix quantize", lambda: aprfmt.quantize_model(
            run.at.parent / "base.gguf", run.at / "out" / "q.gguf", "iq4_nl", imatrix=run.path, allow_requantize=True,
            fsync=False, threads=1,
        ))  # fmt: skip


def _state(run: Run, rng: Random) -> None:
    from aprtrain.checkpoints.state import open_state

    def read() -> object:
        with open_state(run.path) as state:
            return state.facts, [(state.check(name), state[name]) for name in state]  # type: ignore[func-returns-value]

    run.attempt("state read", read)


_ROLES: dict[str, Callable[[Run, Random], None]] = {"model": _model, "imatrix": _imatrix, "state": _state}


def _end(number: int, frame: FrameType | None) -> None:
    raise OutOfTime


def run_case(
    name: str,
    seed: Seed,
    at: Path,
    targets: Sequence[str] | None = None,
    *,
    tell: Callable[[str], None] = lambda target: None,
) -> Run:
    """Runs one case in a fresh folder `at`, see Run."""
    shutil.rmtree(at, ignore_errors=True)
    (at / "in").mkdir(parents=True)
    (at / "out").mkdir()
    run = Run(name, seed, at, targets, tell)
    write(seed.files, at / "in")
    before = signal.signal(signal.SIGPROF, _end)
    warnings.simplefilter("error", RuntimeWarning)
    began = time.process_time()
    limit = CPU_SECONDS * max(1, len(targets or ()) // 3)
    signal.setitimer(signal.ITIMER_PROF, limit)
    try:
        _ROLES[seed.role](run, Random("targets of " + name))
    except OutOfTime:
        if not run.findings:
            run.wrong("case", "time", "between targets", f"more than {limit} s of processor time")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    if time.process_time() - began > limit + 0.5 and not any(f.kind == "time" for f in run.findings):
        run.wrong("case", "time", "in code that hears no signal", f"{time.process_time() - began:.1f} s")
    if _contents(at / "in") != seed.files:
        run.wrong("case", "input", "the input was changed", str(sorted(_contents(at / "in"))))
    return run


def scratch() -> Path:
    """Where cases are best written: memory, where there is some."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(os.environ.get("TMPDIR", "/tmp"))
