"""A loader that fails in the middle of a pass."""


class LoaderError(Exception):
    """The failure of a `FailingLoader`."""


class FailingLoader:
    """A loader that fails, or does something else, before a batch; the passes are counted on."""

    def __init__(self, batches, before, action=None):
        self.batches, self.left, self.action = batches, before, action

    def __iter__(self):
        for batch in self.batches:
            if self.left == 0:
                if self.action is None:
                    raise LoaderError
                self.action()
            self.left -= 1
            yield batch
