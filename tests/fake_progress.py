"""Progress for tests: what it was told, and something to do after each step."""

from calibrate.parallel.progress import Silent


class Told(Silent):
    """Keeps stages, steps and notes; `then(number of steps so far)` is called after each step."""

    def __init__(self, then=lambda done: None):
        self.stages, self.steps, self.notes, self._then = [], [], [], then
        self.left, self.all_left = None, []  # work of this stage and those ahead

    @property
    def resumed(self):
        """Whether each step was done before, bool."""
        return [resumed for _, resumed in self.steps]

    def begin(self, stage, total, work=None, ahead=None):
        self.stages.append((stage, total, work))
        self.left = None if ahead is None else work + ahead
        self.all_left.append(self.left)

    def advance(self, work=1.0, resumed=False):
        self.steps.append((work, resumed))
        if self.left is not None:
            self.left -= work
            self.all_left.append(self.left)
        self._then(len(self.steps))

    def note(self, text):
        self.notes.append(text)


def stopping_after(count):
    """Progress that is interrupted after some steps."""

    def then(done):
        if done == count:
            raise KeyboardInterrupt

    return Told(then)
