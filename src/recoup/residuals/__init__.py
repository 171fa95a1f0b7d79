"""The ground: the saved-tensor seam, seeds and draws, regions that replay, the executor."""
