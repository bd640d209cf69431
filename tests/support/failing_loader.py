"""A loader that fails in the middle of a pass."""


class LoaderError(Exception):
    """The failure of a `FailingLoader`."""


class FailingLoader:
    """A loader that fails after some batches of all passes together.

    Args:
        batches: The batches of a pass.
        num_batches: The number of batches before the failure.
        action: A function to call in place of the failure.
    """

    def __init__(self, batches, num_batches, action=None):
        self.batches = batches
        self.num_remaining = num_batches
        self.action = action

    def __iter__(self):
        for batch in self.batches:
            if self.num_remaining == 0:
                if self.action is None:
                    raise LoaderError
                self.action()
            self.num_remaining -= 1
            yield batch
