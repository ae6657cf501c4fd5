"""ctypes bindings of llama.cpp and mtmd, for the library in whichever Python package provides it.

Both packages of `engine.ENGINES` contain a shared library that exports llama.h. ctypes cannot know how a build lays out
its parameter structures: their default values, some of which are known, identify one of the layouts below.
"""

from __future__ import annotations

import ctypes
import importlib
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int8, c_int32, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from aprfmt.llama.engine import LayoutError

if TYPE_CHECKING:
    from _ctypes import CFuncPtr, _CDataType

Token = c_int32
Pointer = c_void_p
_ROOM = 512
"""Bytes of a parameter structure, more than any layout has. As an argument it is always the last one, on the stack or
behind a pointer, so a function ignores what follows the fields that it knows.
"""

EVAL_CALLBACK = ctypes.CFUNCTYPE(c_bool, Pointer, c_bool, Pointer)
"""ggml_backend_sched_eval_callback: (tensor, whether it only asks if the tensor is wanted, user data)."""

_CType: TypeAlias = "type[_CDataType]"
_Field: TypeAlias = "tuple[str, _CType]"
_Signature: TypeAlias = "tuple[_CType | None, list[_CType]]"
"""Return type, None for nothing, and argument types."""

_MODEL_FIELDS: list[_Field] = [
    ("devices", Pointer),
    ("tensor_buft_overrides", Pointer),
    *((name, c_int32) for name in ("n_gpu_layers", "split_mode", "load_mode", "lazy_mode", "main_gpu")),
    ("tensor_split", Pointer),
    ("progress_callback", Pointer),
    ("progress_callback_user_data", Pointer),
    ("kv_overrides", Pointer),
    *((name, c_bool) for name in ("vocab_only", "check_tensors", "use_extra_bufts", "no_host", "no_alloc", "load_mtp")),
]

_CONTEXT_FIELDS: list[_Field] = [
    *((name, c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")),
    *((name, c_uint32) for name in ("n_outputs_max", "n_outputs_max_per_seq")),
    *((name, c_int32) for name in ("n_threads", "n_threads_batch")),
    *(
        (name, c_int32)
        for name in ("ctx_type", "rope_scaling_type", "pooling_type", "attention_type", "flash_attn_type")
    ),
    *((name, c_float) for name in ("rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor")),
    *((name, c_float) for name in ("yarn_beta_fast", "yarn_beta_slow")),
    ("yarn_orig_ctx", c_uint32),
    ("defrag_thold", c_float),
    ("cb_eval", Pointer),
    ("cb_eval_user_data", Pointer),
    ("type_k", c_int32),
    ("type_v", c_int32),
    ("abort_callback", Pointer),
    ("abort_callback_data", Pointer),
    *((name, c_bool) for name in ("embeddings", "offload_kqv", "no_perf", "op_offload", "swa_full", "kv_unified")),
    ("samplers", Pointer),
    ("n_samplers", c_size_t),
    ("ctx_other", Pointer),
]


def _with(fields: list[_Field], new: _Field, before: str) -> list[_Field]:
    at = [name for name, _ in fields].index(before)
    return [*fields[:at], new, *fields[at:]]


_MODEL_LAYOUTS = [_MODEL_FIELDS]
_CONTEXT_LAYOUTS = [_CONTEXT_FIELDS, _with(_CONTEXT_FIELDS, ("moe_cache_size", c_size_t), "abort_callback")]
"""In llama.h of b11434 and b11549."""

_KNOWN: dict[str, dict[str, object]] = {
    "llama_model_default_params": {"vocab_only": False, "use_extra_bufts": True, "no_alloc": False},
    "llama_context_default_params": {"n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "pooling_type": -1, "type_k": 1}
    | {"cb_eval": None, "embeddings": False, "offload_kqv": True, "no_perf": True, "op_offload": True},
    "mtmd_context_params_default": {"use_gpu": True, "n_threads": 4, "media_marker": b"<__media__>", "warmup": True}
    | {"image_min_tokens": -1, "image_max_tokens": -1, "cb_eval": None, "progress_callback": None},
}
"""Defaults that have not changed for long; another value means another layout."""


class LlamaBatch(Structure):
    """llama_batch: without positions and sequences, the tokens follow those of sequence 0."""

    _fields_ = (
        ("n_tokens", c_int32), ("token", POINTER(Token)), ("embd", POINTER(c_float)), ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)), ("seq_id", POINTER(POINTER(c_int32))), ("logits", POINTER(c_int8)),
    )  # fmt: skip


class InputText(Structure):
    """mtmd_input_text."""

    _fields_ = (("text", c_char_p), ("text_len", c_size_t), ("add_special", c_bool), ("parse_special", c_bool))


class MediaOptions(Structure):
    """mtmd_helper_init_opt: how videos are read."""

    _fields_ = (("fps_target", c_float), ("ffmpeg_bin_dir", c_char_p), ("timestamp_interval_ms", ctypes.c_int64))


class Bitmap(Structure):
    """mtmd_helper_bitmap_wrapper: an image or audio; `film` if it is one of many frames."""

    _fields_ = (("bitmap", Pointer), ("film", Pointer))


class ChatMessage(Structure):
    """llama_chat_message."""

    _fields_ = (("role", c_char_p), ("content", c_char_p))


class _SamplerChainParams(Structure):
    _fields_ = (("no_perf", c_bool),)


_FUNCTIONS: dict[str, _Signature] = {
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [Pointer, Pointer]),
    "llama_model_get_vocab": (Pointer, [Pointer]),
    "llama_model_n_embd_inp": (c_int32, [Pointer]),
    "llama_model_n_embd_out": (c_int32, [Pointer]),
    "llama_model_n_cls_out": (c_uint32, [Pointer]),
    "llama_model_n_ctx_train": (c_int32, [Pointer]),
    "llama_model_has_encoder": (c_bool, [Pointer]),
    "llama_model_has_decoder": (c_bool, [Pointer]),
    "llama_model_decoder_start_token": (Token, [Pointer]),
    "llama_model_size": (ctypes.c_uint64, [Pointer]),
    "llama_vocab_n_tokens": (c_int32, [Pointer]),
    "llama_vocab_bos": (Token, [Pointer]),
    "llama_vocab_eos": (Token, [Pointer]),
    "llama_vocab_is_eog": (c_bool, [Pointer, Token]),
    "llama_vocab_get_add_bos": (c_bool, [Pointer]),
    "llama_tokenize": (c_int32, [Pointer, c_char_p, c_int32, POINTER(Token), c_int32, c_bool, c_bool]),
    "llama_token_to_piece": (c_int32, [Pointer, Token, c_char_p, c_int32, c_int32, c_bool]),
    "llama_n_ctx": (c_uint32, [Pointer]),
    "llama_n_batch": (c_uint32, [Pointer]),
    "llama_synchronize": (None, [Pointer]),
    "llama_get_memory": (Pointer, [Pointer]),
    "llama_memory_clear": (None, [Pointer, c_bool]),
    "llama_memory_seq_rm": (c_bool, [Pointer, c_int32, c_int32, c_int32]),
    "llama_encode": (c_int32, [Pointer, LlamaBatch]),
    "llama_decode": (c_int32, [Pointer, LlamaBatch]),
    "llama_get_logits_ith": (POINTER(c_float), [Pointer, c_int32]),
    "llama_get_embeddings_ith": (POINTER(c_float), [Pointer, c_int32]),
    "llama_get_embeddings_seq": (POINTER(c_float), [Pointer, c_int32]),
    "llama_adapter_lora_init": (Pointer, [Pointer, c_char_p]),
    "llama_set_adapters_lora": (c_int32, [Pointer, POINTER(Pointer), c_size_t, POINTER(c_float)]),
    "llama_sampler_chain_init": (Pointer, [_SamplerChainParams]),
    "llama_sampler_chain_add": (None, [Pointer, Pointer]),
    "llama_sampler_init_greedy": (Pointer, []),
    "llama_sampler_init_dist": (Pointer, [c_uint32]),
    "llama_sampler_init_top_k": (Pointer, [c_int32]),
    "llama_sampler_init_top_p": (Pointer, [c_float, c_size_t]),
    "llama_sampler_init_min_p": (Pointer, [c_float, c_size_t]),
    "llama_sampler_init_temp": (Pointer, [c_float]),
    "llama_sampler_sample": (Token, [Pointer, Pointer, c_int32]),
    "llama_sampler_free": (None, [Pointer]),
    "llama_vocab_get_add_eos": (c_bool, [Pointer]),
    "llama_vocab_get_add_sep": (c_bool, [Pointer]),
    "llama_vocab_sep": (Token, [Pointer]),
    "llama_chat_apply_template": (c_int32, [c_char_p, POINTER(ChatMessage), c_size_t, c_bool, c_char_p, c_int32]),
    "llama_supports_gpu_offload": (c_bool, []),
    "llama_print_system_info": (c_char_p, []),
}
"""Name -> (result, arguments) of functions without parameter structures by value."""


_MEDIA_FIELDS: list[_Field] = [
    ("use_gpu", c_bool), ("device", Pointer), ("print_timings", c_bool), ("n_threads", c_int32),
    ("image_marker", Pointer), ("media_marker", c_char_p), ("flash_attn_type", c_int32), ("warmup", c_bool),
    ("image_min_tokens", c_int32), ("image_max_tokens", c_int32), ("cb_eval", Pointer), ("cb_eval_user_data", Pointer),
    ("batch_max_tokens", c_int32), ("progress_callback", Pointer), ("progress_callback_user_data", Pointer),
]  # fmt: skip
_POSITION = POINTER(c_int32)

_MEDIA_FUNCTIONS: dict[str, _Signature] = {
    "mtmd_support_vision": (c_bool, [Pointer]),
    "mtmd_support_audio": (c_bool, [Pointer]),
    "mtmd_helper_init_opt_default": (MediaOptions, []),
    "mtmd_helper_bitmap_init_from_file": (Bitmap, [Pointer, c_char_p, c_bool, MediaOptions]),
    "mtmd_bitmap_is_audio": (c_bool, [Pointer]),
    "mtmd_bitmap_free": (None, [Pointer]),
    "mtmd_input_chunks_init": (Pointer, []),
    "mtmd_input_chunks_free": (None, [Pointer]),
    "mtmd_tokenize": (c_int32, [Pointer, Pointer, POINTER(InputText), POINTER(Pointer), c_size_t]),
    "mtmd_helper_get_n_tokens": (c_size_t, [Pointer]),
    "mtmd_helper_eval_chunks": (c_int32, [Pointer, Pointer, Pointer, c_int32, c_int32, c_int32, c_bool, _POSITION]),
}
"""Functions of mtmd.h and mtmd-helper.h."""


class Functions:
    """Functions of a shared library as attributes, under their names without the common prefix.

    Args:
        path: the library.
        prefix: "llama_" or "mtmd_".
        table: name -> (result, arguments).

    Raises:
        ImportError: the library does not export one of them.
    """

    def __init__(self, path: Path, prefix: str, table: dict[str, _Signature]) -> None:
        self._library, self._prefix = ctypes.CDLL(str(path)), prefix
        self._defaults: dict[type[Structure], bytes] = {}
        for name, (result, arguments) in table.items():
            self.declare(name, result, arguments)

    def declare(self, name: str, result: _CType | None, arguments: list[_CType]) -> None:
        """Makes a function of the library an attribute. Raises ImportError if the library does not export it."""
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise ImportError(f"its library does not export {name}") from None
        function.restype, function.argtypes = result, arguments
        setattr(self, name.removeprefix(self._prefix), function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} is not declared")

    def _parameters(self, default: str, layouts: list[list[_Field]]) -> type[Structure]:
        """The structure whose defaults the function `default` returns, with room after its fields."""
        raw = type("Raw", (Structure,), {"_fields_": [("bytes", ctypes.c_uint8 * _ROOM)]})
        function = getattr(self._library, default)
        function.restype, function.argtypes = raw, []
        memory = bytes(function())
        for fields in layouts:
            room = _ROOM - ctypes.sizeof(type("Fields", (Structure,), {"_fields_": fields}))
            padded: type[Structure] = type(
                "Parameters", (Structure,), {"_fields_": [*fields, ("room", ctypes.c_uint8 * room)]}
            )
            found = padded.from_buffer_copy(memory)
            if all(getattr(found, name) == value for name, value in _KNOWN[default].items()):
                self._defaults[padded] = memory
                return padded
        raise LayoutError(f"this build of llama.cpp has a different {default.removesuffix('_default_params')}_params")


class LlamaLibrary(Functions):
    """The functions of llama.h.

    Args:
        package: a key of engine.ENGINES.

    Raises:
        ImportError: the package is not installed, or has no library that exports llama.h.
        LayoutError: the layout of the library's structures is unknown.
    """

    def __init__(self, package: str) -> None:
        self.package = package
        super().__init__(_library_of(package, _LIBRARIES), "llama_", _FUNCTIONS)
        self._model_params = self._parameters("llama_model_default_params", _MODEL_LAYOUTS)
        self._context_params = self._parameters("llama_context_default_params", _CONTEXT_LAYOUTS)
        self.declare("llama_model_load_from_file", Pointer, [c_char_p, self._model_params])
        self.declare("llama_init_from_model", Pointer, [Pointer, self._context_params])
        self.backend_init()
        self.log_set(None, None)  # a package may have set a filter; the client logs stderr

    def callback(self, parameters: Structure, name: str, function: CFuncPtr) -> None:
        """Sets a field of a parameter structure to a C callback, which the caller keeps alive."""
        setattr(parameters, name, ctypes.cast(function, Pointer).value)

    def model_params(self) -> Structure:
        """llama.cpp's defaults for loading a model."""
        return self._model_params.from_buffer_copy(self._defaults[self._model_params])

    def context_params(self) -> Structure:
        """llama.cpp's defaults for a context."""
        return self._context_params.from_buffer_copy(self._defaults[self._context_params])

    def sampler_chain(self) -> int:
        """An empty sampler chain."""
        chain: int = self.sampler_chain_init(_SamplerChainParams(True))
        return chain


class MediaLibrary(Functions):
    """The functions of mtmd.h and mtmd-helper.h, which turn images and audio into input of a language model.

    Raises as LlamaLibrary.
    """

    def __init__(self, package: str) -> None:
        super().__init__(_library_of(package, _MEDIA_LIBRARIES), "mtmd_", _MEDIA_FUNCTIONS)
        self._params = self._parameters("mtmd_context_params_default", [_MEDIA_FIELDS])
        self.declare("mtmd_init_from_file", Pointer, [c_char_p, Pointer, self._params])

    def params(self) -> Structure:
        """mtmd's defaults for loading a tower."""
        return self._params.from_buffer_copy(self._defaults[self._params])


_LIBRARIES = ("xllamacpp*.so", "xllamacpp*.pyd", "lib/libllama.so", "lib/libllama.dylib", "lib/llama.dll")
_MEDIA_LIBRARIES = ("xllamacpp*.so", "xllamacpp*.pyd", "lib/libmtmd.so", "lib/libmtmd.dylib", "lib/mtmd.dll")


def _library_of(package: str, patterns: tuple[str, ...]) -> Path:
    """The first shared library in an installed package with one of these names. Raises ImportError."""
    module = importlib.import_module(package)  # its own import loads what the library needs
    folder = Path(module.__file__ or "").parent
    for pattern in patterns:
        if found := next(folder.glob(pattern), None):
            return found
    raise ImportError(f"no shared library found in {package}")
