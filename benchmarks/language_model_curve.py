"""A learning curve of the language model on WikiText-2: an hour for an epoch on two cores."""

from language_model import curve


def suite(device):
    """Yield the table."""
    yield "curve", curve(device)
