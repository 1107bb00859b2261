"""Small runs, in this process, that may be stopped anywhere."""

SMALL = ["data=embedded", "size=smoke", "workers=4", "compile=off"]


class Log:
    def __init__(self):
        self.lines = []

    def record(self, metrics):
        self.lines.append({key: value for key, value in metrics.items() if key not in ("seconds", "phases")})


def fit(made, log, stop=lambda: 0):
    made.members[0].log = log
    made.fit(stop=stop)
