"""Test data of `apr qa`: plain text, prompts with known answers, and a conversation.

The text was written for this package, so no model was trained on it.
"""

from __future__ import annotations

from typing import NamedTuple

PROSE = """\
The village lay at the end of a narrow valley, where the road stopped being a road and became a path for sheep. \
In winter the sun came over the ridge at eleven and was gone again before three, and people lit their lamps \
early and went to bed early too. Nobody could remember a time when the school had had more than twenty children, \
and this year there were only nine of them. Their teacher, a tall woman called Anna Berg, had come from the city \
for one year and stayed for thirty.

One morning in March the snow on the roof of the school began to slide. The children heard it first: a long, low \
sound, like a cart being pulled over stones. Then a great white sheet fell past the windows and the room was \
dark. For a moment no one said anything. Then the youngest boy began to laugh, and the others laughed with him, \
and Anna took the shovel from behind the door and went out to see what had happened. When she came back, her \
coat was white up to the shoulders. "Well," she said, "it seems that spring has arrived."

Water boils at a lower temperature in the mountains than it does by the sea, because there is less air above it \
to press it down. This is why an egg takes longer to cook in a high valley. A good cook knows this without \
knowing why, in the same way that a good carpenter knows which way a board will bend when it dries. Most of what \
we know is of this kind. We can ride a bicycle, but we cannot say how; we know the face of a friend in a crowd, \
but we could not draw it. What can be written down is only a small part of what can be learned, and the rest has \
to be shown by one person to another.

The first clocks had no hands. They rang a bell, and people who heard it counted the strokes. Only much later \
did somebody think of putting a dial on the tower, so that the hour could be seen as well as heard, and it took \
another three hundred years before anyone needed to know the minute. Trains changed that. A train that leaves at \
noon must leave at the same noon in every town along the line, and so the towns gave up their own time and took \
that of the railway.

The bakery in the lower town opens at six. By then the bread has been in the oven for half an hour, and the smell of \
it has gone up the street as far as the church. The baker is a quiet man who has done the same work in the same room \
since he was fifteen years old. If you ask him how he knows when a loaf is ready, he will take one out, turn it over \
and knock on it with one finger, the way you would knock on a door. "It has to answer," he says. He sells two hundred \
loaves on a Monday and three hundred and fifty on a Saturday, and what is left in the evening goes to the school, \
where the children eat it with butter and honey.
"""

CODE = '''\
def mean(values):
    """Return the arithmetic mean of a list of numbers."""
    if not values:
        raise ValueError("the list is empty")
    return sum(values) / len(values)


class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()

    def __len__(self):
        return len(self.items)


def count_words(path):
    counts = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            for word in line.lower().split():
                counts[word] = counts.get(word, 0) + 1
    return sorted(counts.items(), key=lambda item: item[1], reverse=True)


def main():
    stack = Stack()
    for i in range(10):
        stack.push(i * i)
    while len(stack) > 0:
        print(stack.pop())


if __name__ == "__main__":
    main()
'''

NUMBERS = """\
Monday 1, Tuesday 2, Wednesday 3, Thursday 4, Friday 5, Saturday 6, Sunday 7.
10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120, 130, 140, 150, 160, 170, 180, 190, 200.
2 x 1 = 2, 2 x 2 = 4, 2 x 3 = 6, 2 x 4 = 8, 2 x 5 = 10, 2 x 6 = 12, 2 x 7 = 14, 2 x 8 = 16, 2 x 9 = 18.
January 31, February 28, March 31, April 30, May 31, June 30, July 31, August 31, September 30, October 31.
"""

TEXTS = (PROSE, CODE, NUMBERS)

PROMPTS = (
    "The capital of France is",
    "def add(a, b):\n    return",
    "1, 2, 3, 4,",
    "Once upon a time there was a king who",
    "\u00dcber den Wolken; \u4f60\u597d; \U0001f600 \u2014",
)
"""Short prompts of several kinds, one with multi-byte characters."""

STORIES = (
    "My name is Anna and I live in a small village. Every morning I",
    "The three most important things to know about water are",
)
"""Prompts of text that continues for a while."""


PAIRS = (
    ("A man is playing a guitar on the street.", "Someone plays the guitar outside."),
    ("The children eat bread with butter.", "Kids are having buttered bread."),
    ("The train to the city is late again.", "Once more the train to town is delayed."),
)
"""Sentences and paraphrases of them."""

UNRELATED = "Water boils at a lower temperature in the mountains."
QUERY = "What is the capital of France?"
"""The query for rerankers."""


class Question(NamedTuple):
    """A prompt, the possible answers, and the index of the right one."""

    prompt: str
    answers: tuple[str, ...]
    right: int


_WORDS = ("river", "table", "green", "music", "paper", "house", "horse", "seven")
_DIGITS = tuple("0123456789")
_SUMS = ((2, 3), (1, 6), (4, 4), (7, 2), (3, 1), (5, 3), (1, 1), (6, 2), (2, 2), (8, 1), (3, 4), (0, 5))

COPY = tuple(
    Question(f"stone -> stone\nwater -> water\nbread -> bread\n{word} ->", tuple(f" {other}" for other in _WORDS), i)
    for i, word in enumerate(_WORDS)
)
ARITHMETIC = tuple(
    Question(f"1 + 2 = 3\n4 + 1 = 5\n5 + 4 = 9\n2 + 0 = 2\n{a} + {b} =", tuple(f" {n}" for n in _DIGITS), a + b)
    for a, b in _SUMS
)

USER = QUERY
ANSWER = "The capital of France is Paris."


class Format(NamedTuple):
    """A published chat format: the text before the user's message, before the answer, and after it."""

    before: str
    between: str
    behind: str

    @property
    def text(self) -> tuple[str, str]:
        """A conversation up to the answer, and from the answer on."""
        return f"{self.before}{USER}{self.between}", f"{ANSWER}{self.behind}"


FORMATS = {
    "ChatML": Format("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"),
    "Llama 3": Format(
        "<|start_header_id|>user<|end_header_id|>\n\n",
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
    ),
    "Gemma": Format("<start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n", "<end_of_turn>"),
    "Phi 3": Format("<|user|>\n", "<|end|>\n<|assistant|>\n", "<|end|>"),
    "Zephyr": Format("<|user|>\n", "</s>\n<|assistant|>\n", "</s>"),
    "Llama 2": Format("[INST] ", " [/INST] ", "</s>"),
    "DeepSeek": Format("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    "GLM": Format("<|user|>\n", "<|assistant|>\n", "<|user|>"),
}
