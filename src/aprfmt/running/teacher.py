"""Report of `apr teacher`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass(slots=True, kw_only=True)
class TeacherReport:
    """Report of `apr teacher` about the files it wrote, or would write.

    Attributes:
        output: output folder.
        teacher, engine: the teacher, and the engine that ran it.
        top_k, temperatures, seq_len: saved tokens per position, temperatures of the residual mass, sequence length.
        windows: number of sequences by part; estimated in a plan.
        tokens: number of computed positions; in a plan, the estimated total.
        files, resumed: number of files in total, and of those that already existed.
        bytes: size of all files; estimated in a plan.
        prompts: number of prompts written with --prompts, else None.
        teacher_ce: cross entropy of the computed positions in nats; None if none were computed.
        rest: temperature -> mean residual mass of the computed positions.
        seconds: wall time.
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
