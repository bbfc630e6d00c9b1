"""The courses of requests that are or were answered, by whose they are and what they are called."""

from __future__ import annotations

from collections import OrderedDict

from noria.frontend.course import Course

MOST_COURSES = 1000
_MOST_CHOICES = 2 * MOST_COURSES  # of all of them together; an engine remembers no more than half as many
_PREFIXES = ("", "chatcmpl-", "cmpl-")  # a client's own request_id comes after one of them
_TRIES = 4


class Journal:
    """Keeps the last courses, and those that have not ended, which are bounded by the places that there are.

    Args:
        most: courses.
    """

    def __init__(self, most: int = MOST_COURSES) -> None:
        self._most = most
        self._courses: OrderedDict[tuple[str, str], Course] = OrderedDict()  # by owner and id, oldest first
        self._choices = 0

    def __len__(self) -> int:
        return len(self._courses)

    def add(self, course: Course) -> None:
        """A request was submitted. Of two with one id, the later counts."""
        self._remove((course.owner, course.id))
        self._courses[course.owner, course.id] = course
        self._choices += len(course.passages)
        for _ in range(_TRIES):
            if len(self._courses) <= self._most and self._choices <= _MOST_CHOICES:
                return
            oldest, found = next(iter(self._courses.items()))
            if found.ended is None:
                self._courses.move_to_end(oldest)
            else:
                self._remove(oldest)

    def find(self, owner: str, name: str) -> Course | None:
        """The course of an id, or of a client's own `request_id`."""
        found = (self._courses.get((owner, prefix + name)) for prefix in _PREFIXES)
        return next((course for course in found if course is not None), None)

    def latest(self, owner: str) -> list[Course]:
        """Of one owner, the last to come first."""
        own = (course for course in self._courses.values() if course.owner == owner)
        return sorted(own, key=lambda course: -course.arrived)

    def _remove(self, key: tuple[str, str]) -> None:
        course = self._courses.pop(key, None)
        if course is not None:
            self._choices -= len(course.passages)
