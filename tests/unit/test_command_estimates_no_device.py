"""An estimate runs no step, so a device that is given for one is an error, not ignored."""

from __future__ import annotations

import pytest

from recoup.__main__ import main


@pytest.mark.parametrize("device", ["abacus", "cuda"])
def test_it_is_an_error(device, capsys):
    assert main(["explain", "models:build", "--estimate", "--device", device]) == 2
    assert "`--device` needs a step that is run. Leave `--estimate` out" in capsys.readouterr().err
