"""Callbacks for the training loops of other libraries; import the module of the library in use."""
