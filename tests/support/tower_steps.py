"""What every case of towers is put through; the tests and tools/towers.py run it.

gguf    our GGUF of the towers, from the folder as transformers saves it and as it is published: the same bytes
peer    llama.cpp's converter's own: names, types, bytes, keys
folder  folder -> .apr -> folder: every file the same; the .apr gives the same GGUF of the towers
back    the two GGUFs -> .apr -> the same two, and a folder whose tensors have the source's values
"""

from __future__ import annotations

import filecmp
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arch_models import relative_error
from conformance_steps import list_keys, list_tensors
from converter_peer import ConverterError, ConverterPeer
from llama_peer import LlamaError, LlamaPeer
from tower_feed import media, transformers_embeddings
from tower_models import TowerCase, build_tower

STEPS = ("gguf", "peer", "folder", "back", "mtmd")

TOLERANCE = 1e-2
"""Of embeddings, relative."""


@dataclass(frozen=True)
class Found:
    """What came out of a step: "" for right, else what is wrong; `note` explains what is right and differs."""

    wrong: str = ""
    note: str = ""


class TowerBench:
    """Runs cases. Use in `with`."""

    def __init__(self, tokenizer: Path, peer: ConverterPeer | None, llama: LlamaPeer | None) -> None:
        self._tokenizer, self._peer, self._llama = tokenizer, peer, llama

    def run(self, case: TowerCase, work: Path) -> dict[str, Found]:
        """Every step of the case in the empty folder `work`; a step that fails by an error says so."""
        saved, published = work / "saved", work / "published"
        build_tower(case, saved, self._tokenizer)
        published_too = bool(case.renames or case.drops)
        if published_too:
            build_tower(case, published, self._tokenizer, published=True)
        source = published if published_too else saved
        steps: dict[str, Callable[[], Found]] = {
            "gguf": lambda: self._gguf(saved, source, work),
            "peer": lambda: self._compare(case, source, work),
            "folder": lambda: self._folder(saved, work),
            "back": lambda: self._back(case, saved, work),
            "mtmd": lambda: self._embeddings(case, saved, work),
        }
        found: dict[str, Found] = {}
        for name, step in steps.items():
            try:
                found[name] = step()
            except Exception as error:  # every case goes through every step, whatever happens in one
                found[name] = Found(f"{type(error).__name__}: {error}")
        return found

    def _gguf(self, saved: Path, source: Path, work: Path) -> Found:
        from aprfmt.convert.api import export_model

        export_model(source, work / "mmproj.gguf", mmproj=True)
        if saved == source:
            return Found()
        export_model(saved, work / "other.gguf", mmproj=True)
        same = list_tensors(work / "mmproj.gguf") == list_tensors(work / "other.gguf")
        same = same and list_keys(work / "mmproj.gguf") == list_keys(work / "other.gguf")
        return Found("" if same else "another GGUF from the names that transformers saves")

    def _compare(self, case: TowerCase, source: Path, work: Path) -> Found:
        from aprfmt.convert.api import export_model

        if self._peer is None:
            return Found(note="not asked")
        theirs, ours = work / "peer.gguf", work / "ours.gguf"
        export_model(source, ours, mmproj=True, dtype="f16")
        try:
            if case.patches and not self._fails_as_it_is(source, theirs):
                return Found("the converter converts it without a patch, which the case says it cannot")
            self._peer.convert_once(source, theirs, "f16", ["--mmproj"], patches=case.patches)
        except ConverterError as error:
            return Found(note=case.converter_cannot) if case.converter_cannot else Found(f"the converter: {error}")
        if case.converter_cannot:
            return Found("the converter converts it, which the case says it cannot")
        differing = dict(_differing(_contents(ours), _contents(theirs)))
        computed = [name for name in differing if case.rounds and re.search(case.rounds, name)]
        rounded = {name for name in computed if _is_close(ours, theirs, name)}
        differing = {name: text for name, text in differing.items() if name not in rounded}
        why = {name: _explained(case, name) for name in differing}
        wrong = [f"{name}: {text}" for name, text in differing.items() if not why[name]]
        idle = [pattern for pattern in case.differs if not any(re.search(pattern, name) for name in differing)]
        wrong += [f"{pattern} explains nothing" for pattern in idle]
        notes = (case.patched, f"{len(rounded)} rounded otherwise" if rounded else "", *why.values())
        return Found("; ".join(wrong[:6]), "; ".join(dict.fromkeys(filter(None, notes))))

    def _fails_as_it_is(self, source: Path, out: Path) -> bool:
        assert self._peer is not None
        try:
            self._peer.convert_once(source, out, "f16", ["--mmproj"])
        except ConverterError:
            return True
        return False

    def _folder(self, saved: Path, work: Path) -> Found:
        from aprfmt.convert.api import export_model, import_model

        import_model(saved, work / "whole.apr")
        export_model(work / "whole.apr", work / "restored", format="hf")
        wrong = _other_files(saved, work / "restored")
        export_model(saved, work / "saved.gguf", mmproj=True)
        export_model(work / "whole.apr", work / "again.gguf", mmproj=True)
        if not filecmp.cmp(work / "saved.gguf", work / "again.gguf", shallow=False):
            wrong.append("the .apr gives another GGUF of the towers")
        return Found("; ".join(wrong))

    def _back(self, case: TowerCase, saved: Path, work: Path) -> Found:
        from aprfmt.convert.api import export_model, import_model

        text, towers, one = work / "text.gguf", work / "saved.gguf", work / "one.apr"
        if case.text_cannot:
            return self._alone(case, saved, work)
        export_model(saved, text, no_tokenizer=True)
        report = import_model(text, one, mmproj=towers)
        export_model(one, work / "text2.gguf")
        export_model(one, work / "towers2.gguf", mmproj=True)
        wrong = [
            f"another GGUF of the {what}"
            for what, a, b in (("text", text, work / "text2.gguf"), ("towers", towers, work / "towers2.gguf"))
            if not filecmp.cmp(a, b, shallow=False)
        ]
        wrong += [warning for warning in report.warnings if "mmproj" in warning]
        export_model(one, work / "back", format="hf")
        if any(not part.gguf for part in _row(case).tensors):  # whose values the GGUF has only the results of
            return Found("; ".join((wrong + _other_values(case, saved, work / "back"))[:6]))
        export_model(work / "back", work / "towers3.gguf", mmproj=True, dtype="f32")
        export_model(saved, work / "towers4.gguf", mmproj=True, dtype="f32")
        if list_keys(work / "towers3.gguf") != list_keys(work / "towers4.gguf"):
            differing = _differing(list_keys(work / "towers3.gguf"), list_keys(work / "towers4.gguf"))
            wrong.append(f"the folder made anew has another config: {dict(differing)}")
        wrong += _other_values(case, saved, work / "back")
        return Found("; ".join(wrong[:6]))

    def _alone(self, case: TowerCase, saved: Path, work: Path) -> Found:
        """The GGUF of the towers through an `.apr`, where the language model has none; neither makes a folder."""
        from aprfmt.convert.api import export_model, import_model
        from aprfmt.errors import RefusedError

        towers, one, again = work / "saved.gguf", work / "one.apr", work / "towers2.gguf"
        import_model(towers, one)
        export_model(one, again)
        wrong = [] if filecmp.cmp(towers, again, shallow=False) else ["another GGUF of the towers"]
        for source, out in ((saved, work / "text.gguf"), (towers, work / "folder"), (one, work / "folder")):
            try:
                export_model(source, out, format="gguf" if out.suffix else "hf")
            except RefusedError:
                continue
            wrong.append(f"{source.name} gives a {out.name}, which the case says it cannot")
        return Found("; ".join(wrong), case.text_cannot)

    def _embeddings(self, case: TowerCase, saved: Path, work: Path) -> Found:
        from aprfmt.convert.api import export_model

        if self._llama is None or not case.feed:
            return Found(note="not asked" if case.feed else case.mtmd_cannot or "transformers has no such network")
        text, towers = work / "mtmd_text.gguf", work / "mtmd_towers.gguf"
        export_model(saved, text, dtype="f32")
        export_model(saved, towers, mmproj=True, dtype="f32")
        inputs = [media(size, seed) for seed, size in enumerate(case.images)]
        wanted = transformers_embeddings(
            saved, case.inner or case.model_class, case.feed, inputs, part="thinker" if case.inner else ""
        )
        try:
            found = [self._embed(self._llama, text, towers, given) for given in inputs]
        except LlamaError as error:
            return Found(note=case.mtmd_cannot) if case.mtmd_cannot else Found(str(error))
        errors = [relative_error(a, b) for a, b in zip(found, wanted, strict=True)]
        said = ", ".join(f"{list(a.shape)} {error:.1e}" for a, error in zip(found, errors, strict=True))
        if max(errors) <= TOLERANCE:
            return Found("mtmd computes it, which the case says it cannot" if case.mtmd_cannot else "", said)
        return Found(note=case.mtmd_cannot) if case.mtmd_cannot else Found(f"{said}, {list(wanted[0].shape)} expected")

    @staticmethod
    def _embed(llama: LlamaPeer, text: Path, towers: Path, given: Any) -> Any:
        """The embeddings of one input; not finite only if a fresh process says so, too."""
        import numpy as np

        found = llama.embed(text, towers, given)
        if not np.isfinite(found).all():  # llama.cpp may read what an earlier model left in memory
            llama.__exit__()
            llama.__enter__()
            found = llama.embed(text, towers, given)
        return found


def _row(case: TowerCase) -> Any:
    from aprfmt.arch.table import TOWERS

    return TOWERS[case.row]


def _contents(gguf: Path) -> dict[str, Any]:
    import aprfmt

    with aprfmt.open(gguf) as model:
        kinds = {key: model.metadata[key] for key in ("general.type", "general.file_type")}
    return {**kinds, **list_keys(gguf), **list_tensors(gguf)}


def _differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[tuple[str, str]]:
    every = dict.fromkeys((*ours, *theirs))
    pairs = ((name, ours.get(name, "absent"), theirs.get(name, "absent")) for name in every)
    return [(name, f"{a}, theirs {b}") for name, a, b in pairs if a != b]


def _is_close(ours: Path, theirs: Path, name: str) -> bool:
    """Whether two tensors are the same but for their last bits."""
    import numpy as np

    import aprfmt

    with aprfmt.open(ours) as a, aprfmt.open(theirs) as b:
        if name not in a.tensors or name not in b.tensors:
            return False
        x, y = a.tensors[name], b.tensors[name]
        if (x.dtype, x.shape) != (y.dtype, y.shape):
            return False
        u, v = x.numpy().astype(np.float64), y.numpy().astype(np.float64)
        return bool(np.abs(u - v).max() <= 1e-6 * np.abs(v).max())


def _explained(case: TowerCase, name: str) -> str:
    return next((why for pattern, why in case.differs.items() if re.search(pattern, name)), "")


def _other_files(a: Path, b: Path) -> list[str]:
    files = {path.relative_to(folder) for folder in (a, b) for path in folder.rglob("*") if path.is_file()}
    names = sorted(map(str, files))
    _, differ, absent = filecmp.cmpfiles(a, b, names, shallow=False)
    return [f"{name} differs" for name in (*differ, *absent)]


def _other_values(case: TowerCase, saved: Path, back: Path) -> list[str]:
    """What the towers of a folder that was made anew have other than the source's: the same values, by the row's names.

    What becomes of the language model is for tests/arch to look at; here it is opened as one.
    """
    import numpy as np

    import aprfmt
    from aprfmt.arch import names
    from aprfmt.arch.table import TOWERS
    from aprfmt.canonical.read import canonical

    row = TOWERS[case.row]
    wrong = []
    with aprfmt.open(saved) as a, aprfmt.open(back) as b:
        if canonical(a).arch is not canonical(b).arch:
            wrong.append("the language model is another one")
        values = {name: tensor for name, tensor in b.tensors.items() if names.canonical_name(row, name)}
        for name, tensor in a.tensors.items():
            if not names.canonical_name(row, name):
                continue
            found = values.pop(_spelled(name, values), None)
            if case.lost and re.search(case.lost, name):
                continue
            if found is None:
                wrong.append(f"{name} is absent")
                continue
            x, y = tensor.numpy().astype(np.float32), found.numpy().astype(np.float32)
            mapped = any(m.row.value == "softplus" for m in names.matches(row, name))
            same = np.allclose(x, y, rtol=1e-6, atol=1e-6) if mapped else np.array_equal(x, y)
            if x.shape != y.shape or not same:
                wrong.append(f"{name} has other values")
    return wrong + [f"{name} is new" for name in values]


def _spelled(name: str, known: Mapping[str, Any]) -> str:
    """The name that `known` has for `name`: wrappers begin the same names otherwise."""
    if name in known:
        return name
    endings = [other for other in known if _core(other) == _core(name)]
    return endings[0] if len(endings) == 1 else name


def _core(name: str) -> str:
    return re.sub(r"^(model\.)?((language|text)_model\.)?(model\.)?|vision_model\.", "", name)


def tokenizer_folder(work: Path) -> Path:
    """A small real tokenizer."""
    from arch_models import write_tokenizers

    return write_tokenizers(work / "tokenizers", ["smollm2"], 600)["smollm2"]


def run_one(case: TowerCase, *, peer: bool = True) -> dict[str, Found]:
    """Every step of one case, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as place, LlamaPeer() as llama:
        work = Path(place)
        bench = TowerBench(tokenizer_folder(work), ConverterPeer() if peer else None, llama)
        (work / "case").mkdir()
        return bench.run(case, work / "case")
