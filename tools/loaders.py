"""What llama.cpp's loader and graph of each architecture read, by its own source.

    python tools/loaders.py [--check]

Reads libllama's source in the material cache (tools/fetch_material.py llama.cpp-source) and writes
src/aprfmt/arch/loaders.jsonl, one architecture a line: its keys and tensors, required or optional, the rope factors
that its graph reads, the period of its windows, whether all layers rotate as the first does, whether it scales scores
by yarn's factor, its caches, and what it asserts. `--check` writes nothing; exit 1 when the file differs.

"required" is read whatever the model; what stands behind a condition, or asks for flags that are no literal 0, is
optional. Names have no layer: "blk.attn_q.weight".
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from fetch_material import CACHE  # noqa: E402

SOURCE = CACHE / "llama.cpp-source" / "src"
OUT = ROOT / "src" / "aprfmt" / "arch" / "loaders.jsonl"
BASE = "llama_model_base"

_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|("(?:[^"\\]|\\.)*")', re.DOTALL)
_PAIR = re.compile(r'\{\s*(LLM_\w+),\s*"([^"]*)"\s*\}')
_METHOD = re.compile(r"^[\w:<>\s*&]*?\b(llama_model_\w+)::(\w+)(?:<[^>]*>)?(?:::(\w+))?\s*\(", re.MULTILINE)
_STRUCT = re.compile(r"^struct (llama_model_\w+) : public (llama_model_\w+)", re.MULTILINE)
_USING = re.compile(r"using (graph\w*)\s*=\s*(llama_model_\w+)::")
_CREATED = re.compile(r"case (LLM_ARCH_\w+):\s*return new (llama_model_\w+)\(")
_READ = re.compile(r"\bml\.(get_key|get_key_or_arr|get_arr|get_arr_n)\(")
_CONDITION = re.compile(r"^\s*(\}?\s*else\b|if\b|switch\b|case\b|default\b|while\b|auto\b.*\[)|\[[&=]")
_HELPERS = {
    "create_tensor_qkv": (("ATTN_QKV", "ATTN_Q", "ATTN_K", "ATTN_V"), ("weight", "bias")),
    "create_tensor_gate_up_exps": (("FFN_GATE_UP_EXPS", "FFN_GATE_EXPS", "FFN_UP_EXPS"), ("weight",)),
}

_SCALED = re.compile(r'\b(\w+_s) = create_tensor\(tn\((LLM_TENSOR_\w+),\s*"scale"')
_SCALE_HELPERS = {
    "build_qkv(": ("wqkv_s", "wq_s", "wk_s", "wv_s"),
    "build_mamba_layer(": ("ssm_in_s", "ssm_out_s"),
    "build_mamba2_layer(": ("ssm_in_s", "ssm_out_s"),
}
"""Functions of other files that multiply by scales of weights."""


@dataclass
class Reads:
    """Names that a piece of code reads."""

    required: set[str] = field(default_factory=set)
    optional: set[str] = field(default_factory=set)

    def add(self, name: str, *, required: bool) -> None:
        """Notes one of them; what is required once is required."""
        (self.required if required else self.optional).add(name)

    def to_json(self) -> dict[str, list[str]]:
        """Both lists, sorted, none of them twice."""
        return {"required": sorted(self.required), "optional": sorted(self.optional - self.required)}


class Library:
    """The source of libllama."""

    def __init__(self, folder: Path) -> None:
        paths = [folder / "llama-model.cpp", *sorted((folder / "models").glob("*.cpp"))]
        self.methods: dict[tuple[str, str], list[str]] = {}
        for path in paths:
            for name, body in _methods(_bare(path.read_text())):
                self.methods.setdefault(name, []).append(body)
        self.header = _bare((folder / "models" / "models.h").read_text())
        self.names = dict(_PAIR.findall(_bare((folder / "llama-arch.cpp").read_text())))
        self.model = _bare((folder / "llama-model.cpp").read_text())
        self.arch_code = _bare((folder / "llama-arch.cpp").read_text())

    @cached_property
    def parents(self) -> dict[str, str]:
        """Class -> the class it is derived from."""
        return dict(_STRUCT.findall(self.header))

    def text(self, owner: str, method: str) -> str:
        """The code of a method, a parent's where the class has none, with the same method of classes that it calls."""
        while owner in self.parents and (owner, method) not in self.methods:
            owner = self.parents[owner]
        found = "\n".join(self.methods.get((owner, method), []))
        for other in re.findall(rf"(llama_model_\w+)::{method}\(", found):
            found += self.text(other, method)
        return found

    def graph(self, owner: str) -> str:
        """The code of the graphs of a class."""
        build = self.text(owner, "build_arch_graph")
        owners = {*re.findall(r"(llama_model_\w+)::graph", build)}
        if re.search(r"make_unique<graph", build):
            owners.add(owner)
        out = ""
        for one in owners:
            inner = self.header.partition(f"struct {one} : public ")[2].partition("\n};")[0]
            used = {other for name, other in _USING.findall(inner) if other != one}
            used |= {*re.findall(r"struct graph\w* : public (llama_model_\w+)::graph", inner)} - {one}
            if not used and (one, "graph") not in self.methods and one in self.parents:
                used = {self.parents[one]} - {BASE}
            out += "\n".join(self.methods.get((one, "graph"), []))
            for other in used:
                out += "\n".join(self.methods.get((other, "graph"), []))
        return out

    def architectures(self) -> Iterator[dict[str, object]]:
        """Each architecture's line, that of all of them first."""
        common = self.text(BASE, "load_hparams")
        # What llama-model.cpp asks by the architecture's name is that architecture's own.
        yield {
            "arch": "",
            "keys": self.keys(common).to_json(),
            "tensors": self.tensors(self.text(BASE, "load_tensors")).to_json(),
        }
        for enum, owner in _CREATED.findall(self.model):
            yield self.architecture(self.names[enum], enum, owner)

    def architecture(self, name: str, enum: str, owner: str) -> dict[str, object]:
        """What the loader and the graph of one architecture read."""
        hparams, tensors = self.text(owner, "load_arch_hparams"), self.text(owner, "load_arch_tensors")
        graph = self.graph(owner)
        read = self.tensors(tensors)
        read_names = sorted(read.optional | read.required)
        factors = [name for name in read_names if name.startswith(("rope_freqs.", "rope_factors_"))]
        line: dict[str, object] = {
            "arch": name,
            "keys": self.keys(hparams).to_json(),
            "tensors": read.to_json(),
            "rope_factors": factors if _rotates_by_factors(graph) else [],
            "window_factor": "freq_scale_l" in graph
            and "attn_factor_l" not in graph
            and "rope_freq_scale_train_swa" not in hparams,
            "period": int(found[1]) if (found := re.search(r"load_swa_pattern\(ml, (\d+)", hparams)) else 0,
            "full_first": bool(re.search(r"load_swa_pattern\([^)]*\btrue\)", hparams)),
            "square": sorted(self.square(tensors)),
            "first_rotation": bool(re.search(r"(?<![.>])\bn_rot\b(?!\s*\()", graph)),
            "scores": "attn_factor_org" in graph,
            "scales": sorted(self.scales(graph)),
            "memory": self.memory(enum, hparams),
            "asserts": sorted({*_asserted(hparams), *_asserted(tensors), *_asserted(graph)}),
        }
        return line

    def memory(self, enum: str, hparams: str) -> str:
        """Which cache the architecture has: "hybrid", "recurrent", "windowed" (two caches), else ""."""
        for kind in ("recurrent", "hybrid"):
            inside = self.arch_code.partition(f"bool llm_arch_is_{kind}(")[2].partition("\n}")[0]
            if f"case {enum}:" in inside:
                return kind
        return "windowed" if re.search(r"swa_type\s*=\s*LLAMA_SWA_TYPE_(?!NONE)", hparams) else ""

    def keys(self, code: str) -> Reads:
        """The keys that the code of a loader reads, without the architecture's prefix."""
        found = Reads()
        for match in _READ.finditer(code):
            arguments = _arguments(code, match.end())
            name = self.names.get(arguments[0])
            if name is None:
                continue
            required = (
                arguments[-1] not in ("false", "0", "0.0f")
                and "required" not in arguments[-1]
                and not _is_conditional(code, match)
            )
            found.add(name.removeprefix("%s."), required=required)
        for enum in re.findall(r"\bLLM_KV_\w+", code):
            if enum in self.names:
                found.add(self.names[enum].removeprefix("%s."), required=False)
        if "load_swa_pattern(" in code:
            found.add("attention.sliding_window_pattern", required=False)
        return found

    def tensors(self, code: str) -> Reads:
        """The tensors that the code of a loader creates."""
        found = Reads()
        direct: set[str] = set()
        for match in re.finditer(r"\bcreate_tensor\s*\(\s*tn\((LLM_TENSOR_\w+)\s*(?:,\s*\"(\w+)\")?", code):
            arguments = _arguments(code, code.index("(", match.start()) + 1)
            required = arguments[-1] == "0" and not _is_conditional(code, match)
            direct.add(match[1])
            found.add(self.tensor(match[1], match[2] or ""), required=required)
        for match in re.finditer(r"\btn\((LLM_TENSOR_\w+)\s*(?:,\s*\"(\w+)\")?", code):
            direct.add(match[1])
            found.add(self.tensor(match[1], match[2] or ""), required=False)
        for enum in {*re.findall(r"\bLLM_TENSOR_\w+", code)} - direct:
            for suffix in ("weight", "bias", ""):
                found.add(self.tensor(enum, suffix), required=False)
        for helper, (enums, suffixes) in _HELPERS.items():
            if f"{helper}(" in code:
                for enum in enums:
                    for suffix in suffixes:
                        found.add(self.tensor(f"LLM_TENSOR_{enum}", suffix), required=False)
        return found

    def scales(self, graph: str) -> Iterator[str]:
        """The scales of weights that the code of a graph multiplies by; the loader reads them for every network."""
        used = {*re.findall(r"\b\w+_s\b", graph)}
        used |= {name for helper, names in _SCALE_HELPERS.items() if helper in graph for name in names}
        for name, enum in {*_SCALED.findall(self.text(BASE, "load_tensors"))}:
            if name in used:
                yield self.tensor(enum, "scale")

    def square(self, code: str) -> Iterator[str]:
        """The tensors that the code of a loader wants as wide as the hidden size on both sides."""
        for match in re.finditer(r'\btn\((LLM_TENSOR_\w+),\s*"(\w+)",\s*i\),\s*\{\s*n_embd,\s*n_embd\s*\}', code):
            yield self.tensor(match[1], match[2])

    def tensor(self, enum: str, suffix: str) -> str:
        """The name of a tensor, without its layer."""
        name = self.names[enum].replace(".%d", "")
        return f"{name}.{suffix}" if suffix else name


def _bare(code: str) -> str:
    """`code` without comments and `#pragma` lines."""
    return _COMMENT.sub(lambda match: match[1] or " ", code)


def _methods(code: str) -> Iterator[tuple[tuple[str, str], str]]:
    """((class, method), body) of each method of a model that the code defines; any method of a graph is "graph"."""
    for match in _METHOD.finditer(code):
        end = _closing(code, match.end() - 1)
        opening = re.compile(r"[^;{]*(?:\{[^{};]*\}[^;{]*)*?\{").match(code, end + 1) if end else None
        brace = code.find("{", end or 0)
        if end is None or opening is None or ";" in code[end:brace]:
            continue
        stop = _closing(code, brace)
        if stop is None:
            continue
        name = "graph" if match[2].startswith("graph") else match[2]
        yield (match[1], name), code[brace : stop + 1]


def _closing(code: str, start: int) -> int | None:
    """Where the bracket at `start` is closed."""
    pairs, depth = {"(": ")", "{": "}"}, 0
    opening, closing = code[start], pairs[code[start]]
    for i in range(start, len(code)):
        if code[i] == opening:
            depth += 1
        elif code[i] == closing:
            depth -= 1
            if not depth:
                return i
    return None


def _arguments(code: str, start: int) -> list[str]:
    """The arguments of the call whose first begins at `start`."""
    out: list[str] = []
    depth, last = 0, start
    for i in range(start, len(code)):
        if code[i] in "({[":
            depth += 1
        elif code[i] in ")}]":
            depth -= 1
            if depth < 0:
                return [*out, code[last:i].strip()]
        elif code[i] == "," and not depth:
            out.append(code[last:i].strip())
            last = i + 1
    return out


def _is_conditional(code: str, match: re.Match[str]) -> bool:
    """Whether the code at the match runs for some models only."""
    before = code[: match.start()]
    statement = re.split(r"[;{}]", before)[-1]
    if _CONDITION.search(statement) or "?" in statement:
        return True
    depth, place = 0, len(before)
    for i in range(len(before) - 1, -1, -1):
        if before[i] == "}":
            depth += 1
        elif before[i] == "{":
            if depth:
                depth -= 1
                continue
            header = re.split(r"[;{}]\s*(?=\S)", before[:i])[-1] if "for" not in before[max(0, i - 120) : i] else ""
            loop = re.search(r"for\s*\(([^{}]*)\)\s*$", before[:i])
            if loop and (not re.search(r"=\s*0\s*;", loop[1]) or "nextn" in loop[1]):
                return True
            if not loop and _CONDITION.search(header or before[before.rfind("\n", 0, i) : i]):
                return True
            if re.search(r"\b(continue|return)\b", before[i:place]):
                return True
            place = i
    return False


def _rotates_by_factors(graph: str) -> bool:
    """Whether a rotation of the graph is given factors."""
    for match in re.finditer(r"\bggml_rope_(?:ext|multi)\w*\s*\(", graph):
        arguments = _arguments(graph, match.end())
        if len(arguments) > 3 and arguments[3] not in ("nullptr", "NULL"):
            return True
    return False


def _asserted(code: str) -> Iterator[str]:
    """What the code asserts, without messages."""
    for match in re.finditer(r"\bGGML_ASSERT\s*\(", code):
        yield " ".join(_arguments(code, match.end())[0].split())


def table(folder: Path = SOURCE) -> str:
    """The lines of loaders.jsonl."""
    lines = Library(folder).architectures()
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the table, or compares it; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the table differs")
    options = parser.parse_args(arguments)
    if not SOURCE.exists():
        print("llama.cpp's source is missing: python tools/fetch_material.py llama.cpp-source", file=sys.stderr)
        return 2
    text = table()
    if options.check:
        return int(not OUT.exists() or OUT.read_text() != text)
    OUT.write_text(text)
    print(f"{OUT.relative_to(ROOT)}: {text.count(chr(10)) - 1} architectures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
