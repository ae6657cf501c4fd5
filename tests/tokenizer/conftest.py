"""Mixed texts, and vocabulary-only GGUF files for llama.cpp."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = [
    "The quick brown fox, I've told you, WE'RE here: don't!",
    "Größe, naïveté, Ærøskøbing, façade — «œuvre»",
    "Съешь же ещё этих мягких французских булок",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "我想在apple工作1314151天～ 天地玄黄，宇宙洪荒。",
    "いろはにほへと ちりぬるを カタカナ",
    "다람쥐 헌 쳇바퀴에 타고파",
    "نص حكيم له سر قاطع وذو شأن عظيم",
    "דג סקרן שט בים מאוכזב",
    "ឥឡូវនេះ កាន់តែពិសេស",
    "नमस्ते दुनिया, यह परीक्षण है",
    "ทดสอบภาษาไทย",
    "Tiếng Việt có dấu",
]
CODE = [
    "def f(x: int) -> str:\n    return f'{x:>8}'\n\n",
    "for (int i = 0; i < n; ++i) {\n\tsum += a[i];\n}\n",
    'SELECT * FROM "t" WHERE a=1 -- x\r\n',
    "<div class='a'>&amp;</div>",
    "x = np.array([[1, 2], [3.5e-7, 0xFF]])  # noqa\n",
    "`````~~~!!!???;;;::",
]
EMOJI = ["🚀", "😶\u200d🌫️", "🦙🦙", "✅", "👩🏽\u200d💻", "🇩🇪", "\u200b", "\u00a0", "\u3000", "\ufeff"]
NUMBERS = ["3", "33", "333", "3333", "1234567890", "3.14", "1,000,000", "½", "٣٤٥", "²", "Ⅻ", "-7e+12"]
SPACES = [" ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", "\t\t ", " \n  ", "\v", "\f", " " * 17]
CONTROLS = ["\x00", "\x01", "\x07", "\x1b[0m", "\x7f", "\x85", "\u2028"]


def make_texts(n: int, specials: Sequence[str], seed: int = 7) -> list[str]:
    """`n` different mixed texts in NFC; llama.cpp does not normalise, Qwen's tokenizers do."""
    rng = random.Random(seed)
    groups = [SCRIPTS, SCRIPTS, CODE, EMOJI, NUMBERS, SPACES, SPACES, CONTROLS, list(specials) or SPACES]
    texts = dict.fromkeys([*SCRIPTS, *CODE, *EMOJI, *NUMBERS, *SPACES, *CONTROLS, *specials[:20]])
    while len(texts) < n:
        parts = []
        for _ in range(rng.randint(1, 9)):
            part = rng.choice(rng.choice(groups))
            if len(part) > 6 and part not in specials and rng.random() < 0.6:
                start = rng.randrange(len(part))
                part = part[start : start + rng.randint(1, 12)]
            parts.append(part)
        texts[unicodedata.normalize("NFC", "".join(parts))] = None
    return list(texts)[:n]


@pytest.fixture(scope="session")
def mixed_texts() -> Callable[[int, Sequence[str]], list[str]]:
    """See make_texts."""
    return make_texts


@pytest.fixture
def llama_vocabulary(tmp_path: Path) -> Iterator[Callable[[Sequence[tuple[str, Any, Any]]], Any]]:
    """Writes tokenizer keys into a vocabulary-only GGUF and loads it with llama.cpp."""
    llama_cpp = pytest.importorskip("llama_cpp")
    import gguf

    loaded: list[Any] = []

    def load(keys: Sequence[tuple[str, Any, Any]]) -> Any:
        path = tmp_path / f"vocabulary{len(loaded)}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for key, kind, value in keys:
            if isinstance(kind, tuple):
                value_type = gguf.GGUFValueType[kind[0]]
                writer.add_key_value(key, value, value_type, sub_type=gguf.GGUFValueType[kind[1]])
            else:
                writer.add_key_value(key, value, gguf.GGUFValueType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        loaded.append(llama_cpp.Llama(str(path), vocab_only=True, verbose=False))
        return loaded[-1]

    yield load
    for model in loaded:
        model.close()
