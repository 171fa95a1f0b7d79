"""Draw pictures from a trained flow: ``recoup flow sample``."""

from __future__ import annotations

from pathlib import Path

from recoup.recipes.devices import moved
from recoup.recipes.draws import generator_for
from recoup.recipes.flow.pictures import check_picture, grid, save
from recoup.recipes.flow.trained import load_flow
from recoup.recipes.mistakes import mistakes_reported

__all__ = ["sample"]


def sample(
    checkpoint: str,
    num: int = 64,
    temperature: float = 0.7,
    out: str = "samples.png",
    seed: int = 0,
    device: str = "cpu",
) -> int:
    """Draw pictures from a trained flow, and write them into one file as a grid.

    Args:
        checkpoint: The .ckpt file of a trained flow.
        num: Number of pictures.
        temperature: Spread of the latents, 1 for that of training; less gives likelier pictures.
        out: The file to write: .png, or another that Pillow writes.
        seed: Seed of the latents.
        device: Where to run: cpu or cuda.

    Returns:
        The exit code.
    """
    with mistakes_reported():
        path = check_picture(Path(out))
        if num < 1:
            raise ValueError(f"`--num` is {num}, but must be at least 1.")
        if not temperature >= 0:
            raise ValueError(f"`--temperature` is {temperature}, but must be at least 0.")
        flow = load_flow(checkpoint).flow
        moved(flow, device)
        generator = generator_for(seed)
    images = flow.sample(num, temperature=temperature, generator=generator)
    save(grid(images.cpu(), flow.levels or 256), path)
    print(f"{num} samples at temperature {temperature:g}: {path}")
    return 0
