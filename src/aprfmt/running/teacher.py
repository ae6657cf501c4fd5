"""What `apr teacher` says of the files that it writes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass(slots=True, kw_only=True)
class TeacherReport:
    """Files of what a teacher says.

    Attributes:
        output: their folder.
        teacher, engine: what says it, and what computed it.
        top_k, temperatures, seq_len: ids known of a position, where the mass of all others is known, window's tokens.
        windows: by part; in a plan of text that is not tokenised yet, about so many.
        tokens: positions that were computed; in a plan, about what there is.
        files, resumed: how many there are, and how many of them were there before.
        bytes: of all files; in a plan, about.
        prompts: how many were written, None where none were asked for.
        teacher_ce: cross entropy in nats of the positions that were computed; None where none were.
        rest: temperature -> mean mass of all others at those.
        seconds: what it took.
    """

    output: str
    teacher: str
    engine: str
    top_k: int
    temperatures: list[float]
    seq_len: int
    windows: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    files: int = 0
    resumed: int = 0
    bytes: int = 0
    prompts: int | None = None
    teacher_ce: float | None = None
    rest: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def to_json(self) -> dict[str, object]:
        """The object of `apr teacher --json`."""
        return asdict(self)
