class AfterCommit:
    def __init__(self, task, plugin):
        self.f = []
        self.s = []
        self.task = task

    def add(self, f):
        self.f.append(f)

    def send(self, s):
        self.s.append(s)
        return s.freeze()

    def store(self, session):
        pass

    def run(self):
        for f in self.f:
            f()
        for s in self.s:
            s.apply_async()
        self.clear()

    def clear(self):
        self.f = []
        self.s = []
