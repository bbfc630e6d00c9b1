"""From what a predictor names to what is set: smoothed, bounded, and still when nothing lasting calls for a change."""

from __future__ import annotations

from noria.pacer.base import Sizes

_BAND = 0.1  # share of the size: a prediction nearer than that may be noise
_LASTING = 3  # predictions in a row on the same side that show that it is none
_LASTING_FAR = 2  # the same, of those beyond the band: one alone may still be a stray
_MOST_INTERVALS = 8.0  # that a late decision makes up for


class Figure:
    """One size, moved towards what is predicted.

    new = factor · current + (1 - factor) · predicted, rounded, but at least one nearer. It moves only once several
    predictions in a row have been on the same side of it, so that those which come and go do not move it.

    Args:
        factor: weight of the current size, at least 0 and below 1.
        value: to begin with.
    """

    def __init__(self, factor: float, value: int) -> None:
        self._factor = factor
        self.value = value
        self._side = 0  # of the last predictions
        self._lasted = 0  # how many of them

    def move(self, target: int, intervals: float = 1.0) -> int:
        """Takes in a prediction; returns the new value.

        Args:
            intervals: how many have passed since the prediction before: so many steps are made at once.
        """
        value = self.value
        side = (target > value) - (target < value)
        self._lasted = self._lasted + 1 if side == self._side else 1
        self._side = side
        far = abs(target - value) > max(1.0, _BAND * value)
        if side and self._lasted >= (_LASTING_FAR if far else _LASTING):
            keep = self._factor ** min(max(intervals, 1.0), _MOST_INTERVALS)
            moved = round(keep * value + (1.0 - keep) * target)
            self.value = value + side if moved == value else moved
        return self.value


class Adjuster:
    """Batch size and token budget.

    Args:
        factor: see `Figure`.
        least: smallest batch. most: largest sizes.
    """

    def __init__(self, factor: float, least: int, most: Sizes) -> None:
        self._least = min(least, most.batch)
        self._most = most
        self._batch, self._budget = Figure(factor, most.batch), Figure(factor, most.budget)

    @property
    def sizes(self) -> Sizes:
        """In force. There is a token for each of a full batch, as far as the budget may be so large."""
        budget = max(self._budget.value, self._batch.value)
        return Sizes(self._batch.value, min(budget, self._most.budget))

    def move(self, target: Sizes, intervals: float = 1.0) -> Sizes:
        """Takes in a prediction, cut to what may be set; returns the new sizes."""
        self._batch.move(min(max(target.batch, self._least), self._most.batch), intervals)
        self._budget.move(min(max(target.budget, 1), self._most.budget), intervals)
        return self.sizes
