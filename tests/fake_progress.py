"""Progress for tests: what it was told, and something to do after each step."""

from calibrate.parallel import Progress


class Told(Progress):
    """Keeps stages and steps; `then(number of steps so far)` is called after each step."""

    def __init__(self, then=lambda done: None):
        self.stages, self.steps, self._then = [], [], then
        self.n_steps = [0]  # before the first stage, and of each

    @property
    def resumed(self):
        """Whether each step was done before, bool."""
        return [resumed for _, resumed in self.steps]

    def begin(self, stage, total, work=None):
        self.stages.append((stage, total, work))
        self.n_steps.append(0)

    def advance(self, work=1.0, resumed=False):
        self.steps.append((work, resumed))
        self.n_steps[-1] += 1
        self._then(len(self.steps))


def stopping_after(count):
    """Progress that is interrupted after some steps."""

    def then(done):
        if done == count:
            raise KeyboardInterrupt

    return Told(then)
