"""Package language models: read, write and convert APR, GGUF, safetensors and Hugging Face folders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aprfmt.errors import AprError

__version__ = "0.1.0"

# Public name -> module (and the name there, if another), loaded on first use so that `import aprfmt` stays cheap.
_LAZY = {
    "detect": "aprfmt.formats",
    "open": "aprfmt.formats",
    "RawTensor": "aprfmt.formats.apr2_write",
    "save_file": "aprfmt.formats.apr2_write",
    "load_file": "aprfmt.formats.apr2_write",
    "rewrite_file": "aprfmt.formats.apr2_write:rewrite",
    "APR_FLAGS": "aprfmt.formats.apr2:FLAGS",
    "canonicalize_aliases": "aprfmt.formats.apr_metadata",
    "dump_metadata": "aprfmt.formats.apr_metadata:dump",
    "encode": "aprfmt.codecs.recode",
    "read_v1": "aprfmt.formats.apr1",
    "write_v1": "aprfmt.formats.apr1",
    "import_model": "aprfmt.convert.api",
    "export_model": "aprfmt.convert.api",
    "convert_model": "aprfmt.convert.api",
    "quantize_model": "aprfmt.running.quantize",
    "merge": "aprfmt.convert.merge_models:merge_models",
    "merge_models": "aprfmt.convert.merge_models",
    "merge_adapter": "aprfmt.convert.merge_adapters",
    "extract_adapter": "aprfmt.convert.merge_adapters",
    "prune_model": "aprfmt.convert.pruning",
    "Report": "aprfmt.convert.report",
    "stamp": "aprfmt.convert.stamp",
    "StampReport": "aprfmt.convert.stamp",
    "inspect": "aprfmt.inspection.describe",
    "Inspection": "aprfmt.inspection.describe",
    "validate": "aprfmt.api",
    "Validation": "aprfmt.inspection.validate",
    "diff": "aprfmt.inspection.diff",
    "Comparison": "aprfmt.inspection.comparison",
    "lint": "aprfmt.api",
    "lint_rules": "aprfmt.api",
    "Lint": "aprfmt.inspection.lint.run",
    "hex": "aprfmt.inspection.hex.run",
    "HexDump": "aprfmt.inspection.hex.run",
    "tree": "aprfmt.inspection.tree",
    "Tree": "aprfmt.inspection.tree",
    "doctor": "aprfmt.running.doctor",
    "Diagnosis": "aprfmt.running.doctor",
    "evaluate": "aprtrain.api",
    "data": "aprfmt.api",
    "DataReport": "aprfmt.texts.summary",
    "teacher": "aprtrain.api",
    "TeacherReport": "aprfmt.running.teacher",
    "bench": "aprfmt.api",
    "make_canary": "aprfmt.running.canary",
    "check_canary": "aprfmt.running.canary",
    "parity": "aprfmt.running.canary",
    "CanaryReport": "aprfmt.running.canary",
    "qa": "aprfmt.api",
    "QaReport": "aprfmt.running.qa",
    "BenchReport": "aprfmt.running.bench",
    "imatrix": "aprfmt.running.imatrix",
    "kl_divergence": "aprfmt.running.divergence",
    "merge_imatrix": "aprfmt.running.imatrix",
    "ImatrixReport": "aprfmt.running.importance",
    "Divergence": "aprfmt.running.divergence_report",
    "Evaluation": "aprfmt.running.evaluation",
    "metadata": "aprfmt.convert.meta",
    "metadata_value": "aprfmt.convert.meta",
    "edit_metadata": "aprfmt.convert.meta",
    "chat_template": "aprfmt.convert.meta",
    "render_chat": "aprfmt.convert.meta",
    "Metadata": "aprfmt.convert.meta",
    "MetadataEdit": "aprfmt.convert.meta",
    "report": "aprfmt.api",
    "push": "aprfmt.publishing.push",
    "push_oci": "aprfmt.publishing.oci",
    "pull": "aprfmt.publishing.oci",
    "OciPushReport": "aprfmt.publishing.oci",
    "PullReport": "aprfmt.publishing.oci",
    "sbom": "aprfmt.publishing.sbom",
    "sign": "aprfmt.publishing.signing",
    "verify": "aprfmt.publishing.signing",
    "SignatureReport": "aprfmt.publishing.signing",
    "PushReport": "aprfmt.publishing.push",
    "run": "aprfmt.api",
    "RunResult": "aprfmt.running.generate",
    "shard": "aprfmt.api",
    "tensors": "aprfmt.inspection.tensor_list",
    "TensorList": "aprfmt.inspection.tensor_list",
    "architectures": "aprfmt.inspection.architecture_list",
    "distill": "aprtrain.api",
    "pretrain": "aprtrain.api",
    "resume": "aprtrain.api",
    "runs": "aprfmt.inspection.runs",
    "Runs": "aprfmt.inspection.runs",
    "embed": "aprfmt.api",
    "Embeddings": "aprfmt.running.embeddings",
    "vocab": "aprfmt.inspection.vocabulary",
    "Vocabulary": "aprfmt.inspection.vocabulary",
    "Model": "aprfmt.model",
    "Tensor": "aprfmt.model",
}

__all__ = [
    "APR_FLAGS",
    "AprError",
    "BenchReport",
    "CanaryReport",
    "Comparison",
    "DataReport",
    "Diagnosis",
    "Divergence",
    "Embeddings",
    "Evaluation",
    "HexDump",
    "ImatrixReport",
    "Inspection",
    "Lint",
    "Metadata",
    "MetadataEdit",
    "Model",
    "OciPushReport",
    "PullReport",
    "PushReport",
    "QaReport",
    "RawTensor",
    "Report",
    "RunResult",
    "Runs",
    "SignatureReport",
    "StampReport",
    "TeacherReport",
    "Tensor",
    "TensorList",
    "Tree",
    "Validation",
    "Vocabulary",
    "__version__",
    "architectures",
    "bench",
    "canonicalize_aliases",
    "chat_template",
    "check_canary",
    "convert_model",
    "data",
    "detect",
    "diff",
    "distill",
    "doctor",
    "dump_metadata",
    "edit_metadata",
    "embed",
    "encode",
    "evaluate",
    "export_model",
    "extract_adapter",
    "hex",
    "imatrix",
    "import_model",
    "inspect",
    "kl_divergence",
    "lint",
    "lint_rules",
    "load_file",
    "make_canary",
    "merge",
    "merge_adapter",
    "merge_imatrix",
    "merge_models",
    "metadata",
    "metadata_value",
    "open",
    "parity",
    "pretrain",
    "prune_model",
    "pull",
    "push",
    "push_oci",
    "qa",
    "quantize_model",
    "read_v1",
    "render_chat",
    "report",
    "resume",
    "rewrite_file",
    "run",
    "runs",
    "save_file",
    "sbom",
    "shard",
    "sign",
    "stamp",
    "teacher",
    "tensors",
    "tree",
    "validate",
    "verify",
    "vocab",
    "write_v1",
]

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

    module, _, other = place.partition(":")
    value: object = getattr(import_module(module), other or name)
    if isinstance(value, FunctionType):
        value = worded_errors(memory_errors(value))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
