"""Package language models: read, write and convert APR, GGUF, safetensors and Hugging Face folders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aprfmt.errors import AprError

__version__ = "0.1.0"

# Module -> names, loaded on first use so that `import aprfmt` stays cheap; `PUBLIC=OWN` if its own name differs.
_MODULES = {
    "aprfmt.formats": ("detect", "open"),
    "aprfmt.formats.apr2_write": ("RawTensor", "save_file", "load_file", "rewrite_file=rewrite"),
    "aprfmt.formats.apr2": ("APR_FLAGS=FLAGS",),
    "aprfmt.formats.apr_metadata": ("canonicalize_aliases", "dump_metadata=dump"),
    "aprfmt.codecs.recode": ("encode",),
    "aprfmt.formats.apr1": ("read_v1", "write_v1"),
    "aprfmt.convert.api": ("import_model", "export_model", "convert_model"),
    "aprfmt.running.quantize": ("quantize_model",),
    "aprfmt.convert.merge_models": ("merge=merge_models", "merge_models"),
    "aprfmt.convert.merge_adapters": ("merge_adapter", "extract_adapter"),
    "aprfmt.convert.pruning": ("prune_model",),
    "aprfmt.convert.transplant": ("transplant_model",),
    "aprfmt.convert.report": ("Report",),
    "aprfmt.convert.stamp": ("stamp", "StampReport"),
    "aprfmt.inspection.describe": ("inspect", "Inspection"),
    "aprfmt.api": ("validate", "lint", "lint_rules", "data", "bench", "qa", "report", "run", "shard", "embed"),
    "aprfmt.inspection.validate": ("Validation",),
    "aprfmt.inspection.diff": ("diff",),
    "aprfmt.inspection.comparison": ("Comparison",),
    "aprfmt.inspection.lint.run": ("Lint",),
    "aprfmt.inspection.hex.run": ("hex", "HexDump"),
    "aprfmt.inspection.tree": ("tree", "Tree"),
    "aprfmt.running.doctor": ("doctor", "Diagnosis"),
    "aprtrain.api": ("evaluate", "teacher", "distill", "pretrain", "resume"),
    "aprfmt.texts.summary": ("DataReport",),
    "aprfmt.running.teacher": ("TeacherReport",),
    "aprfmt.running.canary": ("make_canary", "check_canary", "parity", "CanaryReport"),
    "aprfmt.running.qa": ("QaReport",),
    "aprfmt.running.bench": ("BenchReport",),
    "aprfmt.running.imatrix": ("imatrix", "merge_imatrix"),
    "aprfmt.running.divergence": ("kl_divergence",),
    "aprfmt.running.importance": ("ImatrixReport",),
    "aprfmt.running.divergence_report": ("Divergence",),
    "aprfmt.running.evaluation": ("Evaluation",),
    "aprfmt.convert.meta": (
        "metadata",
        "metadata_value",
        "edit_metadata",
        "chat_template",
        "render_chat",
        "Metadata",
        "MetadataEdit",
    ),
    "aprfmt.publishing.push": ("push", "PushReport"),
    "aprfmt.publishing.oci": ("push_oci", "pull", "OciPushReport", "PullReport"),
    "aprfmt.publishing.sbom": ("sbom",),
    "aprfmt.publishing.signing": ("sign", "verify", "SignatureReport"),
    "aprfmt.running.generate": ("RunResult",),
    "aprfmt.inspection.tensor_list": ("tensors", "TensorList"),
    "aprfmt.inspection.architecture_list": ("architectures",),
    "aprfmt.inspection.runs": ("runs", "Runs"),
    "aprfmt.running.embeddings": ("Embeddings",),
    "aprfmt.inspection.vocabulary": ("vocab", "Vocabulary"),
    "aprfmt.model": ("Model", "Tensor"),
}
_LAZY = {
    name.partition("=")[0]: f"{module}:{name.rpartition('=')[2]}"
    for module, names in _MODULES.items()
    for name in names
}

__all__ = [
    "APR_FLAGS", "AprError", "BenchReport", "CanaryReport", "Comparison", "DataReport", "Diagnosis", "Divergence",
    "Embeddings", "Evaluation", "HexDump", "ImatrixReport", "Inspection", "Lint", "Metadata", "MetadataEdit", "Model",
    "OciPushReport", "PullReport", "PushReport", "QaReport", "RawTensor", "Report", "RunResult", "Runs",
    "SignatureReport", "StampReport", "TeacherReport", "Tensor", "TensorList", "Tree", "Validation", "Vocabulary",
    "__version__", "architectures", "bench", "canonicalize_aliases", "chat_template", "check_canary", "convert_model",
    "data", "detect", "diff", "distill", "doctor", "dump_metadata", "edit_metadata", "embed", "encode", "evaluate",
    "export_model", "extract_adapter", "hex", "imatrix", "import_model", "inspect", "kl_divergence", "lint",
    "lint_rules", "load_file", "make_canary", "merge", "merge_adapter", "merge_imatrix", "merge_models", "metadata",
    "metadata_value", "open", "parity", "pretrain", "prune_model", "pull", "push", "push_oci", "qa", "quantize_model",
    "read_v1", "render_chat", "report", "resume", "rewrite_file", "run", "runs", "save_file", "sbom", "shard", "sign",
    "stamp", "teacher", "tensors", "transplant_model", "tree", "validate", "verify", "vocab", "write_v1",
]  # fmt: skip

if TYPE_CHECKING:
    from aprfmt.api import bench, data, embed, lint, lint_rules, qa, report, run, shard, validate
    from aprfmt.codecs.recode import encode
    from aprfmt.convert.api import convert_model, export_model, import_model
    from aprfmt.convert.merge_adapters import extract_adapter, merge_adapter
    from aprfmt.convert.merge_models import merge_models
    from aprfmt.convert.merge_models import merge_models as merge
    from aprfmt.convert.meta import (
        Metadata,
        MetadataEdit,
        chat_template,
        edit_metadata,
        metadata,
        metadata_value,
        render_chat,
    )
    from aprfmt.convert.pruning import prune_model
    from aprfmt.convert.report import Report
    from aprfmt.convert.stamp import StampReport, stamp
    from aprfmt.convert.transplant import transplant_model
    from aprfmt.formats import detect, open
    from aprfmt.formats.apr1 import read_v1, write_v1
    from aprfmt.formats.apr2 import FLAGS as APR_FLAGS
    from aprfmt.formats.apr2_write import RawTensor, load_file, save_file
    from aprfmt.formats.apr2_write import rewrite as rewrite_file
    from aprfmt.formats.apr_metadata import canonicalize_aliases
    from aprfmt.formats.apr_metadata import dump as dump_metadata
    from aprfmt.inspection.architecture_list import architectures
    from aprfmt.inspection.comparison import Comparison
    from aprfmt.inspection.describe import Inspection, inspect
    from aprfmt.inspection.diff import diff
    from aprfmt.inspection.hex.run import HexDump, hex
    from aprfmt.inspection.lint.run import Lint
    from aprfmt.inspection.runs import Runs, runs
    from aprfmt.inspection.tensor_list import TensorList, tensors
    from aprfmt.inspection.tree import Tree, tree
    from aprfmt.inspection.validate import Validation
    from aprfmt.inspection.vocabulary import Vocabulary, vocab
    from aprfmt.model import Model, Tensor
    from aprfmt.publishing.oci import OciPushReport, PullReport, pull, push_oci
    from aprfmt.publishing.push import PushReport, push
    from aprfmt.publishing.sbom import sbom
    from aprfmt.publishing.signing import SignatureReport, sign, verify
    from aprfmt.running.bench import BenchReport
    from aprfmt.running.canary import CanaryReport, check_canary, make_canary, parity
    from aprfmt.running.divergence import kl_divergence
    from aprfmt.running.divergence_report import Divergence
    from aprfmt.running.doctor import Diagnosis, doctor
    from aprfmt.running.embeddings import Embeddings
    from aprfmt.running.evaluation import Evaluation
    from aprfmt.running.generate import RunResult
    from aprfmt.running.imatrix import imatrix, merge_imatrix
    from aprfmt.running.importance import ImatrixReport
    from aprfmt.running.qa import QaReport
    from aprfmt.running.quantize import quantize_model
    from aprfmt.running.teacher import TeacherReport
    from aprfmt.texts.summary import DataReport
    from aprtrain.api import distill, evaluate, pretrain, resume, teacher


def __getattr__(name: str) -> object:
    place = _LAZY.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module
    from types import FunctionType

    from aprfmt.errors import memory_errors, worded_errors

    module, _, own = place.partition(":")
    value: object = getattr(import_module(module), own)
    if isinstance(value, FunctionType):
        value = worded_errors(memory_errors(value))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
