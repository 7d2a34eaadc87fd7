"""Will it fit, how fast, what holds it back: any model on any described machine, before anything runs."""

from lohan.estimate.estimate import Estimate, Question, answer, compare

__all__ = ["Estimate", "Question", "answer", "compare"]
